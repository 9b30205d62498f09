"""``meshrec evaluate``: how good a run is on other data."""

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
    """Judges a run by data with labels."""

    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """A run, by name or folder: the weights that it reports."""
    data: tuple[str, ...]
    """Files, folders or patterns, of the form that the run was trained on."""
    by: Words = ()
    """Columns of the data: the most frequent values of each are judged by themselves."""
    group: str | None = None
    """A column such as the user: AUCs are taken inside its values and averaged (GAUC)."""
    intervals: int = 0
    """Draws of a bootstrap for 95 % intervals; 200 will do. 0: none."""
    json: Path | None = None
    """A file for the metrics."""
    on_error: Literal["raise", "skip"] | None = None
    """Handling of damaged rows: raise an error, or skip and count them; if none, as in the recipe."""
    step: int | None = None
    """The checkpoint of that step instead."""
    last: bool = False
    """The last step instead."""
    nproc: int = 1
    """Ranks on this machine: any number."""
    device: str | None = None
    """cpu or cuda; if none, cuda where there is one."""
    trust: bool = False
    """Execute the recipe's source in the run's folder, though somebody else trained the run."""
    runs: Path = RUNS
    """Where run folders are."""


def main(arguments: Sequence[str]) -> int:
    """Parses and does it; the exit code."""
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
