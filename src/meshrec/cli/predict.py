"""``meshrec predict``: score data with a run's model."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from meshrec.cli.arguments import Words, parse
from meshrec.cli.on_ranks import on_ranks
from meshrec.cli.output import check_output
from meshrec.runs.score_file import write_scores
from meshrec.runs.scoring import gathered, load_scorer
from meshrec.train.ranks import Ranks
from meshrec.train.run_folder import RUNS, find_run


@dataclass(frozen=True, kw_only=True)
class PredictOptions:
    """Score data, which needs no labels: one row of scores per row of data, in the order of the data."""

    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Name or folder of a run. The weights that it reports are used."""
    data: tuple[str, ...]
    """Files, folders or patterns of data, in the format of the training data."""
    out: Path
    """File to write the scores to: .parquet or .csv."""
    force: bool = False
    """Replace a file that exists."""
    keep: Words = ()
    """Columns of the data to write beside the scores; if none, those of the IDs."""
    on_error: Literal["raise", "skip"] | None = None
    """Handling of damaged rows: raise an error, or skip and count them; if none, as in the recipe."""
    step: int | None = None
    """Use the checkpoint of this step instead."""
    last: bool = False
    """Use the run's last checkpoint instead of its best one."""
    nproc: int = 1
    """Number of ranks on this machine; it may differ from the run's."""
    device: str | None = None
    """Device: cpu or cuda; if none, cuda where torch sees a GPU."""
    trust: bool = False
    """Execute the recipe's source in the run's folder even if another user trained the run."""
    runs: Path = RUNS
    """Folder of all run folders."""


def main(arguments: Sequence[str]) -> int:
    options = parse(PredictOptions, arguments, program="meshrec predict")
    check_output(options.out, force=options.force)
    run = find_run(options.run, options.runs, trust=options.trust)

    def work(ranks: Ranks) -> None:
        scorer = load_scorer(
            run,
            ranks,
            options.data,
            labelled=False,
            on_error=options.on_error,
            step=options.step,
            last=options.last,
        )
        scored = gathered(scorer, ranks)
        if not ranks.is_first:
            for _ in scored:
                pass
            return
        num_empty = write_scores(
            options.out, scorer.dataset, scored, keep=options.keep, loss=scorer.recipe.loss
        )
        num = scorer.dataset.train.num_samples
        skipped = f", {num_empty:,} of them without a score: their data is damaged" if num_empty else ""
        print(f"{options.out}: {num:,} rows, by the weights of step {scorer.step} of {run.path}{skipped}")

    return on_ranks("predict", arguments, work, nproc=options.nproc, device=options.device)
