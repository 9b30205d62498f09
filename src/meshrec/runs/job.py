"""The options of a run, as every rank gets them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from meshrec.runs.saved_recipe import Change
from meshrec.train.launch import RANK_TIMEOUT
from meshrec.train.observers import Observer
from meshrec.train.recipe import Recipe
from meshrec.train.run_folder import RUNS, RunFolder

RUN_VARIABLE = "MESHREC_RUN"
"""The environment variable with the run's folder, which our launcher has made, for the ranks that it
starts.
"""
BEGAN_VARIABLE = "MESHREC_BEGAN"
"""The environment variable with the time at which the command began, in seconds; ranks start later."""

GOES_ON = "goes_on"
"""The entry of a run's summary that asks the launcher to start the ranks again, since another host leaves."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """The options of a run.

    Attributes:
        recipe: the recipe to train.
        source: the name of the recipe, as given to `meshrec.train.resolve`.
        name: the name of the run's folder; if none, the recipe's name with a number.
        runs: the folder of all run folders.
        device: ``cpu`` or ``cuda``; if none, ``cuda`` where torch sees a GPU.
        resume: continue the run of that name from its last checkpoint.
        changes: the options that a resumed run changes.
        profile: trace a few steps.
        baselines: also compute the baselines.
        track: names of further observers, see `meshrec.train.trackers.make_trackers`.
        rank_timeout: seconds that ranks wait, during training, for a rank that does not answer.
        folder: the run's folder, if the caller has made it and holds its `RunLock`.
        keep: save checkpoints.
        store: the address of the object store for checkpoints; if none, they are in the run's folder.
        on_event: gets every event, on every rank.
    """

    recipe: Recipe
    source: str | None = None
    name: str | None = None
    runs: Path = RUNS
    device: str | None = None
    resume: bool = False
    changes: Sequence[Change] = field(default=())
    profile: bool = False
    baselines: bool = False
    track: str = ""
    rank_timeout: float = RANK_TIMEOUT
    folder: RunFolder | None = None
    keep: bool = True
    store: str | None = None
    on_event: Observer | None = None
