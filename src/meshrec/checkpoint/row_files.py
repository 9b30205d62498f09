"""Export table rows from a checkpoint to Parquet, and import them into a model.

A file has the columns ``id`` (int64), ``row`` (list of ``dim`` floats) and, if requested, a column per
optimizer state tensor, such as ``exp_avg``. Export and import work block by block, so a table may be larger
than memory.

A row part is a tensor with a value or a vector per table row: the weight, or an optimizer state tensor.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from meshrec.checkpoint.agreement import agreed, ranks_of
from meshrec.checkpoint.hashed import WholeRows, check_ids, fixed_targets, hashed_targets, rows_by_id
from meshrec.checkpoint.manifest import Manifest
from meshrec.checkpoint.reading import read_manifest, read_rows
from meshrec.checkpoint.unfinished import filling
from meshrec.data.faults import needs
from meshrec.durable import durable_file
from meshrec.model_parallel import DistributedModelParallel
from meshrec.modules.embedding_modules import TableCollection
from meshrec.ops.index import unique
from meshrec.tables.hashed.io import rows_in_rectangle
from meshrec.tables.hashed.key_ordered import IDS

# Rows per record batch, which bounds memory use.
_BLOCK_ROWS = 1 << 16
_ID, _ROW = "id", "row"


def export_rows(folder: str | Path, target: str | Path, table: str, *, optimizer: bool = False) -> int:
    """Write the rows of a table in a checkpoint to a Parquet file.

    Rows in bf16 are written as fp32, which is exact.

    Args:
        folder: checkpoint, saved under any plan.
        target: new file.
        table: table name, or the end of the module path, such as ``"ebc.embedding_bags.items"``.
        optimizer: whether to write optimizer state as well.

    Returns:
        Number of rows written.

    Raises:
        ValueError: the checkpoint has no such table, the name is ambiguous, or ``target`` exists.
        DamagedCheckpointError: the checkpoint is damaged; no output file remains.
        ModuleNotFoundError: pyarrow is missing.
    """
    pa, parquet = needs("pyarrow", "data"), needs("pyarrow.parquet", "data")
    folder, target = Path(folder), Path(target)
    if target.exists():
        raise ValueError(f"{target} exists. Name another file, or remove it.")
    manifest = read_manifest(folder)
    prefix = _prefix_of(manifest, table)
    num, dim = manifest.tensors[f"{prefix}weight"].shape
    columns = {_ROW: f"{prefix}weight", **(_slots_of(manifest, prefix) if optimizer else {})}
    # A fixed table has no IDs: row i belongs to ID i.
    ids = f"{prefix}{IDS}" if f"{prefix}{IDS}" in manifest.tensors else None
    fields = [pa.field(_ID, pa.int64(), nullable=False)]
    fields += [
        pa.field(name, _arrow_type(pa, manifest, tensor), nullable=False) for name, tensor in columns.items()
    ]
    schema = pa.schema(fields, metadata={"meshrec": json.dumps({"table": table, "dim": dim})})
    # The Parquet writer closes first and writes its footer. Then the complete file appears at ``target``.
    with (
        durable_file(target) as file,
        parquet.ParquetWriter(file, schema, write_page_checksum=True) as writer,
    ):
        for first in range(0, num, _BLOCK_ROWS):
            rows = (first, min(first + _BLOCK_ROWS, num))
            here = read_rows(folder, manifest, ids, rows) if ids else torch.arange(*rows)
            arrays = [pa.array(here.numpy())]
            for name, tensor in columns.items():
                values = read_rows(folder, manifest, tensor, rows)
                arrays.append(_arrow_array(pa, values, schema.field(name).type))
            writer.write_batch(pa.record_batch(arrays, schema=schema))
    return num


def import_rows(source: str | Path, module: nn.Module, table: str, *, optimizer: bool = False) -> int:
    """Replace a table's rows with rows from a Parquet file. Collective.

    A hashed table then has exactly the IDs in the file. Its eviction statistics, and the counts of IDs
    waiting for admission, restart. In a fixed table, row i is replaced with the row of ID i; rows whose ID
    is not in the file are unchanged. The update count, which some optimizers use, is unchanged.

    The file is read twice, because all values are checked before the first row changes.

    Args:
        source: file from `export_rows`, or a file with the same columns; other columns are ignored. Every
            rank reads it.
        module: model, sharded under any plan or unsharded.
        table: table name, or the end of the module path.
        optimizer: whether to read optimizer state from the file.

    Returns:
        Number of rows in the file.

    Raises:
        ValueError: the model has no such table; a column is missing, or has another type or width; IDs are
            repeated; the file has more than ``max_rows`` rows; an ID is outside a fixed table; or a value is
            null, NaN or infinite. Raised on every rank before any change.
        CheckpointError: the file cannot be read; raised on every rank. If rows were already replaced, the
            message says so, and the tables refuse to run and to be saved until a load succeeds.
        ModuleNotFoundError: pyarrow is missing.
    """
    parquet = needs("pyarrow.parquet", "data")
    axis, source = ranks_of(None), Path(source)
    target = _target_of(module, table, optimizer=optimizer)
    with ExitStack() as stack:
        files: list[Any] = []

        def check() -> None:
            """Open the file, append it to ``files``, and check that all rows can be imported."""
            files.append(stack.enter_context(parquet.ParquetFile(source, page_checksum_verification=True)))
            _check_file(files[0], source, target)

        agreed(axis, check, f"reading {source}")
        with filling([target.module], f"table {target.path!r} from {source}", is_whole=False):
            try:
                agreed(axis, lambda: _load_rows(files[0], target), f"loading {source}")
            finally:
                # Also after a failure, because the next load needs row counts that are equal on all ranks.
                target.changed()
        return int(files[0].metadata.num_rows)


class _ImportTarget(NamedTuple):
    """Table in the model into which rows are imported.

    Attributes:
        module: embedding collection with the table.
        path: module path of the table.
        tables: parts of the table on this rank. A part has a range of rows (in a hashed table, of keys) and a
            range of columns.
        dim: column count of the unsharded table.
        max_rows: row count of a fixed table, or maximum row count of a hashed table.
        seed: seed of the hash from IDs to keys, for a hashed table; None for a fixed table.
        columns: names of the row parts to read, ``weight`` first, then optimizer state. The value is True if
            the part has a single value per row, and False if it has ``dim`` values.
        changed: function to call after the import; see `HashedTarget.rows_loaded`.
    """

    module: nn.Module
    path: str
    tables: Sequence[Any]
    dim: int
    max_rows: int
    seed: int | None
    columns: dict[str, bool]
    changed: Any


def _target_of(module: nn.Module, table: str, *, optimizer: bool) -> _ImportTarget:
    """Find the table in the model into which rows are to be imported.

    Args:
        table: table name, or the end of the module path.

    Raises:
        ValueError: no table or several tables match.
    """
    hashed, fixed = hashed_targets(module), fixed_targets(module)
    path = _find_table({*hashed, *fixed}, table, "the model")
    root = module.module if isinstance(module, DistributedModelParallel) else module
    # A table's path is that of its collection, then the module dict ("embedding_bags"), then the table name.
    collection = root.get_submodule(".".join(path.split(".")[:-2]))
    if path in hashed:
        hashed_target = hashed[path]
        storage = hashed_target.storage
        # A rank may have no part of the table. It then has no state to fill.
        state = (
            hashed_target.tables[0].parts[len(storage.row_parts) :]
            if optimizer and hashed_target.tables
            else ()
        )
        columns = {"weight": False} | {part.name: part.per_row for part in state}
        return _ImportTarget(
            collection,
            path,
            hashed_target.tables,
            storage.dim,
            storage.max_rows,
            storage.keys.seed,
            columns,
            hashed_target.rows_loaded,
        )
    rows = fixed[path]
    columns = {"weight": False}
    for rectangle in rows.tables if optimizer else ():
        if isinstance(rectangle, WholeRows):
            # The state of an unsharded table is in the fused optimizer, not in the table.
            rectangle.tensors.update(_state_of(collection, path))
            columns |= {name: v.dim() == 1 for name, v in rectangle.tensors.items()}
        else:
            columns |= {part.name: part.per_row for part in rectangle.parts}  # type: ignore[attr-defined]
    return _ImportTarget(
        collection, path, rows.tables, rows.dim, rows.num_rows, None, columns, rows.rows_loaded
    )


def _state_of(collection: nn.Module, path: str) -> dict[str, Tensor]:
    """Return an unsharded table's optimizer state tensors, by name such as "exp_avg".

    The result is empty if the collection's optimizer is not fused into backward.
    """
    if not (isinstance(collection, TableCollection) and collection.is_fused):
        return {}
    name = ".".join([*path.split(".")[-2:], "weight"])
    state = collection.fused_optimizer.state_dict()["state"].get(name, {})
    return {slot: v for slot, v in state.items() if isinstance(v, Tensor)}


def _load_rows(file: Any, target: _ImportTarget) -> None:
    """Load all rows in an open Parquet file into this rank's part of a table."""
    select = rows_by_id if target.seed is None else rows_in_rectangle
    # Only hashed tables are cleared: a fixed table keeps the rows that are not in the file.
    for table in target.tables if target.seed is not None else ():
        table.clear()
    for ids, parts in _blocks(file, target.columns):
        for table in target.tables:
            table.load(select(table, ids, parts))


