"""Runs on Ray: the ranks are workers of a `ray.train.torch.TorchTrainer`, which starts them again when one
fails.

The workers form Ray's process group and do what ranks of `meshrec train` do. The run has its folder in
storage that all nodes reach. Each evaluation, and every so many steps, a worker reports metrics to Ray with
a pointer to the newest checkpoint; the checkpoint itself is written once, into the run's folder, by all
workers. When Ray starts the workers again, on as many as there are, they find the run by the ID of the
launch and go on from its last checkpoint.
"""

import json
import os
import tempfile
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from meshrec.checkpoint import find_checkpoint
from meshrec.comms.joining import interface_towards
from meshrec.data.faults import needs
from meshrec.runs.host_folder import LAUNCH_VARIABLE
from meshrec.runs.job import Job
from meshrec.runs.worker import work
from meshrec.train.observers import Evaluated, Event, Logged
from meshrec.train.recipe import Recipe
from meshrec.train.run_folder import RUNS, RunFolder
from meshrec.train.sources import Parquet

if TYPE_CHECKING:
    from ray.data import Dataset
    from ray.train import Checkpoint, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

REPORT_EVERY = 100
"""Steps between two reports of training metrics to Ray. All workers wait for each other in a report."""
_POINTER = "meshrec.json"
_INTERFACE = "GLOO_SOCKET_IFNAME"


def trainer(
    recipe: Recipe,
    scaling: "ScalingConfig",
    *,
    out: Path | str = RUNS,
    run_config: "RunConfig | None" = None,
    report_every: int = REPORT_EVERY,
    **options: Any,
) -> "TorchTrainer":
    """Return a trainer of Ray that trains a recipe; ``fit()`` runs it.

    Args:
        recipe: the recipe. Ray sends it to the workers, so that it must be picklable.
        scaling: the number of workers, or the smallest and largest number, and their resources.
        out: the folder of runs, which all nodes reach.
        run_config: Ray's options of a run, such as ``FailureConfig(max_failures=3)``.
        report_every: steps between two reports of training metrics to Ray.
        options: further options of `meshrec.runs.job.Job`, such as ``name`` and ``resume``.

    Raises:
        ModuleNotFoundError: Ray is not installed.
    """
    torch_train = needs("ray.train.torch", "ray")
    device = "cuda" if scaling.use_gpu else "cpu"
    job = Job(recipe=recipe, runs=Path(out).absolute(), device=device, **options)
    made: TorchTrainer = torch_train.TorchTrainer(
        _train,
        train_loop_config={"job": job, "launch": f"ray-{uuid.uuid4()}", "report_every": report_every},
        scaling_config=scaling,
        run_config=run_config,
        torch_config=_torch_config(),
    )
    return made


def checkpoint_path(checkpoint: "Checkpoint") -> Path:
    """Return the path of the checkpoint of a run to which a checkpoint of Ray points.

    Raises:
        ValueError: it is no checkpoint that a worker of ours has reported.
    """
    with checkpoint.as_directory() as folder:
        pointer = Path(folder) / _POINTER
        if not pointer.is_file():
            raise ValueError(
                f"{checkpoint.path} has no {_POINTER}: it is not a checkpoint of MeshRec. Take one "
                "that a run of "
                "meshrec.train.ray has reported."
            )
        return Path(json.loads(pointer.read_text())["path"])


def data_source(
    train: "Dataset",
    validation: "Dataset | None" = None,
    test: "Dataset | None" = None,
    *,
    folder: Path | str,
    features: Any,
    **options: Any,
) -> Parquet:
    """Return datasets of Ray Data as a source of samples.

    Ray runs the datasets once, on all its nodes, and writes their rows as Parquet files, from which the
    ranks read. So a run that starts again, also on another number of workers, continues at the exact sample;
    a stream of Ray has no such place. Parts that are written already are not written again.

    Args:
        train: training rows; with a split, all rows.
        validation: validation rows.
        test: test rows.
        folder: a folder that all nodes reach, for the files.
        features: the features to make of the columns: `meshrec.data.features.Features`.
        options: further options of `meshrec.train.Parquet`, such as ``split_by``.
    """
    places: dict[str, tuple[str, ...] | None] = {}
    for name, part in (("train", train), ("validation", validation), ("test", test)):
        places[name] = None if part is None else (str(_written(part, Path(folder).absolute() / name)),)
    assert places["train"] is not None
    return Parquet(
        train=places["train"],
        validation=places["validation"],
        test=places["test"],
        features=features,
        **options,
    )


def _written(part: "Dataset", place: Path) -> Path:
    if not place.is_dir():
        scratch = place.with_name(f".{place.name}-{uuid.uuid4().hex[:8]}")
        part.write_parquet(str(scratch))
        scratch.replace(place)
    return place


@dataclass
class _Reporter:
    """Reports events to Ray. It exists on every worker, and all of them report at the same steps."""

    every: int
    folder: RunFolder | None = None
    reported: int = -1
    """The step of the newest checkpoint that was reported."""

    def __call__(self, event: Event) -> None:
        is_due = isinstance(event, Logged) and event.line["step"] % self.every == 0
        if isinstance(event, Logged | Evaluated) and (is_due or isinstance(event, Evaluated)):
            self._report(event.line)

    def _report(self, line: Mapping[str, Any]) -> None:
        train: Any = needs("ray.train", "ray")
        metrics = {name: value for name, value in line.items() if isinstance(value, int | float | str)}
        newest = self._newest()
        if newest is None:
            train.report(metrics)
            return
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / _POINTER).write_text(json.dumps({"path": str(newest)}))
            train.report(metrics, checkpoint=train.Checkpoint.from_directory(folder))

    def _newest(self) -> Path | None:
        """Return the newest finished checkpoint if it was not reported; on the first worker only."""
        if self.folder is None:
            return None
        try:
            found = find_checkpoint(self.folder.path, last=True)
        except ValueError:
            return None
        step = int(found.name.removeprefix("step-"))
        if step <= self.reported:
            return None
        self.reported = step
        return found


def _train(config: dict[str, Any]) -> None:
    """Train as one worker."""
    os.environ[LAUNCH_VARIABLE] = config["launch"]
    threads = os.environ.get("OMP_NUM_THREADS")
    if threads is not None:
        torch.set_num_threads(int(threads))
    reporter = _Reporter(config["report_every"])

    def screen(folder: RunFolder) -> Any:
        reporter.folder = folder
        return lambda event: None

    summary = work(replace(config["job"], on_event=reporter), screen)
    if summary["state"] == "failed":
        raise RuntimeError(summary["error"])


def _torch_config() -> Any:
    """Return Ray's configuration of the process group, with an interface that leads to the first worker."""
    config: Any = needs("ray.train.torch.config", "ray")

    class Backend(config._TorchBackend):  # type: ignore[misc]
        def on_start(self, worker_group: Any, backend_config: Any) -> None:
            address, port = worker_group.execute_single(0, config.get_address_and_port)
            worker_group.execute(_listen_towards, address, port)
            super().on_start(worker_group, backend_config)

    class Config(config.TorchConfig):  # type: ignore[misc]
        @property
        def backend_cls(self) -> type:
            return Backend

    return Config()


def _listen_towards(host: str, port: int) -> None:
    name = interface_towards(host, port)
    if name is not None:
        os.environ.setdefault(_INTERFACE, name)
