"""Train on Ray: ranks are workers of a `ray.train.torch.TorchTrainer`, which restarts them after a failure.

The workers form a process group, and then work like the ranks of `meshrec train`. The run folder is in
storage shared by all nodes. All workers together write checkpoints there. After every evaluation, and every
few steps, a worker reports metrics to Ray, with a pointer to the newest checkpoint instead of a copy. After a
restart, on any number of workers, they find the run by the launch ID and continue from the last checkpoint.
"""

import json
import os
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from meshrec.checkpoint import find_checkpoint
from meshrec.comms.joining import form_group
from meshrec.data.faults import needs
from meshrec.durable import durable_folder, scratch_folder
from meshrec.runs.host_folder import LAUNCH_VARIABLE
from meshrec.runs.job import Job
from meshrec.runs.worker import run_rank
from meshrec.train.observers import Evaluated, Event, Logged
from meshrec.train.recipe import Recipe
from meshrec.train.run_folder import RUNS, RunFolder
from meshrec.train.sources import Parquet

if TYPE_CHECKING:
    from ray.data import Dataset
    from ray.train import Checkpoint, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

REPORT_EVERY = 100
"""Steps between reports of training metrics to Ray. Frequent reports cost time, because all workers wait for
one another in a report.
"""
_POINTER = "meshrec.json"
"""File in a Ray checkpoint with the path of the run's checkpoint."""


def trainer(
    recipe: Recipe,
    scaling: "ScalingConfig",
    *,
    out: Path | str = RUNS,
    run_config: "RunConfig | None" = None,
    report_every: int = REPORT_EVERY,
    **options: Any,
) -> "TorchTrainer":
    """Create a Ray trainer for a recipe. Its method ``fit()`` starts the run.

    Args:
        recipe: the recipe. Ray sends it to the workers, so it must be picklable.
        scaling: number of workers (or minimum and maximum), and resources per worker.
        out: folder with all run folders, shared by all nodes.
        run_config: Ray run options, such as ``FailureConfig(max_failures=3)``.
        report_every: steps between reports of training metrics to Ray.
        options: further options for `meshrec.runs.job.Job`, such as ``name`` and ``resume``.

    Raises:
        ModuleNotFoundError: Ray is not installed.
    """
    torch_train = needs("ray.train.torch", "ray")
    device = "cuda" if scaling.use_gpu else "cpu"
    # The path is absolute, because Ray runs the workers in other working directories.
    job = Job(recipe=recipe, runs=Path(out).absolute(), device=device, **options)
    torch_trainer: TorchTrainer = torch_train.TorchTrainer(
        _train,
        train_loop_config={"job": job, "launch": f"ray-{uuid.uuid4()}", "report_every": report_every},
        scaling_config=scaling,
        run_config=run_config,
        torch_config=_torch_config(),
    )
    return torch_trainer


def checkpoint_path(checkpoint: "Checkpoint") -> Path:
    """Return the path of the MeshRec checkpoint to which a Ray checkpoint points.

    Raises:
        ValueError: the Ray checkpoint was not reported by a MeshRec run.
    """
    # Only the pointer passes through Ray's storage. `as_directory` downloads it where that storage is remote.
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
    """Write Ray Data datasets to Parquet files, and return a data source for the files.

    Ray executes the datasets once, on all nodes. Ranks then read the files, so a restarted run can continue
    at the exact sample, on any number of workers. A Ray stream does not have such a position.

    A restarted run reuses the files: a dataset is not written if ``folder`` already has the folder ``train``,
    ``validation`` or ``test`` for it.

    Args:
        train: training rows, or all rows if ``options`` have a split.
        validation: validation rows.
        test: test rows.
        folder: folder for the files, shared by all nodes.
        features: `meshrec.data.features.Features` to make from the columns.
        options: further options for `meshrec.train.Parquet`, such as ``split_by``.
    """
    paths: dict[str, tuple[str, ...] | None] = {}
    for name, part in (("train", train), ("validation", validation), ("test", test)):
        paths[name] = None if part is None else (str(_write_part(part, Path(folder).absolute() / name)),)
    assert paths["train"] is not None
    return Parquet(
        train=paths["train"],
        validation=paths["validation"],
        test=paths["test"],
        features=features,
        **options,
    )


def _write_part(part: "Dataset", folder: Path) -> Path:
    """Write a dataset to Parquet files in a folder, unless the folder exists. Return the folder."""
    # `durable_folder` puts a folder in place only when it is complete, so an existing folder can be reused.
    if not folder.is_dir():
        with durable_folder(folder) as parts:
            part.write_parquet(str(parts))
    return folder


