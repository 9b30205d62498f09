"""``meshrec explain``: compute how much every data column contributes to single predictions."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from meshrec.cli.arguments import TABLES, Words, check_output, parse
from meshrec.cli.run_options import RunOptions


@dataclass(frozen=True, kw_only=True)
class ExplainOptions(RunOptions):
    """Compute how much every column contributes to the predictions for rows, compared with background rows.

    Contributions are Shapley values, in logits or in label units. The base is the mean output for background
    rows. Base and contributions add up to the output.
    """

    data: tuple[str, ...]
    """Files, folders or patterns with the rows, in the format of the training data. A row takes some hundreds
    of predictions.
    """
    background: Words = ()
    """Files with background rows; none: the run's training data."""
    orders: int = 32
    """Number of random column orders: four times as many halve the error."""
    out: Path | None = None
    """File to write: .parquet or .csv; none: print the contributions."""
    force: bool = False
    """Replace an existing file."""


def main(arguments: Sequence[str]) -> int:
    options = parse(ExplainOptions, arguments, program="meshrec explain")
    check_output(options.out, force=options.force, suffixes=TABLES)
    run = options.folder()
    # Imported after the options are checked, because these imports take long.
    from meshrec.runs.contributions import BASE, OUTPUT, contributions
    from meshrec.runs.score_file import table_writer

    table = contributions(
        run,
        options.data,
        background=options.background or None,
        num_orders=options.orders,
        step=options.step,
        last=options.last,
        tell=lambda text: print(text, file=sys.stderr),
    )
    if options.out is not None:
        with table_writer(options.out) as write:
            write(table)
        print(f"{options.out}: contributions to {len(table):,} rows")
        return 0
    for number, row in enumerate(table.to_pylist()):
        base, output = row.pop(BASE), row.pop(OUTPUT)
        print(f"row {number}: {output:.4f}, of which {base:.4f} is the base")
        for name in sorted(row, key=lambda name: -abs(row[name])):
            print(f"  {name:24} {row[name]:+.4f}")
    return 0