def _check_file(file: Any, source: Path, target: _ImportTarget) -> None:
    """Raise ValueError unless every row in a Parquet file can be imported into a table."""
    schema, num = file.schema_arrow, file.metadata.num_rows
    widths = {
        _ID: 0,
        **{_column(name): 1 if is_per_row else target.dim for name, is_per_row in target.columns.items()},
    }
    missing = [name for name in widths if name not in schema.names]
    if missing:
        raise ValueError(
            f"{source} has no column {missing[0]!r}, only {schema.names}. Write it with export_rows"
            f"{', optimizer=True' if missing[0] not in (_ID, _ROW) else ''}."
        )
    for name, width in widths.items():
        _check_type(source, name, schema.field(name).type, width)
    if target.seed is not None and num > target.max_rows:
        raise ValueError(
            f"{source} has {num:,} rows, but max_rows of table {target.path!r} is {target.max_rows:,}. "
            "Nothing was changed. Raise max_rows of the table's keys."
        )
    blocks = []
    for ids, parts in _blocks(file, target.columns):
        _check_finite(source, ids, parts)
        blocks.append(ids)
    if target.seed is None:
        check_ids(blocks, target.max_rows, target.path)
    # IDs of the whole file are held in memory (8 bytes per row), but rows are not.
    distinct = len(unique(torch.cat(blocks))[0]) if blocks else 0
    if distinct < num:
        raise ValueError(
            f"{source} has {num:,} rows but only {distinct:,} distinct IDs. Nothing was changed. "
            "Keep one row per ID."
        )


