"""``meshrec quantize``: a run's model with smaller tables."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from meshrec.cli.arguments import parse
from meshrec.cli.on_ranks import on_ranks
from meshrec.modules import DataType
from meshrec.plan.text import size_text
from meshrec.quant import table_bytes
from meshrec.quant.page import summary
from meshrec.quant.precision import Rounding
from meshrec.runs.quantize import QuantisedRun, quantize_run
from meshrec.train.ranks import Ranks
from meshrec.train.run_folder import RUNS, find_run


@dataclass(frozen=True, kw_only=True)
class QuantizeOptions:
    """Quantises the tables of a run's model for inference, and writes a checkpoint of it. With --max-loss
    every table gets the precision with the fewest bytes that the budget allows, on the run's validation
    data."""

    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """A run, by name or folder: the weights that it reports."""
    out: Path
    """The checkpoint's folder, which must not be there yet."""
    max_loss: str | None = None
    """By how much normalized entropy may rise, with 95 % confidence: 0.02%, or 0.0002."""
    weights: Literal["INT8", "INT4", "INT2", "FP16", "BF16"] = "INT8"
    """The precision of all tables, without --max-loss."""
    rounding: Rounding = "search"
    """How the range of a row is chosen: minmax is FBGEMM's, search has a smaller error."""
    step: int | None = None
    """The checkpoint of that step instead."""
    last: bool = False
    """The last step instead."""
    trust: bool = False
    """Execute the recipe's source in the run's folder, though somebody else trained the run."""
    runs: Path = RUNS
    """Where run folders are."""


def main(arguments: Sequence[str]) -> int:
    """Parses and does it; the exit code."""
    options = parse(QuantizeOptions, arguments, program="meshrec quantize")
    run = find_run(options.run, options.runs, trust=options.trust)
    budget = None if options.max_loss is None else _fraction(options.max_loss)

    def work(ranks: Ranks) -> None:
        made = quantize_run(
            run,
            ranks,
            options.out,
            max_loss=budget,
            weights=DataType[options.weights],
            rounding=options.rounding,
            step=options.step,
            last=options.last,
        )
        _tell(made, options.out)

    return on_ranks("quantize", arguments, work, nproc=1, device="cpu")


def _tell(made: QuantisedRun, folder: Path) -> None:
    for name, size in table_bytes(made.model).items():
        chosen = "" if made.choice is None else f"  {made.choice.types[name]}"
        print(f"  {name:24} {size_text(size):>10}{chosen}")
    if made.choice is not None:
        print(summary(made.choice))
        print(f"bytes against loss, table by table: {folder / 'report.html'}")
    print(f"the quantised model: {folder}")


def _fraction(text: str) -> float:
    try:
        return float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        raise ValueError(f"--max-loss is {text!r}; give a fraction such as 0.02%, or 0.0002.") from None
