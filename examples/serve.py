"""The program of `make demo-serve`: trains a run unless it exists, exports it, serves it and asks for scores.
Takes the name of the run.
"""

import json
import signal
import statistics
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import torch

from meshrec.export import Predictor
from meshrec.runs.saved_recipe import load_recipe
from meshrec.train.run_folder import find_run

RUNS = Path("runs")
NAME = sys.argv[1] if len(sys.argv) > 1 else "demo-serve"
MESHREC = [sys.executable, "-m", "meshrec"]


def ask(url: str, samples: object) -> dict[str, object]:
    body = urllib.request.Request(f"{url}/predict", json.dumps(samples).encode())
    with urllib.request.urlopen(body, timeout=60) as response:
        answer: dict[str, object] = json.load(response)
    return answer


def wait_for(url: str, server: "subprocess.Popen[str]") -> None:
    while server.poll() is None:
        try:
            urllib.request.urlopen(f"{url}/v2/health/ready", timeout=5).close()
        except OSError:
            time.sleep(0.05)
        else:
            return
    raise SystemExit("the server did not start")


def main() -> None:
    if not (RUNS / NAME).exists():
        subprocess.run(
            [*MESHREC, "train", "movielens_dlrm", "--name", NAME, "--training.epochs", "1"], check=True
        )
    package = RUNS / NAME / "model"
    if not package.exists():
        subprocess.run([*MESHREC, "export", NAME, "--out", str(package)], check=True)

    # Samples of the validation data, as a client would send them.
    dataset = load_recipe(find_run(NAME, RUNS)).data.load()
    assert dataset.validation is not None
    batch = next(iter(dataset.validation.batches(200)))
    jagged = {name: each.to_dense() for name, each in batch.sparse.to_dict().items()}
    samples = []
    for row in range(len(batch)):
        sample: dict[str, object] = {name: ids[row].tolist() for name, ids in jagged.items()}
        if batch.dense.shape[1]:
            sample["dense"] = batch.dense[row].tolist()
        samples.append(sample)

    url = "http://127.0.0.1:8097"
    began = time.perf_counter()
    server = subprocess.Popen([*MESHREC, "serve", f"clicks={package}", "--port", "8097"], text=True)
    try:
        wait_for(url, server)
        print(f"ready after {time.perf_counter() - began:.1f} s, the imports included")
        print(f"a sample: {json.dumps(samples[0])}")
        print(f"its score: {ask(url, samples[0])}")
        scores = torch.tensor(ask(url, samples)["scores"])
        predictor = Predictor(package)
        values = {name: torch.cat([ids.long() for ids in each]) for name, each in jagged.items()}
        lengths = {name: torch.tensor([len(ids) for ids in each]) for name, each in jagged.items()}
        own = predictor(batch.dense.float(), values, lengths)
        same = torch.allclose(scores, own, rtol=1e-5)
        print(f"{len(samples)} samples at once; the same without a server: {same}")
        times = []
        for sample in samples:
            start = time.perf_counter()
            ask(url, sample)
            times.append(1e3 * (time.perf_counter() - start))
        p99 = statistics.quantiles(times, n=100)[98]
        print(f"one by one, a connection each: p50 {statistics.median(times):.1f} ms, p99 {p99:.1f} ms")
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(60)
    print(f"the server ended with exit code {server.returncode}")


if __name__ == "__main__":
    main()
