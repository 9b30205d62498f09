"""Options shared by the commands that read a run."""

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
    """Options of commands that read a run."""

    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Name or folder of a run, whose reported weights are used."""
    step: int | None = None
    """Use the checkpoint of this step instead."""
    last: bool = False
    """Use the run's last checkpoint instead of the best."""
    first: bool = False
    """Use the first fit, which did not learn from validation and test rows, of a run with a refit on all rows
    (--final all).
    """
    trust: bool = False
    """Execute the recipe source in the run folder even if another user trained the run."""
    runs: Path = RUNS
    """Folder with all runs."""

    def folder(self) -> RunFolder:
        """Find the run to read: the run itself, or its refit on all rows if it has one.

        A refit is reported on standard error; --first, --last and --step select the first fit.
        """
        run = self.first_fit()
        return run if self.first or self.last or self.step is not None else reported_fit(run)

    def first_fit(self) -> RunFolder:
        """Find the run, without regard to a refit on all rows."""
        return find_run(self.run, self.runs, trust=self.trust)


def reported_fit(run: RunFolder) -> RunFolder:
    """Return the run's refit on all rows, with a note on standard error; the run if it has none."""
    final = finished_refit(run)
    if final is None:
        return run
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
    """Options of commands that run on several ranks."""

    nproc: int = 1
    """Number of ranks on this machine; may differ from the run's."""
    device: str | None = None
    """Device: cpu or cuda; none: cuda if torch sees a GPU."""


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """Options of commands that score data."""

    data: tuple[str, ...]
    """Data files, folders or patterns, in the format of the training data."""
    on_error: Literal["raise", "skip"] | None = None
    """Handling of damaged rows: raise an error, or skip and count them; none: as in the recipe."""


def open_scorer(options: Any, run: RunFolder, ranks: "Ranks", *, labelled: bool) -> "Scorer":
    """Load a run's model, and open the data of the options. Collective.

    Args:
        options: `RunOptions` and `DataOptions` of a command.
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