@dataclass
class _Reporter:
    """Observer that reports metrics and checkpoints to Ray, at the same steps in every worker.

    Attributes:
        every: steps between reports of training metrics.
        folder: run folder. Set on rank 0 when it is known; None on other workers.
        reported: step of the newest reported checkpoint; -1 before the first.
    """

    every: int
    folder: RunFolder | None = None
    reported: int = -1

    def __call__(self, event: Event) -> None:
        is_due = isinstance(event, Logged) and event.line["step"] % self.every == 0
        if isinstance(event, Logged | Evaluated) and (is_due or isinstance(event, Evaluated)):
            self._report(event.line)

    def _report(self, line: Mapping[str, Any]) -> None:
        """Report a metrics line to Ray, with a pointer to the newest checkpoint if that is new."""
        train: Any = needs("ray.train", "ray")
        metrics = {name: value for name, value in line.items() if isinstance(value, int | float | str)}
        # Only rank 0 finds a checkpoint. All workers report at the same steps, as Ray requires.
        newest = self._newest()
        if newest is None:
            train.report(metrics)
            return
        with scratch_folder("meshrec-ray") as folder:
            (folder / _POINTER).write_text(json.dumps({"path": str(newest)}))
            train.report(metrics, checkpoint=train.Checkpoint.from_directory(folder))

    def _newest(self) -> Path | None:
        """Return the newest finished checkpoint, or None if it was reported already.

        Returns a checkpoint on rank 0 only.
        """
        if self.folder is None:
            return None
        try:
            checkpoint = find_checkpoint(self.folder.path, last=True)
        except ValueError:
            return None
        step = int(checkpoint.name.removeprefix("step-"))
        # Ray must get every checkpoint only once.
        if step <= self.reported:
            return None
        self.reported = step
        return checkpoint


def _train(config: dict[str, Any]) -> None:
    """Train on one Ray worker.

    Args:
        config: the ``train_loop_config`` set by `trainer`.
    """
    # Restarted workers find their run folder by this ID.
    os.environ[LAUNCH_VARIABLE] = config["launch"]
    # torch may have been imported before Ray set the variable.
    threads = os.environ.get("OMP_NUM_THREADS")
    if threads is not None:
        torch.set_num_threads(int(threads))
    reporter = _Reporter(config["report_every"])

    def screen(folder: RunFolder) -> Any:
        """Pass the run folder to the reporter, and return an observer that ignores all events."""
        reporter.folder = folder
        return lambda event: None

    summary = run_rank(replace(config["job"], on_event=reporter), screen)
    # An exception makes Ray restart the workers, up to max_failures times.
    if summary["state"] == "failed":
        raise RuntimeError(summary["error"])


def _torch_config() -> Any:
    """Return a process group configuration for Ray, whose backend calls `_form_group` on every worker.

    Ray's default backend would let rank 0's store listen on every network interface.
    """
    config: Any = needs("ray.train.torch.config", "ray")
    ray: Any = needs("ray", "ray")

    class Backend(config._TorchBackend):  # type: ignore[misc]
        def on_start(self, worker_group: Any, backend_config: Any) -> None:
            address, port = worker_group.execute_single(0, config.get_address_and_port)
            has_gpus = worker_group.get_resources_per_worker().get("GPU", 0) > 0
            backend = backend_config.backend or ("nccl" if has_gpus else "gloo")
            size = len(worker_group)
            nodes = worker_group.execute(_node_id)
            formed = [
                worker_group.execute_single_async(
                    rank,
                    _form_group,
                    backend=backend,
                    seconds=backend_config.timeout_s,
                    variables={
                        "MASTER_ADDR": address,
                        "MASTER_PORT": str(port),
                        "RANK": str(rank),
                        "WORLD_SIZE": str(size),
                        # Index among the workers on the same node.
                        "LOCAL_RANK": str(nodes[:rank].count(nodes[rank])),
                        "LOCAL_WORLD_SIZE": str(nodes.count(nodes[rank])),
                    },
                )
                for rank in range(size)
            ]
            # Raises if a worker could not join.
            ray.get(formed)

    class Config(config.TorchConfig):  # type: ignore[misc]
        @property
        def backend_cls(self) -> type:
            return Backend

    return Config()


def _node_id() -> str:
    """Return the Ray node ID of the worker in which this function runs."""
    node: str = needs("ray", "ray").get_runtime_context().get_node_id()
    return node


def _form_group(backend: str, seconds: float, variables: Mapping[str, str]) -> None:
    """Form the process group in a worker. Collective."""
    os.environ.update(variables)
    form_group(backend, timedelta(seconds=seconds))
