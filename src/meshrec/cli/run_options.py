"""Options shared by commands that read a run."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from meshrec.train.run_folder import RUNS, SUMMARY, RunFolder, find_run, finished_refit

if TYPE_CHECKING:
    from meshrec.runs.scoring import Scorer
    from meshrec.train.ranks import Ranks


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options for commands that read a run."""

    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Run name or folder. The reported weights are used."""
    step: int | None = None
    """Use the checkpoint at this step instead."""
    last: bool = False
    """Use the run's last checkpoint instead of the best."""
    first: bool = False
    """For a run with a refit on all rows (--final all): use the first fit, which did not learn from
    validation and test rows.
    """
    trust: bool = False
    """Execute the recipe source in the run folder even if another user trained the run."""
    runs: Path = RUNS
    """Folder with all runs."""

    def folder(self) -> RunFolder:
        """Find the run to read: the refit on all rows if the run has a refit, else the run itself.

        If the refit is used, a note is printed to standard error. --first, --last and --step select the first
        fit.
        """
        run = self.first_fit()
        return run if self.first or self.last or self.step is not None else reported_fit(run)

    def first_fit(self) -> RunFolder:
        """Find the run, ignoring a refit on all rows."""
        return find_run(self.run, self.runs, trust=self.trust)


def reported_fit(run: RunFolder) -> RunFolder:
    """Return a run's refit on all rows, or the run itself if it does not have a refit.

    If the refit is returned, a note is printed to standard error, on rank 0.
    """
    final = finished_refit(run)
    if final is None:
        return run
    # On several ranks, every rank comes here.
    if os.environ.get("RANK", "0") == "0":
        about = (run.read_json(SUMMARY) or {}).get("final") or {}
        sys.stderr.write(
            f"{run.path}: the fit on all {about.get('rows', 0):,} rows is used. It learned from the "
            "run's validation and test rows, so figures on them are too good: --first takes the fit that "
            "did not.\n"
        )
    return final


@dataclass(frozen=True, kw_only=True)
class RankOptions:
    """Options for commands that run on several ranks."""

    nproc: int = 1
    """Number of ranks on this machine; may differ from the run's."""
    device: str | None = None
    """Device: cpu or cuda; none: cuda if torch sees a GPU."""


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """Options for commands that score data."""

    data: tuple[str, ...]
    """Data files, folders or patterns, in the format of the training data."""
    on_error: Literal["raise", "skip"] | None = None
    """Handling of damaged rows: raise an error, or skip and count them; none: as in the recipe."""


def open_scorer(options: Any, run: RunFolder, ranks: "Ranks", *, labelled: bool) -> "Scorer":
    """Load a run's model, and open the data to score, as given by the options. Collective.

    Args:
        options: options with the fields of `RunOptions` and `DataOptions`.
        run: the run.
        ranks: the ranks, from `join`.
        labelled: whether to read labels.
    """
    from meshrec.runs.scoring import load_scorer

    return load_scorer(
        run,
        ranks,
        options.data,
        labelled=labelled,
        on_error=options.on_error,
        step=options.step,
        last=options.last,
    )
