"""Observers that tell MLflow or Weights & Biases what a run does, and those of users."""

import logging
import math
import os
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from meshrec.data.faults import needs
from meshrec.train.observers import Evaluated, Event, Finished, Line, Logged, Observer, Started
from meshrec.train.recipes import function_of
from meshrec.train.run_folder import RunFolder, flat, to_json

_logger = logging.getLogger("meshrec")

_LONGEST = 500
"""Characters of an option's value that MLflow keeps."""


class MLflowObserver:
    """Keeps a run's options and metrics in MLflow, as a run of the folder's name in the recipe's experiment.

    Where ``MLFLOW_TRACKING_URI`` says, or else in the file ``mlflow.db`` beside the run's folder. A run that
    is resumed goes on in its run of before.

    Args:
        folder: of the run.

    Raises:
        ModuleNotFoundError: MLflow is not installed.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._client = needs("mlflow.tracking", "mlflow").MlflowClient(
            os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{folder.path.resolve().parent / 'mlflow.db'}"
        )
        self._entities = needs("mlflow.entities", "mlflow")
        self._folder = folder
        self._run = ""

    def __call__(self, event: Event) -> None:
        """Tells it."""
        match event:
            case Started():
                self._start(event)
            case Logged(line) | Evaluated(line, _):
                metrics = [
                    self._entities.Metric(
                        name.replace("@", "_at_"), value, int(1000 * time.time()), line["step"]
                    )
                    for name, value in named_metrics(line).items()
                ]
                self._client.log_batch(self._run, metrics=metrics)
            case Finished(summary):
                status = "FINISHED" if summary["state"] == "finished" else "KILLED"
                self._client.set_terminated(self._run, status)

    def _start(self, event: Started) -> None:
        experiment = self._client.get_experiment_by_name(event.recipe.name)
        number = (
            self._client.create_experiment(event.recipe.name)
            if experiment is None
            else experiment.experiment_id
        )
        name = self._folder.path.name
        known = self._client.search_runs([number], f"attributes.run_name = '{name}'")
        if known and event.first_step > 0:
            self._run = known[0].info.run_id
            self._client.update_run(self._run, "RUNNING")
            return
        self._run = self._client.create_run(number, run_name=name).info.run_id
        params = [
            self._entities.Param(option, str(value)[:_LONGEST])
            for option, value in flat(to_json(event.recipe))
        ]
        for first in range(0, len(params), 100):
            self._client.log_batch(self._run, params=params[first : first + 100])


class WandbObserver:
    """Keeps a run's options and metrics in Weights & Biases, in the recipe's project.

    Their own variables say how (``WANDB_MODE=offline`` keeps everything beside the run's folder). A run that
    is resumed goes on in its run of before.

    Args:
        folder: of the run.

    Raises:
        ModuleNotFoundError: wandb is not installed.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._wandb = needs("wandb", "wandb")
        self._folder = folder
        self._run: Any = None

    def _id(self) -> str:
        """Of the run in their project, where other folders' runs have the same name; resumes keep it."""
        kept = self._folder.path / "wandb_id.txt"
        if not kept.exists():
            kept.write_text(uuid.uuid4().hex)
        return kept.read_text()

    def __call__(self, event: Event) -> None:
        """Tells it."""
        match event:
            case Started():
                self._run = self._wandb.init(
                    project=event.recipe.name,
                    name=self._folder.path.name,
                    id=self._id(),
                    dir=str(self._folder.path.parent),
                    config=dict(flat(to_json(event.recipe))),
                    resume="allow",
                )
            case Logged(line) | Evaluated(line, _):
                # Test metrics are of the weights' step, which lies behind: their own axis takes them.
                self._run.log({**named_metrics(line), "trained_step": line["step"]})
            case Finished(summary):
                self._run.summary.update({"state": summary["state"], "best_step": summary["best_step"]})
                self._run.finish()


class _Tracker(NamedTuple):
    """How an observer is made, and what it imports."""

    make: Callable[[RunFolder], Observer]
    module: str


TRACKERS: Mapping[str, _Tracker] = {
    "mlflow": _Tracker(MLflowObserver, "mlflow.tracking"),
    "wandb": _Tracker(WandbObserver, "wandb"),
}


def make_trackers(names: str, folder: RunFolder) -> list[Observer]:
    """The observers of these names, divided by commas.

    A name is one of `TRACKERS`, or file.py:function or package.module:function of one's own, which takes the
    `RunFolder` and returns an observer.

    Raises:
        ValueError: there is no such observer.
        ModuleNotFoundError: its package is not installed.
    """
    return [_Careful(name, make(folder)) for name, make in find_trackers(names).items()]


def find_trackers(names: str) -> dict[str, Callable[[RunFolder], Observer]]:
    """What makes each of them; see `make_trackers`, whose errors it raises before there is a run."""
    found: dict[str, Callable[[RunFolder], Observer]] = {}
    for name in filter(None, (each.strip() for each in names.split(","))):
        if name in TRACKERS:
            needs(TRACKERS[name].module, name)
            found[name] = TRACKERS[name].make
        elif ":" in name:
            found[name] = function_of(name)
        else:
            raise ValueError(
                f"--track {name}: there is no such observer; take one of {', '.join(TRACKERS)}, or your own: "
                "path/to/file.py:function."
            )
    return found


def named_metrics(line: Line) -> dict[str, float]:
    """The finite metrics of a line, as ``train/loss`` and so on."""
    kind = line.get("kind", "train")
    return {
        f"{kind}/{name}": value
        for name, value in line.items()
        if isinstance(value, float) and math.isfinite(value)
    }


class _Careful:
    """An observer whose faults do not end the run: a warning says what it is, and nothing more is told."""

    def __init__(self, name: str, observer: Observer) -> None:
        self._name = name
        self._observer: Observer | None = observer

    def __call__(self, event: Event) -> None:
        """Passes it on."""
        if self._observer is None:
            return
        try:
            self._observer(event)
        except Exception as error:
            _logger.warning(
                "the observer %s is told no more: %s: %s", self._name, type(error).__name__, error
            )
            self._observer = None
