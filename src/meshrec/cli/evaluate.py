"""``meshrec evaluate``: how good a run is on other data."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from meshrec.cli.arguments import parse
from meshrec.cli.on_ranks import on_ranks
from meshrec.cli.output import check_output
from meshrec.train.evaluation import evaluate
from meshrec.train.ranks import Ranks
from meshrec.train.run_folder import RUNS, find_run
from meshrec.train.scoring import load_scorer


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions:
    """Judges a run by data with labels."""

    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """A run, by name or folder: the weights that it reports."""
    data: tuple[str, ...]
    """Files, folders or patterns, of the form that the run was trained on."""
    json: Path | None = None
    """A file for the metrics."""
    step: int | None = None
    """The checkpoint of that step instead."""
    last: bool = False
    """The last step instead."""
    nproc: int = 1
    """Ranks on this machine: any number."""
    device: str | None = None
    """cpu or cuda; if none, cuda where there is one."""
    runs: Path = RUNS
    """Where run folders are."""


def main(arguments: Sequence[str]) -> int:
    """Parses and does it; the exit code."""
    options = parse(EvaluateOptions, arguments, program="meshrec evaluate")
    check_output(options.json)
    run = find_run(options.run, options.runs)

    def work(ranks: Ranks) -> None:
        scorer = load_scorer(run, ranks, options.data, labelled=True, step=options.step, last=options.last)
        reader = scorer.dataset.train
        found = evaluate(scorer.model, reader, ranks, bf16=scorer.recipe.training.bf16)
        if not ranks.is_first:
            return
        print(f"{reader.num_samples:,} rows, by the weights of step {scorer.step} of {run.path}")
        for name, value in found.items():
            print(f"  {name.replace('_', ' '):20} {value:.6f}")
        if options.json is not None:
            about = {"run": str(run.path), "step": scorer.step, "samples": reader.num_samples}
            options.json.write_text(json.dumps({**about, "metrics": found}, indent=1) + "\n")

    return on_ranks("evaluate", arguments, work, nproc=options.nproc, device=options.device)
