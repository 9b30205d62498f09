"""``meshrec embed``: write a feature's embedding table to a file, with the data value of every row."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from meshrec.cli.arguments import check_output, parse
from meshrec.cli.run_options import RunOptions
from meshrec.data.faults import needs
from meshrec.runs.vectors import load_table, values_of_rows


@dataclass(frozen=True, kw_only=True)
class EmbedOptions(RunOptions):
    """Write all embeddings in a feature's table, with the data value of every row.

    .parquet has the columns row, value and vector. The value is null for rows without a single value: rows
    for unseen and missing values, and all rows of a feature with hashed buckets. In a table of raw IDs
    (meshrec.Hashed), the value is the ID; the ID of a string is a 64-bit hash.
    .usearch and .faiss are indexes for maximum inner product search (pip install "meshrec[index]"), with row
    numbers as keys; a .parquet file with the same name is written too.
    .npy has only the vectors, in row order.
    """

    feature: str
    """Feature name."""
    out: Path
    """File to write: .parquet, .npy, .usearch or .faiss."""
    force: bool = False
    """Replace an existing file."""


def main(arguments: Sequence[str]) -> int:
    options = parse(EmbedOptions, arguments, program="meshrec embed")
    check_output(options.out, force=options.force)
    write_index = _INDICES.get(options.out.suffix)
    if write_index is not None:
        # An index is accompanied by a .parquet file with the same name.
        check_output(options.out.with_suffix(".parquet"), force=options.force)
    if options.out.suffix not in (".parquet", ".npy", *_INDICES):
        raise ValueError(
            f"{options.out} ends in {options.out.suffix!r}. Name a .parquet, .npy, .usearch or .faiss file."
        )
    run = options.folder()
    table = load_table(run, options.feature, step=options.step, last=options.last)
    # numpy has no bfloat16.
    vectors = table.rows.float().numpy()
    if options.out.suffix == ".npy":
        np.save(options.out, vectors)
    else:
        if write_index is not None:
            write_index(options.out, vectors)
        values = (
            values_of_rows(run, options.feature, len(vectors)) if table.ids is None else table.ids.numpy()
        )
        _write_parquet(options.out.with_suffix(".parquet"), vectors, values)
    print(f"{options.out}: {len(vectors):,} vectors of {vectors.shape[1]} of feature {options.feature!r}")
    return 0


def _write_usearch(out: Path, vectors: "np.typing.NDArray[np.float32]") -> None:
    """Write a USearch index for maximum inner product search, with row numbers as keys."""
    index = needs("usearch.index", "index").Index(ndim=vectors.shape[1], metric="ip", dtype="f32")
    index.add(np.arange(len(vectors), dtype=np.uint64), vectors)
    index.save(str(out))


def _write_faiss(out: Path, vectors: "np.typing.NDArray[np.float32]") -> None:
    """Write an exact FAISS index for maximum inner product search."""
    faiss = needs("faiss", "index")
    index = faiss.IndexFlatIP(vectors.shape[1])
    index.add(vectors)
    faiss.write_index(index, str(out))


# Functions that write an index, by file suffix.
_INDICES = {".usearch": _write_usearch, ".faiss": _write_faiss}


def _write_parquet(out: Path, vectors: "np.typing.NDArray[np.float32]", values: Any) -> None:
    """Write a Parquet file with the columns row, value and vector."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    column = pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), vectors.shape[1])
    rows = pa.array(np.arange(len(vectors), dtype=np.int64))
    pq.write_table(pa.table({"row": rows, "value": values, "vector": column}), out)
