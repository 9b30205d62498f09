"""Tables that are not Parquet: CSV files, and frames in memory."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from meshrec.data.encoding import Encoding
from meshrec.data.faults import DataError, Faults, needs
from meshrec.data.locations import File, codec_of, expand_tables, is_address, opened
from meshrec.data.parquet import open_parquet
from meshrec.data.streaming import Source
from meshrec.data.tables import ArrowSource

if TYPE_CHECKING:
    import pyarrow as pa


def to_table(frame: Any) -> "pa.Table":
    """Convert a table of Arrow, pandas or polars, or a Hugging Face dataset, to an Arrow table.

    Any object with Arrow's stream interface (``__arrow_c_stream__``) is accepted as well.

    Raises:
        ValueError: ``frame`` is none of these.
    """
    pa = needs("pyarrow", "data")
    if isinstance(frame, pa.Table):
        return _without_views(frame)
    if type(frame).__module__.startswith("pandas."):
        return pa.Table.from_pandas(frame, preserve_index=False)
    if type(frame).__module__.startswith("datasets."):  # rows may be chosen by indices: it takes care of them
        return frame.with_format("arrow")[:]
    if hasattr(frame, "__arrow_c_stream__"):
        return _without_views(pa.table(frame))
    raise ValueError(
        f"a {type(frame).__name__} is not a table. Give a table of Arrow, pandas, polars or Hugging "
        "Face, or paths."
    )


def _without_views(table: "pa.Table") -> "pa.Table":
    """Replace views of texts and lists, which polars gives, by plain texts and lists."""
    plain = [each.with_type(_plain_type(each.type)) for each in table.schema]
    return table if plain == list(table.schema) else table.cast(needs("pyarrow", "data").schema(plain))


def _plain_type(kind: Any) -> Any:
    pa = needs("pyarrow", "data")
    if pa.types.is_dictionary(kind):
        return pa.dictionary(kind.index_type, _plain_type(kind.value_type), kind.ordered)
    outer = str(kind).split("<")[0]
    if outer in ("list_view", "large_list_view", "list", "large_list"):
        inner = _plain_type(kind.value_type)
        return kind if inner == kind.value_type and "view" not in outer else pa.large_list(inner)
    return {"string_view": pa.large_string(), "binary_view": pa.large_binary()}.get(outer, kind)


def read_csvs(paths: Sequence[File], kinds: Mapping[str, str] = MappingProxyType({})) -> list["pa.Table"]:
    """Read CSV files with a header into memory, with the same column types in all of them.

    A column has the type that Arrow infers, or string if one of the files has text in it. Markers such as
    ``NA`` are null in columns of numbers. In columns of text they are text, and only the empty string is
    missing.

    Args:
        paths: the files.
        kinds: known kinds of columns (text, integer, number), which override what Arrow infers.

    Raises:
        DataError: a file cannot be read; names the file and the row.
    """
    pa = needs("pyarrow", "data")
    known = {"text": pa.string(), "number": pa.float64()}  # integers may be written as true and false
    types = {name: known[kind] for name, kind in kinds.items() if kind in known}
    tables = [_read_csv(path, types) for path in paths]
    for name in dict.fromkeys(name for each in tables for name in each.column_names):
        found = {each.schema.field(name).type for each in tables if name in each.column_names}
        common = _common_type(found - {pa.null()}) if len(found) > 1 else found.pop()
        empty = {"integer": pa.int64(), "time": pa.timestamp("us")}.get(kinds.get(name, ""), common)
        types[name] = empty if common == pa.null() else common
    wanted = [{name: types[name] for name in each.column_names} for each in tables]
    return [
        each
        if dict(zip(each.column_names, each.schema.types, strict=True)) == want
        else _read_csv(path, want)
        for path, each, want in zip(paths, tables, wanted, strict=True)
    ]


def _common_type(found: set[Any]) -> Any:
    """Return a type that can hold what several files have in one column."""
    pa = needs("pyarrow", "data")
    if len(found) == 1:
        return found.pop()
    if all(pa.types.is_integer(each) for each in found):
        return pa.uint64()
    if all(pa.types.is_integer(each) or pa.types.is_floating(each) for each in found):
        return pa.float64()
    dated = all(pa.types.is_date(each) or pa.types.is_timestamp(each) for each in found)
    return pa.timestamp("us") if dated else pa.string()


def _read_csv(path: File, types: Mapping[str, Any]) -> "pa.Table":
    pa, csv, pc = (needs(each, "data") for each in ("pyarrow", "pyarrow.csv", "pyarrow.compute"))

    def read(types: Mapping[str, Any]) -> Any:
        convert = csv.ConvertOptions(strings_can_be_null=False, column_types=dict(types))
        lines = csv.ParseOptions(newlines_in_values=True)
        if not is_address(path):  # whose name says how it is compressed
            return csv.read_csv(path, convert_options=convert, parse_options=lines)
        with opened(path) as source:
            codec = codec_of(path)
            plain = source if codec is None else pa.CompressedInputStream(source, codec)
            return csv.read_csv(plain, convert_options=convert, parse_options=lines)

    try:
        table = read(types)
        names = table.column_names
        _check_header(path, names)
        for at, name in enumerate(names):
            if name not in types and _may_be_rounded(table[name]):
                texts = read({**types, name: pa.string()})[name]
                if pc.all(pc.match_substring_regex(texts, "^[0-9]*$")).as_py():
                    table = table.set_column(at, name, _whole_numbers(texts))
        return table
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: its header is not UTF-8: {error}. Write the file as UTF-8.") from error
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path} cannot be read as CSV: {error}. Repair the file.") from error


def _check_header(path: File, names: list[str]) -> None:
    """Raise DataError if a column name occurs twice, or if all columns seem to be one."""
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise DataError(f"{path}: columns need names of their own, given twice: {twice}. Rename them.")
    if len(names) == 1 and any(sign in names[0] for sign in ";\t"):
        raise DataError(
            f"{path} has one column, {names[0]!r}: commas part the columns of CSV. Write it with commas, or "
            "as Parquet."
        )


def _may_be_rounded(column: Any) -> bool:
    """Return whether a column has numbers beyond int64. Arrow reads such integers as floats."""
    pa, pc = needs("pyarrow", "data"), needs("pyarrow.compute", "data")
    return pa.types.is_floating(column.type) and bool(pc.any(pc.greater_equal(column, 2.0**63)).as_py())


def _whole_numbers(texts: Any) -> Any:
    """Convert texts to uint64. Texts of longer numbers stay texts."""
    pa, pc = needs("pyarrow", "data"), needs("pyarrow.compute", "data")
    try:
        return pc.if_else(pc.equal(texts, ""), pa.scalar(None, pa.string()), texts).cast(pa.uint64())
    except pa.ArrowInvalid:
        return texts


def read_columns(data: Any, columns: Sequence[str]) -> "pa.Table":
    """Read some columns of Parquet files, CSV files or a frame into memory, as one table.

    Columns that a file lacks are left out.

    Raises:
        DataError: a file cannot be read.
    """
    pa = needs("pyarrow", "data")
    if not _is_paths(data):
        tables = [to_table(data)]
    else:
        files, text = expand_tables(data)
        tables = read_csvs(files) if text else [_read_parquet(file, columns) for file in files]
    found = [each.select([name for name in columns if name in each.column_names]) for each in tables]
    return pa.concat_tables(found, promote_options="permissive")


def _read_parquet(file: File, columns: Sequence[str]) -> "pa.Table":
    from meshrec.data.parquet import open_parquet_file

    pa = needs("pyarrow", "data")
    try:
        with open_parquet_file(file) as opened_file:
            names = [name for name in columns if name in opened_file.schema_arrow.names]
            return _without_views(opened_file.read(columns=names))
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{file} cannot be read as Parquet: {error}. Repair the file.") from error


def open_tables(data: Any, schema: Encoding, faults: Faults) -> Source:
    """Open Parquet files, CSV files or a frame as a source; see `meshrec.data.tables.table_dataset`.

    A folder stands for its Parquet files, or for its CSV files if it has no Parquet files. CSV files
    (``.csv``, also with ``.gz``, ``.bz2`` or ``.zst``) are read into memory. Convert large ones to Parquet
    once.

    Raises:
        DataError: the paths match no file, or files of both kinds.
    """
    if not _is_paths(data):
        return ArrowSource([("memory", to_table(data))], schema, faults)
    files, text = expand_tables(data)
    if not text:
        return open_parquet(files, schema, faults)
    tables = read_csvs(files, schema.fitted_kinds())
    return ArrowSource([(str(file), each) for file, each in zip(files, tables, strict=True)], schema, faults)


def _is_paths(data: Any) -> bool:
    return isinstance(data, str | Path) or (
        isinstance(data, list | tuple) and all(isinstance(each, str | Path) for each in data)
    )
