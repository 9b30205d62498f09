"""``meshrec evaluate``: compute a run's metrics on other data."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from meshrec.cli.arguments import Words, parse
from meshrec.cli.on_ranks import on_ranks
from meshrec.cli.output import check_output
from meshrec.runs.judging import judge
from meshrec.runs.scoring import load_scorer
from meshrec.train.ranks import Ranks
from meshrec.train.run_folder import RUNS, find_run


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions:
    """Compute a run's metrics on labelled data."""

    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Name or folder of a run. The weights that it reports are used."""
    data: tuple[str, ...]
    """Files, folders or patterns of data, in the format of the training data."""
    by: Words = ()
    """Columns to slice the data by: metrics are also computed for the most frequent values of each."""
    group: str | None = None
    """Column such as the user: the AUC is computed for each of its values and averaged (GAUC)."""
    intervals: int = 0
    """Number of bootstrap samples for 95 % intervals, such as 200; 0: no intervals."""
    json: Path | None = None
    """JSON file to write the metrics to."""
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
    options = parse(EvaluateOptions, arguments, program="meshrec evaluate")
    check_output(options.json)
    if options.intervals < 0 or options.intervals == 1:
        raise ValueError(f"--intervals is {options.intervals}; it must be 0, or 2 and more: 200 will do.")
    run = find_run(options.run, options.runs, trust=options.trust)

    def work(ranks: Ranks) -> None:
        scorer = load_scorer(
            run,
            ranks,
            options.data,
            labelled=True,
            on_error=options.on_error,
            step=options.step,
            last=options.last,
        )
        found = judge(scorer, ranks, by=options.by, group=options.group, draws=options.intervals)
        if found is None:
            return
        num = scorer.dataset.train.num_samples
        print(f"{num:,} rows, by the weights of step {scorer.step} of {run.path}")
        for name, value in found.metrics.items():
            interval = found.intervals.get(name)
            span = "" if interval is None else f"  [{interval.low:.6f}, {interval.high:.6f}]"
            print(f"  {name.replace('_', ' '):20} {value:.6f}{span}")
        for column, slices in found.slices.items():
            print(f"by {column}:")
            for text, metrics in slices.items():
                auc = f"{metrics['auc']:.4f}" if "auc" in metrics else "-"
                loss = f"{metrics['loss']:.4f}" if "loss" in metrics else "-"
                print(f"  {text:20} {int(metrics['samples']):>9,} rows  AUC {auc}  loss {loss}")
        if options.json is not None:
            about = {"run": str(run.path), "step": scorer.step, "samples": num}
            options.json.write_text(json.dumps({**about, **found._asdict()}, indent=1) + "\n")

    return on_ranks("evaluate", arguments, work, nproc=options.nproc, device=options.device)
