"""Tables that are not Parquet: CSV files, and frames in memory."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshrec.data.dataset import Paths
from meshrec.data.encoding import Encoding
from meshrec.data.faults import DataError, Faults, needs
from meshrec.data.parquet import expand, open_parquet
from meshrec.data.streaming import Source
from meshrec.data.tables import ArrowSource

if TYPE_CHECKING:
    import pyarrow as pa


def to_table(frame: Any) -> "pa.Table":
    """A table of Arrow, from one of Arrow, pandas, polars, or a dataset of Hugging Face.

    Takes whatever offers Arrow's stream (``__arrow_c_stream__``) as well.

    Raises:
        ValueError: it is none of these.
    """
    pa = needs("pyarrow", "data")
    if isinstance(frame, pa.Table):
        return frame
    if type(frame).__module__.startswith("pandas."):
        return pa.Table.from_pandas(frame, preserve_index=False)
    if type(frame).__module__.startswith("datasets."):  # rows may be chosen by indices: it takes care of them
        return frame.with_format("arrow")[:]
    if hasattr(frame, "__arrow_c_stream__"):
        return pa.table(frame)
    raise ValueError(
        f"a {type(frame).__name__} is no table. Give one of Arrow, pandas, polars or Hugging Face, or paths."
    )


def read_csv(path: Path) -> "pa.Table":
    """A CSV file with a header, in memory; types are those that Arrow sees in it.

    Raises:
        DataError: names the file and the row.
    """
    pa, csv = needs("pyarrow", "data"), needs("pyarrow.csv", "data")
    try:
        return csv.read_csv(path, convert_options=csv.ConvertOptions(strings_can_be_null=True))
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path} cannot be read as CSV: {error}. Repair the file.") from error


def open_tables(data: Any, schema: Encoding, faults: Faults) -> Source:
    """A source of Parquet or CSV files, or of a frame; see `meshrec.data.tables.table_dataset`.

    CSV files are read into memory; large ones are better made Parquet once.

    Raises:
        DataError: paths stand for no file, or for files of two kinds.
    """
    if not _is_paths(data):
        return ArrowSource([("memory", to_table(data))], schema, faults)
    paths: Paths = data
    several = [paths] if isinstance(paths, str | Path) else list(paths)
    text = [str(each).endswith((".csv", ".csv.gz")) for each in several]
    if not any(text):
        return open_parquet(paths, schema, faults)
    if not all(text):
        raise DataError(f"{[str(each) for each in several]} are CSV and other files. Give files of one kind.")
    return ArrowSource([(str(path), read_csv(path)) for path in expand(paths, "*.csv")], schema, faults)


def _is_paths(data: Any) -> bool:
    return isinstance(data, str | Path) or (
        isinstance(data, list | tuple) and all(isinstance(each, str | Path) for each in data)
    )
