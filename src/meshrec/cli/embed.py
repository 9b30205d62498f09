"""``meshrec embed``: the vectors of a feature, with the values that have them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro

from meshrec.cli.arguments import parse
from meshrec.cli.output import check_output
from meshrec.train.run_folder import RUNS, find_run
from meshrec.train.vectors import load_table, values_of_rows


@dataclass(frozen=True, kw_only=True)
class EmbedOptions:
    """Writes one vector per row of a feature's table, and beside it the value that the row stands for.

    .parquet has the columns row, value and vector; value is null for rows that stand for no single value:
    those of unseen and missing ones, and all of a hashed feature. .npy has the vectors alone, in the order of
    rows.
    """

    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """A run, by name or folder: the weights that it reports."""
    feature: str
    """The feature whose table is written."""
    out: Path
    """The file to write, .parquet or .npy."""
    step: int | None = None
    """The checkpoint of that step instead."""
    last: bool = False
    """The last step instead."""
    runs: Path = RUNS
    """Where run folders are."""


def main(arguments: Sequence[str]) -> int:
    """Parses and does it; the exit code."""
    options = parse(EmbedOptions, arguments, program="meshrec embed")
    check_output(options.out)
    if options.out.suffix not in (".parquet", ".npy"):
        raise ValueError(f"{options.out} ends in {options.out.suffix!r}. Name a .parquet or .npy file.")
    run = find_run(options.run, options.runs)
    vectors = load_table(run, options.feature, step=options.step, last=options.last).float().numpy()
    if options.out.suffix == ".npy":
        np.save(options.out, vectors)
    else:
        _write(options.out, vectors, values_of_rows(run, options.feature, len(vectors)))
    print(f"{options.out}: {len(vectors):,} vectors of {vectors.shape[1]} of feature {options.feature!r}")
    return 0


def _write(out: Path, vectors: "np.typing.NDArray[np.float32]", values: Any) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    column = pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), vectors.shape[1])
    rows = pa.array(np.arange(len(vectors), dtype=np.int64))
    pq.write_table(pa.table({"row": rows, "value": values, "vector": column}), out)
