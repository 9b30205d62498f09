"""The server beside MLServer 1.7 on the same package: samples per CPU second, and latency of one sample.

Both get the same JSON, because MLServer takes no binary tensors over HTTP. MLServer runs in `.venv-mlserver`,
which `make mlserver` creates (the variable MLSERVER_PYTHON names the Python of another environment), and
calls the package through `mlserver_runtime`.
"""

import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.harness import Effort, Result, table
from benchmarks.serve import (
    INFER,
    TINY,
    Inputs,
    Running,
    Shape,
    free_port,
    inputs_of,
    package_of,
    serving,
    started,
)
from benchmarks.serve_load import http
from meshrec.export import Predictor

_ROOT = Path(__file__).parents[1]
_PYTHON = Path(os.environ.get("MLSERVER_PYTHON", _ROOT / ".venv-mlserver" / "bin" / "python"))


class Figures(NamedTuple):
    samples_per_cpu_second: float
    p50_ms: float


def run(effort: Effort, *, tiny: bool = False) -> Result:
    """Verify that both give the scores of the package, then time them. There are no bars."""
    if not _PYTHON.exists():
        print(f"MLServer is left out: there is no {_PYTHON}. `make mlserver` installs it.")
        return Result({}, [])
    shape = TINY if tiny else Shape()
    with tempfile.TemporaryDirectory() as folder:
        package = package_of(shape, Path(folder) / "package")
        predictor = Predictor(package)
        samples = [inputs_of(shape, predictor.features, batch) for batch in (shape.batch, 1)]
        with serving(package) as server:
            ours = _figures(server, predictor, samples, shape.seconds)
        port = free_port()
        command = [str(_PYTHON.parent / "mlserver"), "start", str(_settings(Path(folder), package, port))]
        path = os.pathsep.join([str(_ROOT), str(_ROOT / "src")])
        with started(command, port, {"PYTHONPATH": path}) as server:
            theirs = _figures(server, predictor, samples, shape.seconds)
    rows = [
        [name, *(f"{each:.2f}" for each in found)]
        for name, found in (("meshrec", ours), ("MLServer", theirs))
    ]
    rows.append(["MLServer over meshrec", *(f"{a / b:.2f}" for a, b in zip(theirs, ours, strict=True))])
    print(table(["the same JSON", *Figures._fields], rows))
    return Result({"meshrec": ours._asdict(), "mlserver": theirs._asdict()}, [])


def _settings(folder: Path, package: Path, port: int) -> Path:
    place = folder / "mlserver"
    place.mkdir()
    server = {
        "host": "127.0.0.1",
        "http_port": port,
        "grpc_port": free_port(),
        "metrics_port": free_port(),
        "parallel_workers": 0,
        "debug": False,
    }
    model = {
        "name": "model",
        "implementation": "benchmarks.mlserver_runtime.Package",
        "parameters": {"uri": str(package)},
    }
    (place / "settings.json").write_text(json.dumps(server))
    (place / "model-settings.json").write_text(json.dumps(model))
    return place


def _figures(server: Running, predictor: Predictor, samples: list[Inputs], seconds: float) -> Figures:
    for inputs in samples:
        said = json.loads(server.ask(_json_request(inputs)))
        np.testing.assert_allclose(said["outputs"][0]["data"], predictor(*inputs).numpy(), rtol=1e-5)
    large, one = map(_json_request, samples)
    before = server.cpu_seconds()
    done = server.load(large, clients=2, seconds=seconds)
    num_samples = done.statuses[200] * len(samples[0][0])
    rate = num_samples / (server.cpu_seconds() - before)
    alone = server.load(one, clients=1, seconds=seconds).seconds[200]
    return Figures(rate, 1e3 * statistics.median(alone))


def _json_request(inputs: Inputs) -> bytes:
    dense, values, lengths = inputs
    tensors = [
        {"name": "dense", "datatype": "FP32", "shape": list(dense.shape), "data": dense.flatten().tolist()}
    ]
    for f in values:
        for name, kind, tensor in (("values", "INT64", values[f]), ("lengths", "INT32", lengths[f])):
            tensors.append(
                {
                    "name": f"{f}.{name}",
                    "datatype": kind,
                    "shape": list(tensor.shape),
                    "data": tensor.tolist(),
                }
            )
    return http(INFER, json.dumps({"inputs": tensors}).encode(), {"Content-Type": "application/json"})
