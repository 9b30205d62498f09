"""Tables from CSV files, JSON lines and frames in memory, and functions that choose a reader by file name.

A frame is a table in memory: an Arrow, pandas or polars table, or a Hugging Face dataset.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from meshrec.data.arrow import pa, pa_csv, pa_json, pc
from meshrec.data.csv_dialects import DETECTED, CsvFormat, Dialect, dialect_of
from meshrec.data.encoding import Encoding
from meshrec.data.exact_columns import plain_table
from meshrec.data.faults import DataError, Faults
from meshrec.data.locations import (
    File,
    codec_of,
    expand_tables,
    is_address,
    is_json,
    not_parquet,
    opened,
)
from meshrec.data.parquet import ParquetSource, open_parquet_file
from meshrec.data.partitions import partition_keys, with_keys
from meshrec.data.streaming import Source
from meshrec.data.tables import ArrowSource


def to_table(frame: Any) -> "pa.Table":
    """Convert a frame to an Arrow table with `plain` columns.

    Args:
        frame: an Arrow, pandas or polars table, a Hugging Face dataset, or any other object with Arrow's
            stream interface (``__arrow_c_stream__``).

    Raises:
        DataError: a column has values that Arrow cannot represent.
        ValueError: ``frame`` is none of these.
    """

    if isinstance(frame, pa.Table):
        return plain_table(frame)
    # By module name, because pandas may not be installed.
    if type(frame).__module__.split(".")[0] == "pandas":
        return plain_table(_from_pandas(frame))
    if type(frame).__module__.startswith("datasets."):  # handles index-based row selections
        return plain_table(frame.with_format("arrow")[:])
    if hasattr(frame, "__arrow_c_stream__"):
        try:
            return plain_table(pa.table(frame))
        except (pa.ArrowException, OverflowError) as error:
            raise DataError(
                f"a {type(frame).__name__} cannot become an Arrow table: {error}. Give integers beyond 64 "
                "bits as decimals, such as Decimal(38, 0)."
            ) from error
    raise ValueError(
        f"a {type(frame).__name__} is not a table. Give a table of Arrow, pandas, polars or Hugging "
        "Face, or paths."
    )


def _from_pandas(frame: Any) -> "pa.Table":
    """Convert a pandas table to Arrow. The error names the first column that Arrow cannot represent."""
    try:
        return pa.Table.from_pandas(frame, preserve_index=False)
    except (pa.ArrowException, TypeError, OverflowError) as error:
        # Arrow's error does not name the column, so convert the columns one by one.
        for name in frame.columns:
            column = frame[name]
            try:
                pa.array(column, from_pandas=True)
            except (pa.ArrowException, TypeError, OverflowError):
                kinds = sorted({type(value).__name__ for value in column.dropna()})
                raise DataError(
                    f"column {name!r} of the pandas table has values of {' and '.join(kinds)}, which have no "
                    f"common type of Arrow ({error}). Give it one type, such as text: "
                    f"frame[{name!r}] = frame[{name!r}].astype(str)."
                ) from error
        raise DataError(f"the pandas table cannot be converted to Arrow: {error}.") from error


def read_csvs(
    paths: Sequence[File],
    kinds: Mapping[str, str] = MappingProxyType({}),
    form: CsvFormat = DETECTED,
) -> list["pa.Table"]:
    """Read CSV files with a header, or JSON lines, into memory. A column has the same type in all files.

    Arrow infers a column's type per file, and the type that represents all files is used: string if any file
    has text in the column. Numbers with leading zeros, such as ``007``, are text, unless ``kinds`` has the
    column. Markers such as ``NA`` are null in numeric columns. In text columns they are text, and only the
    empty string is missing.

    Args:
        paths: paths and URIs.
        kinds: known kinds by column name. Columns of the kind "text" or "number" get the type string or
            float64. "integer" and "numeric" columns have the number type that Arrow infers.
        form: known delimiter, decimal point and encoding; other parts are detected, see `dialect_of`.

    Returns:
        A table per file, including partition columns.

    Raises:
        DataError: a file cannot be read; names the file and row.
    """
    forced = {"text": pa.string(), "number": pa.float64()}  # integers may be written as true and false
    types = {name: forced[kind] for name, kind in kinds.items() if kind in forced}
    # Arrow infers types per file. Files that differ from the common type are read again below.
    tables = [_read_csv(path, types, kinds, form) for path in paths]
    for name in dict.fromkeys(name for table in tables for name in table.column_names):
        types_by_file = {table.schema.field(name).type for table in tables if name in table.column_names}
        common = _common_type(types_by_file - {pa.null()}) if len(types_by_file) > 1 else types_by_file.pop()
        # A column without any value in all files has no inferred type: the known kind decides.
        empty = {"integer": pa.int64(), "time": pa.timestamp("us")}.get(kinds.get(name, ""), common)
        types[name] = empty if common == pa.null() else common
    # A file may lack some columns.
    targets = [{name: types[name] for name in table.column_names} for table in tables]
    tables = [
        table
        if dict(zip(table.column_names, table.schema.types, strict=True)) == target
        else _read_csv(path, target, target, form)
        for path, table, target in zip(paths, tables, targets, strict=True)
    ]
    # For all files together, because they decide about the types.
    keys = partition_keys(paths, kinds)
    return [with_keys(table, keys[path]) for path, table in zip(paths, tables, strict=True)]


def _common_type(types: set[Any]) -> Any:
    """Return an Arrow type that can represent a column with different types in several files."""
    if len(types) == 1:
        return types.pop()
    if all(map(pa.types.is_integer, types)):
        return pa.uint64()
    if all(pa.types.is_integer(kind) or pa.types.is_floating(kind) for kind in types):
        return pa.float64()
    # Dates and times mix as times, and anything else as text.
    dated = all(pa.types.is_date(kind) or pa.types.is_timestamp(kind) for kind in types)
    return pa.timestamp("us") if dated else pa.string()


def _read_csv(path: File, types: Mapping[str, Any], fixed: Collection[str], form: CsvFormat) -> "pa.Table":
    """Read a CSV file or JSON lines.

    Args:
        fixed: columns that stay numeric. Other numeric columns become text if a number has leading zeros.
    """

    def read(types: Mapping[str, Any]) -> Any:
        """Read the whole file as an Arrow table; types of columns that ``types`` lacks are inferred."""
        with opened(path, version, buffered=True) as source:
            codec = codec_of(path)
            text = source if codec is None else pa.CompressedInputStream(source, codec)
            if is_json(path):
                # Strings with times become times, unless ``types`` has a type.
                options = pa_json.ParseOptions(explicit_schema=pa.schema(types.items()))
                return pa_json.read_json(text, parse_options=options)
            return pa_csv.read_csv(
                text,
                read_options=pa_csv.ReadOptions(encoding=dialect.encoding),
                # Markers such as NA stay text in text columns.
                convert_options=pa_csv.ConvertOptions(
                    strings_can_be_null=False, column_types=dict(types), decimal_point=dialect.decimal_point
                ),
                # Quoted fields may contain line breaks.
                parse_options=pa_csv.ParseOptions(newlines_in_values=True, delimiter=dialect.delimiter),
            )

    # The file is opened up to three times.
    version = None
    if is_address(path):
        from meshrec.data.stores import version_of

        version = version_of(str(path))
    try:
        dialect = Dialect() if is_json(path) else dialect_of(path, form)
        table = read(types)
        names = table.column_names
        _check_header(path, names)
        if is_json(path):
            return table
        # Columns in which the first pass may have lost leading zeros or low digits.
        numeric = [name for name in names if name not in types and _is_number(table[name].type)]
        numeric = [name for name in numeric if name not in fixed or _may_be_rounded(table[name])]
        if not numeric:
            return table
        # A second pass, because inference has already lost leading zeros and low digits.
        strings = read({**types, **dict.fromkeys(numeric, pa.string())})
        for name in numeric:
            column, at = strings[name], names.index(name)
            if pa.types.is_floating(table[name].type) and not _matches(pc.all, column, "^[0-9]*$"):
                continue
            if name not in fixed and _matches(pc.any, column, "^[-+]?0[0-9]+$"):
                table = table.set_column(at, name, column)
            elif _may_be_rounded(table[name]):
                table = table.set_column(at, name, _as_uint64(column))
        return table
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}: its header is not {form.encoding or 'UTF-8'}: {error}. Write it as UTF-8, or name "
            "its encoding: CsvFormat(encoding=...) in the recipe, --encoding of `meshrec inspect`."
        ) from error
    except (pa.ArrowException, OSError) as error:
        format = "JSON lines" if is_json(path) else "CSV"
        raise DataError(f"{path} cannot be read as {format}: {error}. Repair the file.") from error


def _check_header(path: File, names: list[str]) -> None:
    """Raise DataError for a duplicate column name, or for a header that the delimiter does not split."""
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise DataError(f"{path}: columns need names of their own, given twice: {twice}. Rename them.")
    # The detection has probably missed the delimiter.
    if len(names) == 1 and any(sign in names[0] for sign in ";\t"):
        raise DataError(
            f"{path} has one column, {names[0]!r}. Name the delimiter: CsvFormat(delimiter=...) "
            "in the recipe, --delimiter of `meshrec inspect`; or write the file as Parquet."
        )


def _matches(combine: Callable[[Any], Any], texts: Any, pattern: str) -> bool:
    """Return whether all strings (``combine=pc.all``) or any string (``pc.any``) match a pattern."""
    return bool(combine(pc.match_substring_regex(texts, pattern)).as_py())


def _is_number(kind: Any) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))


def _may_be_rounded(column: Any) -> bool:
    """Return whether a float column has numbers beyond int64: Arrow reads such integers as rounded floats."""
    return pa.types.is_floating(column.type) and bool(pc.any(pc.greater_equal(column, 2.0**63)).as_py())


def _as_uint64(texts: Any) -> Any:
    """Convert strings to uint64, empty ones to null. If a number does not fit, return all unchanged."""
    try:
        return pc.if_else(pc.equal(texts, ""), pa.scalar(None, pa.string()), texts).cast(pa.uint64())
    except pa.ArrowInvalid:
        return texts


def read_columns(
    data: Any,
    columns: Sequence[str],
    kinds: Mapping[str, str] = MappingProxyType({}),
    form: CsvFormat = DETECTED,
) -> "pa.Table":
    """Read some columns from Parquet files, CSV files or a frame into a single table.

    Args:
        data: paths, or a frame.
        columns: columns to read. A column missing from some files is null there; one missing from all files
            is not in the result.
        kinds: known column kinds in CSV files; see `read_csvs`.
        form: known CSV format.

    Raises:
        DataError: a file cannot be read.
    """
    if not _is_paths(data):
        tables = [to_table(data)]
    else:
        files, text = expand_tables(data)
        tables = read_csvs(files, kinds, form) if text else read_parquets(files, columns, kinds)
    selected = [table.select([name for name in columns if name in table.column_names]) for table in tables]
    return pa.concat_tables(selected, promote_options="permissive")


def column_names(data: Any) -> list[str]:
    """Return all column names in the first file, or in a frame; reads the whole file."""
    if not _is_paths(data):
        return list(to_table(data).column_names)
    files, text = expand_tables(data)
    tables = read_csvs(files[:1]) if text else read_parquets(files[:1])
    return list(tables[0].column_names)


def read_parquet(file: File, columns: Sequence[str] | None = None) -> "pa.Table":
    """Read a Parquet file into memory, without partition columns.

    Args:
        file: path or URI.
        columns: columns to read; names that the file lacks are ignored. None: all columns.

    Raises:
        DataError: the file cannot be read.
    """
    try:
        with open_parquet_file(file) as opened_file:
            available = opened_file.schema_arrow.names
            names = available if columns is None else [name for name in columns if name in available]
            return plain_table(opened_file.read(columns=names))
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{not_parquet(file, error)}. Repair the file.") from error


def read_parquets(
    files: Sequence[File],
    columns: Sequence[str] | None = None,
    kinds: Mapping[str, str] = MappingProxyType({}),
) -> list["pa.Table"]:
    """Read Parquet files into memory, and add their partition columns (``NAME=VALUE`` folders in a path).

    Args:
        files: paths and URIs.
        columns: columns to read; names that a file lacks are ignored. None: all columns.
        kinds: known partition column kinds, see `partition_keys`.

    Returns:
        A table per file.

    Raises:
        DataError: a file cannot be read.
    """
    keys = partition_keys(files, kinds)
    return [with_keys(read_parquet(file, columns), keys[file]) for file in files]


def open_tables(data: Any, schema: Encoding, faults: Faults, form: CsvFormat = DETECTED) -> Source:
    """Open Parquet files, CSV files or a frame as a source of samples.

    The function may be passed to `meshrec.data.tables.table_dataset` as ``open_source``. A folder stands for
    its Parquet files, or for its CSV files if it has no Parquet files. CSV files (``.csv``, also with
    ``.gz``, ``.bz2`` or ``.zst``) are read into memory, so convert large ones to Parquet once.

    Args:
        data: paths, or a frame.
        schema: features encoding the rows.
        faults: raises for damaged rows, or counts them.
        form: known CSV format.

    Raises:
        DataError: the paths match no file, or files with both formats.
    """
    if not _is_paths(data):
        return ArrowSource([("memory", to_table(data))], schema, faults)
    files, text = expand_tables(data)
    if not text:
        return ParquetSource(files, schema, faults)
    tables = read_csvs(files, schema.fitted_kinds(), form)
    return ArrowSource(
        [(str(file), table) for file, table in zip(files, tables, strict=True)], schema, faults
    )


def _is_paths(data: Any) -> bool:
    return isinstance(data, str | Path) or (
        isinstance(data, list | tuple) and all(isinstance(path, str | Path) for path in data)
    )
