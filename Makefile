# The only thing to remember: make test, make lint, make bench.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
KERNELS := src/meshrec/libmeshrec.so
CPP := $(wildcard csrc/*.cpp csrc/*.h csrc/*.inl)

.PHONY: test lint format build bench clean

test: build
	$(BIN)/python -m pytest -n 2

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

$(STAMP): pyproject.toml constraints.txt setup.py
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt "torch==2.13.0" "setuptools>=77" wheel
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt --no-build-isolation -e ".[dev]"
	touch $(STAMP)

$(KERNELS): $(CPP) src/meshrec/ops/schemas.inc setup.py | $(STAMP)
	$(BIN)/python setup.py --quiet build_ext --inplace
	test ! -e $(KERNELS) || touch $(KERNELS)

bench: build
	$(BIN)/python -m benchmarks

clean:
	rm -rf build $(VENV) $(KERNELS) src/*.egg-info