def _check_finite(source: Path, ids: Tensor, parts: Mapping[str, Tensor]) -> None:
    """Raise ValueError if a row has NaN or an infinite value."""
    for part, values in parts.items():
        rows = (~values.isfinite()).view(len(ids), -1).any(1).nonzero()[:, 0]
        if len(rows):
            raise ValueError(
                f"{source}: column {_column(part)!r} has NaN or an infinite value in the row of ID "
                f"{int(ids[rows[0]])}. Nothing was changed. Remove such rows: lookups would return them."
            )


def _check_type(source: Path, name: str, kind: Any, width: int) -> None:
    """Raise ValueError unless a column has ``width`` floats per row, or, if ``width`` is 0, int64 IDs."""
    pa = needs("pyarrow", "data")
    is_list = pa.types.is_fixed_size_list(kind) and pa.types.is_floating(kind.value_type)
    if width == 0:
        fits, allowed = pa.types.is_int64(kind), "int64"
    # A row is a list, also in a table with a single column.
    elif width == 1 and name != _ROW:
        fits, allowed = pa.types.is_floating(kind), "floats"
    else:
        fits, allowed = is_list and kind.list_size == width, f"lists of {width} floats (fixed_size_list)"
    if not fits:
        raise ValueError(f"{source}: column {name!r} has type {kind}; the table needs {allowed}.")


