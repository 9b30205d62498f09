"""``meshrec similar``: write the items that are most similar to some items, by a run of next items."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from meshrec.cli.arguments import Words, check_output, parse
from meshrec.cli.run_options import RunOptions


@dataclass(frozen=True, kw_only=True)
class SimilarOptions(RunOptions):
    """Write the items whose vectors have the largest cosine with those of some items: a row with item, rank,
    similar and score for each.
    """

    out: Path | None = None
    """File to write: .parquet or .csv; if none, the rows are printed."""
    items: Words = ()
    """Items, as they are in the log; if none, all items of the log."""
    k: Annotated[int, tyro.conf.arg(aliases=("-k",))] = 10
    """Number of similar items for each item."""
    force: bool = False
    """Replace a file that exists."""


def main(arguments: Sequence[str]) -> int:
    options = parse(SimilarOptions, arguments, program="meshrec similar")
    check_output(options.out, force=options.force)
    run = options.folder()
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
