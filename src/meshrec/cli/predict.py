"""``meshrec predict``: score data with a run's model."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from meshrec.cli.arguments import TABLES, Words, check_output, parse
from meshrec.cli.on_ranks import on_ranks
from meshrec.cli.run_options import DataOptions, RankOptions, RunOptions, open_scorer
from meshrec.runs.calibrated import CalibrationKind, fit_run_curve
from meshrec.runs.score_file import write_scores
from meshrec.runs.scoring import gather_scores
from meshrec.train.ranks import Ranks


@dataclass(frozen=True, kw_only=True)
class PredictOptions(RunOptions, RankOptions, DataOptions):
    """Score data, with or without labels: writes a row of scores per data row, in data order."""

    out: Path
    """File for the scores: .parquet or .csv."""
    force: bool = False
    """Replace an existing file."""
    keep: Words = ()
    """Data columns to write next to the scores; none: the ID columns."""
    calibration: CalibrationKind | None = None
    """Calibrate probabilities on the run's validation data: isotonic (for thousands of rows) or platt."""


def main(arguments: Sequence[str]) -> int:
    options = parse(PredictOptions, arguments, program="meshrec predict")
    check_output(options.out, force=options.force, suffixes=TABLES)
    run = options.folder()

    def work(ranks: Ranks) -> None:
        """Score the data on all ranks. Rank 0 writes the file."""
        scorer = open_scorer(options, run, ranks, labelled=False)
        curve = (
            None if options.calibration is None else fit_run_curve(run, scorer, ranks, options.calibration)
        )
        scored = gather_scores(scorer, ranks)
        if not ranks.is_first:
            # Only rank 0 writes, but scoring is collective, so other ranks must exhaust the iterator.
            for _ in scored:
                pass
            return
        if curve is not None:
            scored = (part._replace(logits_B=curve.calibrate_logits(part.logits_B)) for part in scored)
        num_empty = write_scores(
            options.out, scorer.dataset, scored, keep=options.keep, loss=scorer.recipe.loss
        )
        num = scorer.dataset.train.num_samples
        skipped = f", {num_empty:,} of them without a score: their data is damaged" if num_empty else ""
        print(f"{options.out}: {num:,} rows, by the weights of step {scorer.step} of {run.path}{skipped}")

    return on_ranks("predict", arguments, work, nproc=options.nproc, device=options.device)
