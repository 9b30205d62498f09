"""Observers that record a run in MLflow or Weights & Biases, and user-defined observers."""

import logging
import math
import os
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from meshrec.data.faults import needs
from meshrec.train.observers import Evaluated, Event, Finished, Line, Logged, Observer, Started
from meshrec.train.recipe_files import load_function
from meshrec.train.run_folder import RunFolder, flatten, to_json

_logger = logging.getLogger("meshrec")

_MAX_PARAM_LENGTH = 500
"""Maximum length of an option value in MLflow."""


class MLflowObserver:
    """Observer that records a run's options and metrics in MLflow.

    The MLflow experiment has the recipe's name, and the MLflow run the name of the run folder. The location
    is ``MLFLOW_TRACKING_URI``, or if not set, the file ``mlflow.db`` next to the run folder. A resumed run
    continues its MLflow run.

    Args:
        folder: run folder.

    Raises:
        ModuleNotFoundError: MLflow is not installed.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._client = needs("mlflow.tracking", "mlflow").MlflowClient(
            os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{folder.path.resolve().parent / 'mlflow.db'}"
        )
        self._entities = needs("mlflow.entities", "mlflow")
        self._folder = folder
        # MLflow run ID. Set when the run starts.
        self._run = ""

    def __call__(self, event: Event) -> None:
        """Record an event. Other events than start, metrics and end are ignored."""
        match event:
            case Started():
                self._start(event)
            case Logged(line) | Evaluated(line, _):
                # MLflow rejects metric names with "@". Its times are in milliseconds.
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
        """Continue the MLflow run if the run is resumed, else create one with the recipe's options."""
        experiment = self._client.get_experiment_by_name(event.recipe.name)
        number = (
            self._client.create_experiment(event.recipe.name)
            if experiment is None
            else experiment.experiment_id
        )
        name = self._folder.path.name
        earlier_runs = self._client.search_runs([number], f"attributes.run_name = '{name}'")
        # A new run of the same name must not continue an old MLflow run.
        if earlier_runs and event.first_step > 0:
            self._run = earlier_runs[0].info.run_id
            self._client.update_run(self._run, "RUNNING")
            return
        self._run = self._client.create_run(number, run_name=name).info.run_id
        params = [
            self._entities.Param(option, str(value)[:_MAX_PARAM_LENGTH])
            for option, value in flatten(to_json(event.recipe))
        ]
        # MLflow accepts at most 100 parameters per batch.
        for first in range(0, len(params), 100):
            self._client.log_batch(self._run, params=params[first : first + 100])


class WandbObserver:
    """Observer that records a run's options and metrics in Weights & Biases.

    The project has the recipe's name. Environment variables for Weights & Biases apply. For example,
    ``WANDB_MODE=offline`` keeps everything next to the run folder. A resumed run continues its W&B run.

    Args:
        folder: run folder.

    Raises:
        ModuleNotFoundError: wandb is not installed.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._wandb = needs("wandb", "wandb")
        self._folder = folder
        # W&B run, from the event Started to the event Finished.
        self._run: Any = None

    def _id(self) -> str:
        """Return the run's W&B ID, which is stored in the run folder.

        It is random, because run folders may have equal names. A resumed run finds it again.
        """
        path = self._folder.path / "wandb_id.txt"
        if not path.exists():
            path.write_text(uuid.uuid4().hex)
        return path.read_text()

    def __call__(self, event: Event) -> None:
        """Record an event. Other events than start, metrics and end are ignored."""
        match event:
            case Started():
                self._run = self._wandb.init(
                    project=event.recipe.name,
                    name=self._folder.path.name,
                    id=self._id(),
                    dir=str(self._folder.path.parent),
                    config=dict(flatten(to_json(event.recipe))),
                    # Continues the W&B run with this ID, or creates it.
                    resume="allow",
                )
            case Logged(line) | Evaluated(line, _):
                # W&B requires increasing steps, but test metrics belong to an earlier step. So log the step
                # as a value, which can be used as an axis.
                self._run.log({**named_metrics(line), "trained_step": line["step"]})
            case Finished(summary):
                self._run.summary.update({"state": summary["state"], "best_step": summary["best_step"]})
                self._run.finish()


class _Tracker(NamedTuple):
    """A known observer.

    Attributes:
        make: creates the observer for a run folder.
        module: module that must be installed.
    """

    make: Callable[[RunFolder], Observer]
    module: str


# The classes import their packages only when created, so this table needs neither of them.
TRACKERS: Mapping[str, _Tracker] = {
    "mlflow": _Tracker(MLflowObserver, "mlflow.tracking"),
    "wandb": _Tracker(WandbObserver, "wandb"),
}


def make_trackers(names: str, folder: RunFolder) -> list[Observer]:
    """Create the observers of a run.

    If an observer fails later, a warning is logged, and the run continues without the observer.

    Args:
        names: comma-separated names. A name is in `TRACKERS`, or a user's ``file.py:function`` or
            ``package.module:function``, which takes the `RunFolder` and returns an observer.
        folder: run folder.

    Raises:
        ValueError: an observer does not exist.
        ModuleNotFoundError: an observer's package is not installed.
    """
    return [_SafeObserver(name, make(folder)) for name, make in find_trackers(names).items()]


def find_trackers(names: str) -> dict[str, Callable[[RunFolder], Observer]]:
    """Find the functions that create observers, without calling them.

    Used before a run exists, so that wrong names fail early. Raises the same errors as `make_trackers`.

    Args:
        names: see `make_trackers`.

    Returns:
        Functions from a run folder to an observer, by name.
    """
    makers: dict[str, Callable[[RunFolder], Observer]] = {}
    for name in filter(None, (part.strip() for part in names.split(","))):
        if name in TRACKERS:
            # Raises if the package is not installed.
            needs(TRACKERS[name].module, name)
            makers[name] = TRACKERS[name].make
        elif ":" in name:
            makers[name] = load_function(name)
        else:
            raise ValueError(
                f"--track {name}: there is no such observer; take one of {', '.join(TRACKERS)}, or your own: "
                "path/to/file.py:function."
            )
    return makers


def named_metrics(line: Line) -> dict[str, float]:
    """Return the finite metrics in a line, by name with the kind as prefix, such as ``train/loss``."""
    kind = line.get("kind", "train")
    return {
        f"{kind}/{name}": value
        for name, value in line.items()
        if isinstance(value, float) and math.isfinite(value)
    }


class _SafeObserver:
    """Wrapper of an observer, so that an error in it does not end the run.

    After an error, a warning is logged, and the observer gets no more events.
    """

    def __init__(self, name: str, observer: Observer) -> None:
        self._name = name
        # None after the first error.
        self._observer: Observer | None = observer

    def __call__(self, event: Event) -> None:
        """Pass an event to the observer."""
        if self._observer is None:
            return
        try:
            self._observer(event)
        # A failing observer must not end the training. It gets no further events, so it warns only once.
        except Exception as error:
            _logger.warning(
                "the observer %s failed and gets no more events: %s: %s",
                self._name,
                type(error).__name__,
                error,
            )
            self._observer = None
