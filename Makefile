# The only thing to remember: make demo, make test, make lint, make bench.
PYTHON ?= python3
CXX ?= c++
VENV ?= .venv
# The release of TorchRec to compare with: 1.8.0, beside the torch of constraints.txt, or 1.9.2, which needs torch
# 2.14.1 (on PyPI a CUDA build: 5.5 GB). `make parity PEER=1.9.2` has an environment of its own.
PEER ?= 1.8.0
PEER_TORCH_1.8.0 := $(shell sed -n 's/^torch==//p' constraints.txt)
PEER_TORCH_1.9.2 := 2.14.1
PEER_FBGEMM_1.8.0 := 1.8.0
PEER_FBGEMM_1.9.2 := 1.9.0
VENV_PEERS ?= .venv-peers$(if $(filter-out 1.8.0,$(PEER)),-$(PEER))
VENV_CLIENTS ?= .venv-clients
# Of `make test-torch`: the version, its environment, and what runs there.
TORCH ?= 2.14.1
VENV_TORCH = .venv-torch-$(TORCH)
# Triton 3.6, of torch 2.10, interprets no kernel beside NumPy 2.4, which turned a deprecated conversion into an error.
NUMPY_OF_TORCH_2.10.0 := "numpy<2.4"
TORCH_TESTS ?= $(addprefix tests/,sparse ops modules tables distributed quant checkpoint pipeline export compat)
# What binds to torch's internals: operators, autograd, collectives, DTensor, TorchScript. CI runs it with TORCH.
TORCH_INTERNALS := $(addprefix tests/,$(addprefix comms/test_,agreement.py collectives.py joining.py timeouts.py) \
	ops/test_operators.py ops/tbe/test_autograd.py ops/tbe/test_kernels_errors.py quant/test_sharded.py \
	distributed/test_input_dist.py distributed/test_split_tensor.py export/test_torchscript.py)
BIN := $(VENV)/bin
PEERS := $(VENV_PEERS)/bin
STAMP := $(VENV)/.installed
STAMP_DOCS := $(VENV)/.installed-docs
STAMP_PEERS := $(VENV_PEERS)/.installed
PIP_INSTALL := pip install --quiet --disable-pip-version-check -c constraints.txt
PIP_INSTALL_PEERS = $(subst -c ,-c $(VENV_PEERS)/,$(PIP_INSTALL))

