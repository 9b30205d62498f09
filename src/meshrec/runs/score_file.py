"""Files of scores: one row for every row of the data, in its order, with columns of the data beside the
score.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from meshrec.train.evaluation import DEFAULT_LOSS, Scored
from meshrec.train.losses import Loss

if TYPE_CHECKING:
    from meshrec.data import Dataset, StreamReader

_ROW_GROUP = 1 << 17


def write_scores(
    out: Path,
    dataset: "Dataset",
    scored: Iterator[Scored],
    *,
    keep: Sequence[str] = (),
    loss: Loss = DEFAULT_LOSS,
) -> int:
    """Write one row for every row of the data, in its order: ``score``, and columns of the data beside it.

    Several tasks have one column each, ``score_TASK``. A damaged row that was skipped has a null score.

    Args:
        out: a ``.parquet`` or ``.csv`` file. An existing file is replaced once everything is written.
        dataset: its training part is the data to score.
        scored: the results of `gathered`.
        keep: columns of the data to write; by default those of the IDs.
        loss: converts outputs of the model to scores.

    Returns:
        The number of rows without a score.

    Raises:
        DataError: a column does not exist; raised before anything is scored.
    """
    import pyarrow as pa

    from meshrec.data import StreamReader

    reader = dataset.train
    assert isinstance(reader, StreamReader)
    names = list(keep) or list(dataset.id_columns or (each.name for each in dataset.features))
    titles = list(loss.score_names())
    if set(titles) & set(names):
        raise ValueError(f"--keep {' '.join(names)}: scores are named {titles}; rename the data's columns.")
    columns = _ColumnReader(reader, names)
    num_empty = 0
    with table_writer(out) as write:
        for scores in _whole(scored, reader.num_samples, loss, len(titles)):
            num_empty += scores[0].null_count
            write(pa.table({**columns.take(len(scores[0])), **dict(zip(titles, scores, strict=True))}))
    return num_empty


def _whole(scored: Iterator[Scored], num_rows: int, loss: Loss, num_tasks: int) -> Iterator[list[Any]]:
    """Split scores of consecutive rows by task; null if there are none."""
    import pyarrow as pa

    done = 0
    for each in scored:
        assert each.rows_B is not None
        if len(each.rows_B) == 0:
            continue
        size = int(each.rows_B[-1]) + 1 - done
        values, known = np.zeros((size, num_tasks), np.float32), np.zeros(size, np.bool_)
        at = each.rows_B.numpy() - done
        values[at], known[at] = loss.scores(each.logits_B).reshape(-1, num_tasks).numpy(), True
        yield [pa.array(values[:, task], mask=~known) for task in range(num_tasks)]
        done += size
    if done < num_rows:
        yield [pa.nulls(num_rows - done, pa.float32())] * num_tasks


class _ColumnReader:
    """Reader of columns of the data, in portions of any number of rows."""

    def __init__(self, reader: "StreamReader", names: Sequence[str]) -> None:
        import pyarrow as pa

        self._blocks = (pa.table(block) for block in reader.columns(names))
        self._rest = next(self._blocks)

    def take(self, num: int) -> dict[str, Any]:
        """Return the next ``num`` rows."""
        import pyarrow as pa

        while len(self._rest) < num:
            self._rest = pa.concat_tables([self._rest, next(self._blocks)])
        taken, self._rest = self._rest.slice(0, num), self._rest.slice(num)
        return dict(zip(taken.column_names, taken.columns, strict=True))


@contextmanager
def table_writer(out: Path) -> Iterator[Callable[[Any], None]]:
    """Open a writer of tables. The file appears only when all tables are written without an error."""
    import pyarrow as pa
    import pyarrow.csv as csv
    import pyarrow.parquet as parquet

    kinds = {".parquet": parquet.ParquetWriter, ".csv": csv.CSVWriter}
    if out.suffix not in kinds:
        raise ValueError(
            f"{out} ends in {out.suffix!r}: scores are written as {' or '.join(kinds)}. Name one of these."
        )
    scratch = out.with_name(f".{out.name}.{os.getpid()}")
    opened: list[Any] = []
    waiting: list[Any] = []

    def flush() -> None:
        whole = pa.concat_tables(waiting)
        waiting.clear()
        if not opened:
            nested = [field.name for field in whole.schema if pa.types.is_nested(field.type)]
            if nested and out.suffix == ".csv":
                raise ValueError(
                    f"{out}: CSV has no lists, as {nested} are. Write .parquet, or --keep others."
                )
            opened.append(kinds[out.suffix](str(scratch), whole.schema))
        opened[0].write_table(whole)

    def write(table: Any) -> None:
        waiting.append(table)
        if sum(map(len, waiting)) >= _ROW_GROUP:
            flush()

    try:
        yield write
        if waiting:
            flush()
        opened[0].close()
        scratch.replace(out)
    finally:
        scratch.unlink(missing_ok=True)
