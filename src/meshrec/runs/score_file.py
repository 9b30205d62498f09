"""Write score files: a row per data row, in data order, with the score and some data columns."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from meshrec.durable import durable_file
from meshrec.train.evaluation import DEFAULT_LOSS, Scored
from meshrec.train.losses import Loss

if TYPE_CHECKING:
    from meshrec.data import Dataset, StreamReader

# Rows per Parquet row group or CSV write. Smaller batches are collected first.
_ROW_GROUP = 1 << 17


def write_scores(
    out: Path,
    dataset: "Dataset",
    scored: Iterator[Scored],
    *,
    keep: Sequence[str] = (),
    loss: Loss = DEFAULT_LOSS,
) -> int:
    """Write a file with a row per data row, in data order: some data columns, and the column ``score``.

    A model with several tasks has a score column per task, ``score_TASK``. If the reader skipped a data row
    because it is damaged, its score is null.

    Args:
        out: a ``.parquet`` or ``.csv`` file. An existing file is replaced once everything is written.
        dataset: dataset whose training part is the data to score.
        scored: output of `meshrec.runs.scoring.gather_scores`.
        keep: names of the data columns to write; if empty, the ID columns.
        loss: the recipe's loss, which converts model outputs to scores.

    Returns:
        Number of rows without a score.

    Raises:
        DataError: a column does not exist; raised before anything is scored.
        ValueError: a data column has the name of a score.
    """
    import pyarrow as pa

    from meshrec.data import StreamReader

    reader = dataset.train
    assert isinstance(reader, StreamReader)
    names = list(keep) or list(dataset.id_columns or (feature.name for feature in dataset.features))
    titles = list(loss.score_names())
    if set(titles) & set(names):
        raise ValueError(f"--keep {' '.join(names)}: scores are named {titles}; rename the data's columns.")
    # Reads the first block, so an unknown column raises before anything is scored.
    columns = _ColumnReader(reader, names)
    num_empty = 0
    with table_writer(out) as write:
        for scores in _fill_skipped_rows(scored, reader.num_samples, loss, len(titles)):
            # All tasks of a row are missing together.
            num_empty += scores[0].null_count
            write(pa.table({**columns.take(len(scores[0])), **dict(zip(titles, scores, strict=True))}))
    return num_empty


def _fill_skipped_rows(
    scored: Iterator[Scored], num_rows: int, loss: Loss, num_tasks: int
) -> Iterator[list[Any]]:
    """Convert model outputs to scores for all data rows in order; null for rows the reader skipped."""
    import pyarrow as pa

    num_written = 0
    for part in scored:
        assert part.rows_B is not None
        if len(part.rows_B) == 0:
            continue
        # Gaps between row numbers are skipped rows, which get a null score.
        size = int(part.rows_B[-1]) + 1 - num_written
        values, has_score = np.zeros((size, num_tasks), np.float32), np.zeros(size, np.bool_)
        # Positions in this portion.
        at = part.rows_B.numpy() - num_written
        values[at], has_score[at] = loss.scores(part.logits_B).reshape(-1, num_tasks).numpy(), True
        yield [pa.array(values[:, task], mask=~has_score) for task in range(num_tasks)]
        num_written += size
    # Skipped rows at the end of the data have no batch.
    if num_written < num_rows:
        yield [pa.nulls(num_rows - num_written, pa.float32())] * num_tasks


class _ColumnReader:
    """Reader of data columns in portions of any size, from a reader that yields blocks of a fixed size."""

    def __init__(self, reader: "StreamReader", names: Sequence[str]) -> None:
        import pyarrow as pa

        self._blocks = (pa.table(block) for block in reader.columns(names))
        # Rows already read, but not yet returned by `take`.
        self._remaining = next(self._blocks)

    def take(self, num: int) -> dict[str, Any]:
        """Return the next ``num`` rows, as Arrow columns by name."""
        import pyarrow as pa

        while len(self._remaining) < num:
            self._remaining = pa.concat_tables([self._remaining, next(self._blocks)])
        taken, self._remaining = self._remaining.slice(0, num), self._remaining.slice(num)
        return dict(zip(taken.column_names, taken.columns, strict=True))


@contextmanager
def table_writer(out: Path) -> Iterator[Callable[[Any], None]]:
    """Context manager that yields a function to append an Arrow table to a Parquet or CSV file.

    The file appears only at the end of the ``with`` block, unless there was an error.

    Raises:
        ValueError: the file name has another suffix, or a CSV column would have lists.
    """
    import pyarrow as pa
    import pyarrow.csv as csv
    import pyarrow.parquet as parquet

    kinds = {".parquet": parquet.ParquetWriter, ".csv": csv.CSVWriter}
    if out.suffix not in kinds:
        raise ValueError(
            f"{out} ends in {out.suffix!r}: scores are written as {' or '.join(kinds)}. Name one of these."
        )
    # Tables not yet written.
    waiting: list[Any] = []

    def writer_of(schema: Any, file: BinaryIO) -> Any:
        """Return the Arrow writer for the suffix of ``out``. Raise ValueError if a CSV column has lists."""
        nested = [field.name for field in schema if pa.types.is_nested(field.type)]
        if nested and out.suffix == ".csv":
            raise ValueError(f"{out}: CSV has no lists, as {nested} are. Write .parquet, or --keep others.")
        return kinds[out.suffix](file, schema)

    with durable_file(out) as file, ExitStack() as opened:
        writer: Any = None

        # The schema comes from the first tables, so the writer opens at the first flush.
        def flush() -> None:
            """Write all waiting tables as a single table."""
            nonlocal writer
            whole = pa.concat_tables(waiting)
            waiting.clear()
            if writer is None:
                writer = opened.enter_context(writer_of(whole.schema, file))
            writer.write_table(whole)

        def write(table: Any) -> None:
            """Append a table to the waiting tables, and write them once they fill a row group."""
            waiting.append(table)
            if sum(map(len, waiting)) >= _ROW_GROUP:
                flush()

        yield write
        # Without any table, `flush` raises here instead of leaving a file without a schema.
        if waiting or writer is None:
            flush()