def _blocks(file: Any, columns: Mapping[str, bool]) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
    """Yield a Parquet file's IDs, int64 [N], and row parts, [N] or [N, dim]. Raise ValueError on null."""
    names = [_ID, *map(_column, columns)]
    for batch in file.iter_batches(batch_size=_BLOCK_ROWS, columns=names):
        for name, array in zip(names, map(batch.column, names), strict=True):
            # A list column can have nulls instead of a list, and nulls inside a list.
            if array.null_count or (name != _ID and not columns[_part(name)] and array.values.null_count):
                raise ValueError(f"column {name!r} of the file has nulls. Remove such rows.")
        ids = _tensor(batch.column(_ID).to_numpy())
        yield (
            ids,
            {name: _values(batch.column(_column(name)), is_per_row) for name, is_per_row in columns.items()},
        )


def _values(array: Any, is_per_row: bool) -> Tensor:
    """Convert an Arrow array to a tensor [N], or a list array to a tensor [N, dim]."""
    flat = _tensor((array if is_per_row else array.flatten()).to_numpy(zero_copy_only=False))
    return flat if is_per_row else flat.view(len(array), -1)


def _tensor(values: Any) -> Tensor:
    return torch.from_numpy(np.array(values))  # a copy: Arrow's memory is read-only


def _column(part: str) -> str:
    """Return the name of a row part's Parquet column: ``row`` for ``weight``, else the same name."""
    return _ROW if part == "weight" else part


def _part(column: str) -> str:
    """Return the name of a Parquet column's row part: ``weight`` for ``row``, else the same name."""
    return "weight" if column == _ROW else column


def _arrow_type(pa: Any, manifest: Manifest, name: str) -> Any:
    """Return the Arrow type of the Parquet column for a checkpoint tensor.

    A tensor [N] gets float32 (float16 for an fp16 tensor). A tensor [N, dim] gets a fixed-size list of such
    values.
    """
    record = manifest.tensors[name]
    kind = pa.float16() if record.dtype == torch.float16 else pa.float32()
    return kind if len(record.shape) == 1 else pa.list_(kind, record.shape[1])


def _arrow_array(pa: Any, values: Tensor, kind: Any) -> Any:
    """Convert values [N] or [N, dim] to an Arrow array. ``kind`` is the type from `_arrow_type`."""
    # Arrow has no bfloat16.
    values = values.float() if values.dtype == torch.bfloat16 else values
    if values.dim() == 1:
        return pa.array(values.numpy())
    return pa.FixedSizeListArray.from_arrays(pa.array(values.flatten().numpy()), type=kind)


def _prefix_of(manifest: Manifest, table: str) -> str:
    """Return the prefix of a table's tensor names in a checkpoint, such as "model.ebc.embedding_bags.items.".

    Args:
        table: table name, or the end of the module path.

    Raises:
        ValueError: no table or several tables match.
    """
    # A table cannot be told from a linear layer by its tensor: both are a matrix called "weight". So any
    # module's float matrix may be exported.
    end = ".weight"
    prefixes = {
        name.removesuffix(end)
        for name, record in manifest.tensors.items()
        if name.endswith(end)
        and len(record.shape) == 2
        and record.dtype.is_floating_point
        and manifest.values[record.entry]["kind"] == "module"
    }
    return f"{_find_table(prefixes, table, 'the checkpoint')}."


def _find_table(paths: set[str], table: str, where: str) -> str:
    """Return the only path that equals ``table`` or ends with ``.table``, or raise ValueError."""
    matches = sorted(path for path in paths if path == table or path.endswith(f".{table}"))
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise ValueError(
            f"{where} has several tables {table!r}: {matches}. Pass a longer suffix of the path."
        )
    raise ValueError(f"{where} has no table {table!r}. Tables: {sorted(paths)}.")


def _slots_of(manifest: Manifest, prefix: str) -> dict[str, str]:
    """Return the names of a table's optimizer state tensors in a checkpoint, by name such as "exp_avg"."""
    # Names of optimizer state are <optimizer entry>.state.<parameter>.<slot>; see ``state.py``.
    entry = next(record.entry for name, record in manifest.tensors.items() if name == f"{prefix}weight")
    middle = f".state.{prefix.removeprefix(f'{entry}.')}weight."
    return {
        name.split(middle, 1)[1]: name
        for name, record in manifest.tensors.items()
        if name.startswith(f"{record.entry}{middle}")
    }
