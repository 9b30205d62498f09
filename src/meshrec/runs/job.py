"""Run options, equal on every rank."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from meshrec.runs.saved_recipe import Change
from meshrec.train.launch import RANK_TIMEOUT
from meshrec.train.observers import Observer
from meshrec.train.recipe import Recipe
from meshrec.train.run_folder import RUNS, RunFolder

RUN_VARIABLE = "MESHREC_RUN"
"""Environment variable with the run folder created by MeshRec's launcher, for the ranks."""
BEGAN_VARIABLE = "MESHREC_BEGAN"
"""Environment variable with the start time of the command, in seconds; ranks start later."""

GOES_ON = "goes_on"
"""Summary entry that asks the launcher to restart the ranks, because another host leaves."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """Options of a run.

    Attributes:
        recipe: the recipe to train.
        source: recipe name, as given to `meshrec.train.resolve`.
        name: name of the run folder; if none, the recipe's name with a number.
        runs: folder with all run folders.
        device: ``cpu`` or ``cuda``; if none, ``cuda`` where torch sees a GPU.
        resume: continue the named run from the last checkpoint.
        changes: options changed by a resumed run.
        profile: trace a few steps.
        baselines: also compute the baselines.
        track: names of additional observers, see `meshrec.train.trackers.make_trackers`.
        rank_timeout: seconds that ranks wait, during training, for a rank that does not answer.
        folder: run folder, if the caller has created it and holds the `RunLock`.
        keep: save checkpoints.
        store: object store address for checkpoints; if none, they are in the run folder.
        final: ``all``: after the run, refit on all rows; see runs/refit.py.
        on_event: called with every event, on every rank.
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
    final: Literal["all"] | None = None
    on_event: Observer | None = None