KERNELS := src/meshrec/libmeshrec.so
KERNEL_SOURCES := $(wildcard $(foreach kind,cpp h inl,csrc/*.$(kind) csrc/*/*.$(kind)))
CPP := $(KERNEL_SOURCES) $(wildcard benchmarks/*.cpp tests/export/*.cpp)

# The kernels with the address and undefined-behaviour sanitizers, beside the real ones and never in their place.
# Triton's kernels have none of that code.
SANITIZED := build/sanitize/lib/meshrec/libmeshrec.so
SANITIZE_FLAGS := -O1 -g1 -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize=vptr -fno-sanitize-recover=all
# libstdc++ is preloaded too: the sanitizer looks for its throw before Python has loaded it.
SANITIZING = LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so.6)" \
	ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 UBSAN_OPTIONS=print_stacktrace=1 MESHREC_LIBRARY=$(SANITIZED)
# And with the thread sanitizer: torch's threads are then std::threads, as it does not see how OpenMP's meet.
THREADED := build/races/lib/meshrec/libmeshrec.so
THREAD_FLAGS := -O1 -g1 -fno-omit-frame-pointer -fsanitize=thread

# One wheel for every Python and torch that are served: the kernels bind to libtorch's stable ABI only.
WHEELS := dist

.PHONY: demo demo-serve mutations paths hostile test thorough test-torch test-torch-internals torch lint format build wheel wheel-test bench gpu sanitize races peers clients lock parity peer-tests kills hosts example notebooks docs docs-anew clean

# Trains on real data over 2 ranks; DEMO adds options, such as DEMO="--training.epochs 1".
demo: build
	$(BIN)/python -m meshrec train movielens_dlrm --nproc 2 --baselines $(DEMO)

# Trains if need be, exports, serves the model, asks it and stops.
demo-serve: build
	$(BIN)/python examples/serve.py

# 60,000 changed requests in place of the 300 of `make test`, on the kernels with the sanitizers.
mutations: build $(SANITIZED)
	$(SANITIZING) MESHREC_MUTATIONS=10000 $(BIN)/python -m pytest -p no:cacheprovider tests/serve/test_mutations.py

# 20 drawn models of clicks and 20 of histories with 10 drawn inputs each, in place of the few of `make test`.
paths: build
	MESHREC_PATHS=20 $(BIN)/python -m pytest -n 2 tests/serve/test_paths.py

# 1,000 damages of each kind, 10,000 bad requests and 20 stopped ranks in place of the few of `make test`; and 50
# kills of the processes around a stream.
hostile: build
	mkdir -p build && rm -f build/hostile.jsonl
	MESHREC_HOSTILE=1000 MESHREC_HOSTILE_TABLE=$$PWD/build/hostile.jsonl \
		$(BIN)/python -m pytest -n 2 --dist worksteal tests/hostile; status=$$?; \
		$(BIN)/python tests/hostile/table.py build/hostile.jsonl; exit $$status

# Every worker imports 600 test files: without bytecode that takes twice the time.
test thorough: export PYTHONDONTWRITEBYTECODE :=

# Three workers on two cores: a third of the suite's time is waiting for child processes.
test: build
	$(BIN)/python -m pytest -n 3 --dist worksteal --durations=10

# The suite with more seeds, kernel variants and parameters than `make test` draws.
thorough: build
	MESHREC_THOROUGH=1 MESHREC_PATHS=4 MESHREC_KILLS=6 $(BIN)/python -m pytest -n 3 --dist worksteal

# The core folders of the suite with another torch: `make test-torch TORCH=2.15.0`.
test-torch: build torch
	$(VENV_TORCH)/bin/python -m pytest -n 2 --dist worksteal --durations=10 $(TORCH_TESTS)

test-torch-internals:
	$(MAKE) test-torch TORCH_TESTS="$(TORCH_INTERNALS)"

# An environment that has this torch, and everything else from $(VENV). With CUDA, as on PyPI, it takes 5 to 7 GB.
torch: $(VENV_TORCH)/.installed

.venv-torch-%/.installed: | $(STAMP)
	test -x $(@D)/bin/python || $(BIN)/python -m venv $(@D)
	$(@D)/bin/pip install --quiet --disable-pip-version-check torch==$* $(NUMPY_OF_TORCH_$*)
	$(BIN)/python -c "import sysconfig; print('import site; site.addsitedir(%r)' % sysconfig.get_path('purelib'))" \
		> "$$($(@D)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/shared.pth"
	touch $@

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(CPP)

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP)

build: $(STAMP) $(KERNELS)

# The kernels have a rule of their own below: it compiles only what changed.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/$(PIP_INSTALL) torch "setuptools>=78.1.1" wheel
	MESHREC_NO_KERNELS=1 $(BIN)/$(PIP_INSTALL) --no-build-isolation -e ".[dev]"
	touch $@

$(KERNELS): $(KERNEL_SOURCES) src/meshrec/ops/schemas.inc src/meshrec/ops/tbe/formulas.py setup.py | $(STAMP)
	$(BIN)/python setup.py --quiet build_ext --inplace
	test ! -e $@ || touch $@

wheel: $(STAMP)
	rm -rf $(WHEELS) build/lib.*
	$(BIN)/pip wheel --quiet --disable-pip-version-check --no-build-isolation --no-deps -w $(WHEELS)/plain .
	PATH="$$PWD/$(BIN):$$PATH" $(BIN)/auditwheel repair --exclude 'libtorch*' --exclude 'libc10*' \
		-w $(WHEELS) $(WHEELS)/plain/*.whl
	rm -rf $(WHEELS)/plain
	$(BIN)/python setup.py --quiet sdist --dist-dir $(WHEELS)
	ls $(WHEELS)

# The kernels' tests with the wheel in an empty environment, where no compiler is to be found. WHEEL_TORCH is the
# torch to install there.
WHEEL_TORCH ?= torch
wheel-test: wheel
	rm -rf build/wheel && $(PYTHON) -m venv build/wheel/venv
	build/wheel/venv/bin/$(PIP_INSTALL) $(WHEEL_TORCH) pytest pytest-timeout pytest-xdist hypothesis $(WHEELS)/*.whl
	mkdir -p build/wheel/bin && cp -r tests build/wheel/
	cd build/wheel && env -u CXX PATH="$$PWD/venv/bin" venv/bin/python -m pytest -q -p no:cacheprovider \
		--import-mode=importlib -W error tests/ops/tbe/test_kernels.py tests/ops/tbe/test_kernels_update.py tests/ops/jagged

# FBGEMM and TorchRec, to compare with in one process; they stay out of the environment that runs the tests.
peers: $(STAMP_PEERS) $(KERNELS)

# Not at the same time as the other environment: both build what they install in this folder.
$(STAMP_PEERS): pyproject.toml constraints.txt | $(STAMP)
	test -n "$(PEER_TORCH_$(PEER))" || { echo "PEER must be 1.8.0 or 1.9.2, got $(PEER)"; exit 1; }
	test -x $(PEERS)/python || $(PYTHON) -m venv $(VENV_PEERS)
	# TorchRec takes another torchmetrics.
	{ grep -v -e '^torch==' -e '^torchmetrics' constraints.txt; echo "torch==$(PEER_TORCH_$(PEER))"; } \
		> $(VENV_PEERS)/constraints.txt
	$(PEERS)/$(PIP_INSTALL_PEERS) torch "setuptools>=78.1.1" wheel pytest pytest-timeout hypothesis numpy \
		fbgemm-gpu-cpu==$(PEER_FBGEMM_$(PEER)) tensordict torchmetrics==1.0.3 tqdm pyre-extensions parameterized
	$(PEERS)/$(PIP_INSTALL_PEERS) --no-deps torchrec==$(PEER)
	MESHREC_NO_KERNELS=1 $(PEERS)/$(PIP_INSTALL_PEERS) --no-build-isolation -e ".[cli,serve,movielens]" scikit-learn
	touch $@

# Clients of other servers, each in an environment without MeshRec. What they send is recorded for `make test`.
CLIENTS := mlserver==1.7.1 kserve==0.21.0
clients: build
	for client in $(CLIENTS); do \
		venv=$(VENV_CLIENTS)/$${client%%==*}; \
		test -x $$venv/bin/python || $(PYTHON) -m venv $$venv || exit 1; \
		$$venv/bin/pip install --quiet --disable-pip-version-check $$client || exit 1; \
	done
	MESHREC_CLIENTS=$$PWD/$(VENV_CLIENTS) $(BIN)/python -m pytest tests/serve/test_clients.py

# Writes constraints.txt: the newest versions of everything beside the torch that it names, with and without the
# extras that hold others back. Then run the suite.
EXTRAS := cli,dask,data,docs,index,lightgbm,metrics,mlflow,movielens,ray,serve,sign,streams,train,tune,wandb,dev
lock:
	rm -rf build/lock
	for extras in dev $(EXTRAS); do \
		venv=build/lock/$$extras && $(PYTHON) -m venv $$venv \
		&& $$venv/bin/pip install --quiet "$$(grep ^torch== constraints.txt)" "setuptools>=78.1.1" wheel \
		&& MESHREC_NO_KERNELS=1 $$venv/bin/pip install --quiet --no-build-isolation -e ".[$$extras]" || exit 1; \
	done
	$(PYTHON) tests/packaging/lock.py build/lock/*/bin/python > build/lock/constraints.txt
	mv build/lock/constraints.txt constraints.txt

# TORCHREC is a checkout of TorchRec. Its unit tests run through the bridge; what fails is in docs/torchrec/tests.md.
peer-tests: build
	test -d "$(TORCHREC)/torchrec" || { echo "TORCHREC must be a checkout of TorchRec, got '$(TORCHREC)'"; exit 1; }
	$(BIN)/$(PIP_INSTALL) parameterized pyre-extensions tensordict
	$(BIN)/python -W ignore tests/compat/torchrec/peer_tests.py $(TORCHREC)

parity: peers
	$(PEERS)/python -m pytest -m peers $$(grep -rl mark.peers tests)

bench: peers
	$(PEERS)/python -m benchmarks

# Checks and measures the GPU path with whatever torch for CUDA is there; nothing is downloaded or compiled.
# GPU_PYTHON names the interpreter where it is not found. Eight minutes at most.
gpu:
	$(PYTHON) -m benchmarks.gpu

# Twenty killed ranks in place of the three of `make test`: about two minutes.
kills: build
	MESHREC_KILLS=20 $(BIN)/python -m pytest -s tests/checkpoint/test_kills.py

# Hosts made of namespaces: 20 killed hosts (8 under torchrun, 6 each under Slurm and Ray, where these are installed);
# faults for the doctor. Root and half an hour. HOSTS=1 kills one under each.
HOSTS ?= 20
hosts: build
	$(BIN)/$(PIP_INSTALL) "ray[train]>=2.52" kubeflow-training
	MESHREC_HOSTS=$(HOSTS) $(BIN)/python -m pytest -s tests/hosts tests/cluster

example: build
	$(BIN)/python examples/first.py
	$(BIN)/python examples/larger_than_memory.py

# The tutorials run to make their pages, as notebooks in a Jupyter kernel; a cell that fails ends it. Lists that the
# source knows better are written from it. `make -j 2 docs` runs two at a time, which the figures of those that measure
# do not take well.
GENERATED := docs/_generated
SCRIPTS := $(wildcard examples/[0-9]_*.py)
TUTORIALS := $(patsubst examples/%.py,$(GENERATED)/tutorials/%.md,$(SCRIPTS))

docs: $(TUTORIALS)
	$(BIN)/python docs/errors.py $(GENERATED)/errors.md
	$(BIN)/python docs/command_line.py $(GENERATED)/cli.md
	$(BIN)/python docs/house.py $(GENERATED)/house.md
	$(BIN)/python -m sphinx -q -W --keep-going -b html docs docs/_build
	@echo "open docs/_build/index.html"

$(TUTORIALS): $(GENERATED)/tutorials/%.md: examples/%.py docs-anew
	$(BIN)/python docs/notebooks.py $< $(@D)

# Makes the notebooks in examples/notebooks of the tutorials' scripts.
notebooks:
	$(PYTHON) docs/notebooks.py

docs-anew: build $(STAMP_DOCS)
	rm -rf $(GENERATED) docs/_build

$(STAMP_DOCS): $(STAMP)
	MESHREC_NO_KERNELS=1 $(BIN)/$(PIP_INSTALL) --no-build-isolation -e ".[docs]"
	touch $@

sanitize: build $(SANITIZED)
	$(SANITIZING) $(BIN)/python -m pytest -n 2 -p no:cacheprovider --ignore-glob="*/test_triton*" tests/ops

# A race is reported into a file, as pytest keeps what a test prints, and fails the run as it ends.
races: build $(THREADED)
	rm -f build/races/report.*
	LD_PRELOAD="$$($(CXX) -print-file-name=libtsan.so)" MESHREC_LIBRARY=$(THREADED) \
	TSAN_OPTIONS=suppressions=csrc/races.supp:log_path=build/races/report \
	$(BIN)/python -m pytest -p no:cacheprovider -m threads tests/ops || { cat build/races/report.* 2>/dev/null; exit 1; }

$(SANITIZED): FLAGS := $(SANITIZE_FLAGS)
$(THREADED): FLAGS := $(THREAD_FLAGS)
$(SANITIZED) $(THREADED): build/%/lib/meshrec/libmeshrec.so: $(KERNEL_SOURCES) src/meshrec/ops/schemas.inc src/meshrec/ops/tbe/formulas.py setup.py | $(STAMP)
	CXXFLAGS="$(FLAGS)" LDFLAGS="$(FLAGS)" $(BIN)/python setup.py --quiet \
		build_ext --build-lib build/$*/lib --build-temp build/$*/objects
	test -e $@ && touch $@

clean:
	rm -rf build $(VENV) .venv-peers* $(KERNELS) src/*.egg-info
