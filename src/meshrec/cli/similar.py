"""``meshrec similar``: write the most similar items for given items, from a next-item run."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from meshrec.cli.arguments import TABLES, Words, check_output, parse
from meshrec.cli.run_options import RunOptions


@dataclass(frozen=True, kw_only=True)
class SimilarOptions(RunOptions):
    """Write the most similar items for given items, by cosine between item vectors.

    A row has the columns item, rank (from 1), similar (the similar item) and score (the cosine).
    """

    out: Path | None = None
    """File to write: .parquet or .csv; none: print the rows."""
    items: Words = ()
    """Item values from the log; none: all items in the log."""
    k: Annotated[int, tyro.conf.arg(aliases=("-k",))] = 10
    """Number of similar items per item."""
    force: bool = False
    """Replace an existing file."""


def main(arguments: Sequence[str]) -> int:
    options = parse(SimilarOptions, arguments, program="meshrec similar")
    check_output(options.out, force=options.force, suffixes=TABLES)
    run = options.folder()
    # Imported here, because torch takes seconds, and mistakes in the options are reported before.
    import pyarrow as pa

    from meshrec.runs.recommending import similar_items
    from meshrec.runs.score_file import table_writer

    items = pa.array(options.items) if options.items else None
    table = similar_items(run, items, options.k, step=options.step, last=options.last)
    if options.out is None:
        for row in table.to_pylist():
            print(f"{row['item']}  {row['rank']:>3}  {row['similar']}  {row['score']:.4f}")
        return 0
    with table_writer(options.out) as write:
        write(table)
    print(f"{options.out}: {len(table):,} similar items")
    return 0
