# %% [markdown]
# # From a run to a server
#
# A trained model answers requests: over HTTP, from clients that the field already has, and from C++
# without Python. This tutorial trains the demo's model for one epoch, exports it, serves it, and asks
# it in four ways. The commands are the ones that a user would type.

# %%
import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import numpy as np
import tritonclient.http as triton

import meshrec
from meshrec.export import Predictor, library_path

place = Path(tempfile.mkdtemp(prefix="meshrec-tutorial-"))


def run(*words: object, lines: int = 4, **options: object) -> str:
    """Run a command in a temporary folder, and print the last lines of its output."""
    command = [str(word) for word in words]
    done = subprocess.run(command, cwd=place, capture_output=True, text=True, **options)  # type: ignore[call-overload]
    if done.returncode:
        raise RuntimeError(done.stderr)
    print("\n".join(done.stdout.splitlines()[-lines:]))
    return str(done.stdout)


MESHREC = [sys.executable, "-W", "ignore", "-m", "meshrec"]
run(*MESHREC, "train", "movielens_dlrm", "--training.epochs", "1", "--name", "demo", "--quiet")

# %% [markdown]
# ## The package
#
# `meshrec export` compiles the model for this machine and writes its weights into one file, which is
# mapped and never copied. With `--shared`, a second program looks up once what belongs to the user, for
# requests that rank many items: here the user and the history of rated items.

# %%
run(*MESHREC, "export", "demo", "--out", "clicks", "--shared", "user", "history")
for path in sorted((place / "clicks").iterdir()):
    print(f"{path.name:20} {path.stat().st_size:>12,} bytes")

# %% [markdown]
# ## The server
#
# It is ready when the model has scored samples that it made up.

# %%
server = subprocess.Popen(
    [*MESHREC, "serve", "clicks", "--port", "0"], cwd=place, stderr=subprocess.PIPE, text=True
)
assert server.stderr is not None
url = ""
while not url:
    line = server.stderr.readline()
    if not line:
        raise RuntimeError(f"the server ended with {server.wait()}")
    url = next((word for word in line.split() if word.startswith("http://")), "")
began = time.perf_counter()
while True:
    try:
        urllib.request.urlopen(f"{url}/v2/health/ready", timeout=60).close()
        break
    except OSError:
        time.sleep(0.02)
print(f"ready {time.perf_counter() - began:.2f} s after it listened")

# %% [markdown]
# ## Ask with curl
#
# One JSON object for each sample: an id or a list of ids for each feature, and the dense values. (A run
# that fitted its features on raw columns takes these instead: `{"user": "u17", "price": 3.5}`. See the
# page on the room `serve`.)

# %%
sample = {"dense": [0.9], "user": 17, "movie": 300, "genres": [3, 7], "year": 40, "history": [12, 99, 7]}
run("curl", "-s", f"{url}/predict", "-d", json.dumps(sample))

# %% [markdown]
# What cannot be is refused with a reason, and harms nobody else's request:

# %%
run("curl", "-s", f"{url}/predict", "-d", json.dumps({**sample, "movie": 10**9}))

# %% [markdown]
# ## Rank many items for one user
#
# Values that all samples share are given once. The scores equal those of the same values repeated, and
# come faster.

# %%
user = {name: sample[name] for name in ("user", "history")}
movies = [{"dense": [0.9], "movie": movie, "genres": [movie % 19], "year": 40} for movie in range(500)]


def seconds_of(body: object) -> tuple[float, np.ndarray]:
    """Return the seconds of the fastest of some requests, and the scores."""
    data, found = json.dumps(body).encode(), []
    for _ in range(10):
        start = time.perf_counter()
        with urllib.request.urlopen(urllib.request.Request(f"{url}/predict", data), timeout=60) as answer:
            scores = np.array(json.load(answer)["scores"])
        found.append(time.perf_counter() - start)
    return min(found), scores


shared, ranked = seconds_of({"shared": user, "samples": movies})
plain, scores = seconds_of([{**user, **movie} for movie in movies])
np.testing.assert_allclose(ranked, scores, rtol=1e-5)
print(f"500 movies: {1e3 * shared:.1f} ms with the user once, {1e3 * plain:.1f} ms with the user repeated")
print("the best:", np.argsort(-ranked)[:5])

# %% [markdown]
# ## Ask with a client of the field
#
# The server speaks the Open Inference Protocol, version 2. Tensors go in binary: the ids of all samples
# end to end, and how many of them each sample has.

# %%
client = triton.InferenceServerClient(url.removeprefix("http://"))
inputs = []
for name, kind, array in [
    ("dense", "FP32", np.array([sample["dense"]], np.float32)),
    *(
        tensor
        for feature in ("user", "movie", "genres", "year", "history")
        for ids in [np.atleast_1d(np.array(sample[feature], np.int64))]
        for tensor in [
            (f"{feature}.values", "INT64", ids),
            (f"{feature}.lengths", "INT32", np.array([len(ids)], np.int32)),
        ]
    ),
]:
    inputs.append(triton.InferInput(name, list(array.shape), kind))
    inputs[-1].set_data_from_numpy(array)
score = client.infer("clicks", inputs).as_numpy("scores")
client.close()
print(score)

# %% [markdown]
# ## From C++, without Python
#
# `csrc/runtime` is a CMake project of one header and one library; `meshrec-predict` is a small program
# that links it. It reads a sample a line: dense values, then a bar and ids for each feature. The bits
# are those that Python gives for the same package.

# %%
import torch

source = Path(meshrec.__file__).parents[2] / "csrc" / "runtime"
where = [
    f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}",
    f"-DMESHREC_LIBRARY={library_path()}",
]
run("cmake", "-S", source, "-B", "build", *where, lines=1)
run("cmake", "--build", "build", lines=1)
names = ("user", "movie", "genres", "year", "history")
bars = [" ".join(map(str, np.atleast_1d(np.array(sample[name])))) for name in names]
said = run("build/meshrec-predict", "clicks", input=" | ".join(["0.9", *bars]) + "\n")

values = {name: torch.tensor(sample[name]).reshape(-1) for name in names}
lengths = {name: torch.tensor([len(ids)]) for name, ids in values.items()}
own = Predictor(place / "clicks")(torch.tensor([[0.9]]), values, lengths)
assert np.float32(said) == own.numpy()[0], "C++ and Python give the same bits"
np.testing.assert_allclose(own.numpy(), score, rtol=1e-5)

# %% [markdown]
# ## The end
#
# SIGTERM ends the server after the last answer. The page on `serve` has more: fresh weights from a
# running training, several models and workers, metrics for Prometheus, limits and deadlines.

# %%
server.terminate()
print("the server ended with exit code", server.wait(60))
