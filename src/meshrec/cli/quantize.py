"""``meshrec quantize``: quantize the tables in a run's model."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from meshrec.cli.arguments import parse
from meshrec.cli.on_ranks import on_ranks
from meshrec.cli.run_options import RunOptions
from meshrec.modules import DataType
from meshrec.plan.text import size_text
from meshrec.quant import table_bytes
from meshrec.quant.page import summary
from meshrec.quant.precision import Rounding
from meshrec.runs.quantize import QuantisedRun, quantize_run
from meshrec.train.ranks import Ranks


@dataclass(frozen=True, kw_only=True)
class QuantizeOptions(RunOptions):
    """Quantize the tables in a run's model for inference, and write the model as a checkpoint.

    With --max-loss, every table gets the smallest precision that the loss budget allows, measured on the
    run's validation data. A refit on all rows (--final all) has learned from this data. Its precisions are
    therefore measured on the first fit, and the refit is then quantized.
    """

    out: Path
    """Folder for the new checkpoint; it must not exist."""
    max_loss: str | None = None
    """Maximum increase of the normalized entropy, with 95 % confidence: 0.02%, or 0.0002."""
    weights: Literal["INT8", "INT4", "INT2", "FP16", "BF16"] = "INT8"
    """Precision for all tables; ignored with --max-loss."""
    rounding: Rounding = "search"
    """How a row's value range is chosen: minmax as in FBGEMM; search has a smaller error."""


def main(arguments: Sequence[str]) -> int:
    options = parse(QuantizeOptions, arguments, program="meshrec quantize")
    run = options.folder()
    # Parse before the ranks start, so that a mistake fails early.
    budget = None if options.max_loss is None else _parse_fraction(options.max_loss)

    def work(ranks: Ranks) -> None:
        """Quantize the run's tables, save the checkpoint, and print the result."""
        quantised = quantize_run(
            run,
            ranks,
            options.out,
            max_loss=budget,
            weights=DataType[options.weights],
            rounding=options.rounding,
            step=options.step,
            last=options.last,
            measured=options.first_fit(),
        )
        _print_result(quantised, options.out)

    return on_ranks("quantize", arguments, work, nproc=1, device="cpu")


def _print_result(quantised: QuantisedRun, folder: Path) -> None:
    """Print the size and precision of every table, and the location of the result."""
    for name, size in table_bytes(quantised.model).items():
        data_type = "" if quantised.choice is None else f"  {quantised.choice.types[name]}"
        print(f"  {name:24} {size_text(size):>10}{data_type}")
    if quantised.choice is not None:
        print(summary(quantised.choice))
        print(f"bytes against loss, table by table: {folder / 'report.html'}")
    print(f"the quantised model: {folder}")


def _parse_fraction(text: str) -> float:
    """Parse a fraction, such as ``0.0002`` or ``0.02%``."""
    try:
        return float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        raise ValueError(f"--max-loss is {text!r}; give a fraction such as 0.02%, or 0.0002.") from None
