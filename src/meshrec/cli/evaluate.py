"""``meshrec evaluate``: compute a run's metrics on other data."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from meshrec.cli.arguments import Words, check_output, parse
from meshrec.cli.on_ranks import on_ranks
from meshrec.cli.run_options import DataOptions, RankOptions, RunOptions, open_scorer
from meshrec.runs.evaluating import evaluate_scorer
from meshrec.train.ranks import Ranks
from meshrec.train.run_folder import replace_nonfinite


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions(RunOptions, RankOptions, DataOptions):
    """Compute a run's metrics on labelled data."""

    by: Words = ()
    """Columns to slice the data by: also print metrics for their most frequent values."""
    group: str | None = None
    """Column such as the user, for GAUC: the AUC per value, averaged."""
    intervals: int = 0
    """Number of bootstrap samples for 95 % intervals, such as 200; 0: no intervals."""
    json: Path | None = None
    """JSON file for the metrics."""
    force: bool = False
    """Replace an existing file."""


def main(arguments: Sequence[str]) -> int:
    options = parse(EvaluateOptions, arguments, program="meshrec evaluate")
    check_output(options.json, force=options.force, option="--json")
    # A single bootstrap sample has no spread.
    if options.intervals < 0 or options.intervals == 1:
        raise ValueError(f"--intervals is {options.intervals}; it must be 0, or 2 and more: 200 will do.")
    run = options.folder()

    def work(ranks: Ranks) -> None:
        """Evaluate on all ranks. Rank 0 prints the metrics, and writes the JSON file if requested."""
        scorer = open_scorer(options, run, ranks, labelled=True)
        result = evaluate_scorer(scorer, ranks, by=options.by, group=options.group, draws=options.intervals)
        # Only rank 0 has the result.
        if result is None:
            return
        num = scorer.dataset.train.num_samples
        print(f"{num:,} rows, by the weights of step {scorer.step} of {run.path}")
        for name, value in result.metrics.items():
            interval = result.intervals.get(name)
            span = "" if interval is None else f"  [{interval.low:.6f}, {interval.high:.6f}]"
            if math.isnan(value):
                span = f"  (undefined: {result.num_nan:,} scores are NaN)"
            print(f"  {name.replace('_', ' '):20} {value:.6f}{span}")
        for column, slices in result.slices.items():
            print(f"by {column}:")
            for text, metrics in slices.items():
                auc = f"{metrics['auc']:.4f}" if "auc" in metrics else "-"
                loss = f"{metrics['loss']:.4f}" if "loss" in metrics else "-"
                print(f"  {text:20} {int(metrics['samples']):>9,} rows  AUC {auc}  loss {loss}")
        if options.json is not None:
            about = {"run": str(run.path), "step": scorer.step, "samples": num}
            options.json.write_text(
                json.dumps(replace_nonfinite({**about, **result._asdict()}), indent=1) + "\n"
            )

    return on_ranks("evaluate", arguments, work, nproc=options.nproc, device=options.device)
