"""Options for a training run, which must be equal on every rank."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from meshrec.data.label_options import LabelOptions
from meshrec.runs.saved_recipe import Change
from meshrec.train.launch import RANK_TIMEOUT
from meshrec.train.observers import Observer
from meshrec.train.recipe import Recipe
from meshrec.train.run_folder import RUNS, RunFolder
from meshrec.train.stream_options import AfterRollBack, StreamOptions

RUN_VARIABLE = "MESHREC_RUN"
"""Environment variable with the path of the run folder, set by MeshRec's launcher for the ranks it starts."""
START_TIME_VARIABLE = "MESHREC_BEGAN"
"""Environment variable with the start time of the user's command, in seconds since 1970."""

RESTART_REQUESTED = "goes_on"
"""Key of a summary entry. If it is True, the launcher shall restart the ranks, because a host has left."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A recipe to train, and those options of the run which are not part of the recipe.

    Attributes:
        recipe: the recipe to train.
        source: recipe name or file, as given to `meshrec.train.resolve`.
        name: name of the run folder; None: the recipe's name with a number.
        runs: folder with all run folders.
        device: ``cpu`` or ``cuda``; None: ``cuda`` if torch sees a GPU.
        resume: whether to continue the named run from its last checkpoint.
        changes: options in which a resumed run differs from the original run.
        profile: whether to record a profiler trace for a few steps.
        baselines: whether to evaluate baselines as well, such as item popularity.
        track: names of additional observers; see `meshrec.train.trackers.make_trackers`.
        rank_timeout: seconds to wait during training for a rank without an answer.
        folder: run folder, if the caller has created it and holds the `RunLock`; None: create a folder.
        keep: whether to save checkpoints.
        store: address of an object store for checkpoints, such as ``s3://bucket/runs``; None: save them in
            the run folder.
        final: ``all``: after the run, fit again on all rows (see runs/refit.py); None: no second fit.
        warm_start: run from whose weights, optimizer state and vocabularies a new run starts; see
            runs/warm_start.py. None: start from initial weights.
        stream: stream to follow, as for `meshrec.data.open_stream.open_stream`; None: train on the recipe's
            data.
        actions: later actions, which label the impressions in the stream; a folder or an address, as for
            ``stream``. None: the records of the stream have labels.
        stream_options: options of training on the stream; not None if there is a stream.
        label_options: options of the join with actions.
        after_roll_back: choice about the records until the alarm, as for `StreamTrainer`.
        on_event: function called with every event, on every rank.
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
    warm_start: RunFolder | None = None
    stream: str | None = None
    actions: str | None = None
    stream_options: StreamOptions | None = None
    label_options: LabelOptions = field(default_factory=LabelOptions)
    after_roll_back: AfterRollBack | None = None
    on_event: Observer | None = None
