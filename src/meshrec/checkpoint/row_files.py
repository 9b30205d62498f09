"""The rows of a table by ID as a Parquet file: written from a checkpoint, and read into a model.

A file has the column ``id`` (int64), the column ``row`` (a list of ``dim`` floats), and one column for each
part of the optimizer's state that was asked for. Both ways work block by block, so that a table may be larger
than memory.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from meshrec.checkpoint.agreement import agreed, ranks_of
from meshrec.checkpoint.hashed import hashed_places, read_rows
from meshrec.checkpoint.hashed_to_fixed import WholeRows, check_ids, fixed_places, rows_by_id
from meshrec.checkpoint.manifest import Manifest
from meshrec.checkpoint.reading import read_manifest
from meshrec.data.faults import needs
from meshrec.durable import durable_file
from meshrec.modules.embedding_modules import TableCollection
from meshrec.ops.index import unique
from meshrec.tables.at_rest import IDS
from meshrec.tables.hashed_loading import own_rows

_BLOCK_ROWS = 1 << 16
_ID, _ROW = "id", "row"


def export_rows(folder: str | Path, target: str | Path, table: str, *, optimizer: bool = False) -> int:
    """Write the rows of a table in a checkpoint to a Parquet file, and return their number.

    Rows of bf16 are written as fp32, which is exact.

    Args:
        folder: the checkpoint, of any plan.
        target: the file; it must not exist yet.
        table: the table's name, or the end of the path of its weight, such as ``"ebc.embedding_bags.items"``.
        optimizer: whether to write the optimizer's state, too.

    Raises:
        ValueError: there is no such table, or several, or the target exists.
        DamagedCheckpointError: the data is not what was written. No file is left then.
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
    ids = f"{prefix}{IDS}" if f"{prefix}{IDS}" in manifest.tensors else None
    fields = [pa.field(_ID, pa.int64(), nullable=False)]
    fields += [
        pa.field(name, _type_of(pa, manifest, tensor), nullable=False) for name, tensor in columns.items()
    ]
    schema = pa.schema(fields, metadata={"meshrec": json.dumps({"table": table, "dim": dim})})
    with durable_file(target) as file, parquet.ParquetWriter(file, schema) as writer:
        for first in range(0, num, _BLOCK_ROWS):
            rows = (first, min(first + _BLOCK_ROWS, num))
            here = read_rows(folder, manifest, ids, rows) if ids else torch.arange(*rows)
            arrays = [pa.array(here.numpy())]
            for name, tensor in columns.items():
                values = read_rows(folder, manifest, tensor, rows)
                arrays.append(_array_of(pa, values, schema.field(name).type))
            writer.write_batch(pa.record_batch(arrays, schema=schema))
    return num


def import_rows(source: str | Path, module: nn.Module, table: str, *, optimizer: bool = False) -> int:
    """Replace the rows of a table by those of a Parquet file, and return their number. Collective.

    A hashed table has the IDs of the file then, and no others; what its eviction policy keeps of rows, and
    the counts of IDs that wait, begin anew. Of a fixed table, row i is replaced by that of ID i; rows whose
    IDs the file lacks stay as they are. The number of updates so far, which some optimizers read, is the
    table's own.

    Args:
        source: a file of ``export_rows``, or one with the same columns; further columns are ignored. Every
            rank reads it.
        module: the model, sharded under any plan or not.
        table: the table's name, or the end of the path of the module that holds it.
        optimizer: whether to read the optimizer's state, too. Otherwise it begins anew.

    Raises:
        ValueError: there is no such table, a column is missing or has another type or width, IDs repeat,
            there are more than ``max_rows``, or they are no rows of a fixed table. Nothing has changed then.
        ModuleNotFoundError: pyarrow is missing.
    """
    parquet = needs("pyarrow.parquet", "data")
    place = _place_of(module, table, optimizer=optimizer)
    with parquet.ParquetFile(source) as file:
        agreed(ranks_of(None), lambda: _check(file, Path(source), place), f"reading {source}")
        for each in place.tables if place.seed is not None else ():
            each.clear()
        for ids, parts in _blocks(file, place.columns):
            for each in place.tables:
                each.load(
                    own_rows(each, ids, parts) if place.seed is not None else rows_by_id(each, ids, parts)
                )
        place.changed()
        return int(file.metadata.num_rows)


class _FilledTable(NamedTuple):
    """The table that is filled."""

    path: str
    tables: Sequence[Any]
    dim: int
    most: int
    """The number of rows of a fixed table; the largest number of a hashed one."""
    seed: int | None
    """The seed of a hashed table's keys; None for a fixed table."""
    columns: dict[str, bool]
    """The parts to read, ``weight`` first, and whether each is one value per row."""
    changed: Any


def _place_of(module: nn.Module, table: str, *, optimizer: bool) -> _FilledTable:
    hashed, fixed = hashed_places(module), fixed_places(module)
    path = _chosen({*hashed, *fixed}, table, "the model")
    if path in hashed:
        place = hashed[path]
        own = place.tables[0].parts[len(place.storage.row_parts) :] if place.tables else ()
        columns = {"weight": False} | ({part.name: part.per_row for part in own} if optimizer else {})
        storage = place.storage
        return _FilledTable(
            path, place.tables, storage.dim, storage.max_rows, storage.keys.seed, columns, place.changed
        )
    found = fixed[path]
    columns = {"weight": False}
    for each in found.tables if optimizer else ():
        if isinstance(each, WholeRows):
            each.tensors.update(_state_of(module, path))
            columns |= {name: v.dim() == 1 for name, v in each.tensors.items()}
        else:
            columns |= {part.name: part.per_row for part in each.parts}  # type: ignore[attr-defined]
    return _FilledTable(path, found.tables, found.dim, found.num_rows, None, columns, found.changed)


def _state_of(module: nn.Module, path: str) -> dict[str, Tensor]:
    """Return the optimizer state of a table that is not sharded."""
    for where, child in module.named_modules():
        if isinstance(child, TableCollection) and child.is_fused and path.startswith(where):
            name = f"{path.removeprefix(where).removeprefix('.')}.weight"
            state = child.fused_optimizer.state_dict()["state"].get(name, {})
            return {slot: v for slot, v in state.items() if isinstance(v, Tensor)}
    return {}


def _check(file: Any, source: Path, place: _FilledTable) -> None:
    """Check a file before anything changes.

    Raises:
        ValueError: it does not fit the table.
    """
    schema, num = file.schema_arrow, file.metadata.num_rows
    wanted = {_ID: 0, **{_column(name): 1 if one else place.dim for name, one in place.columns.items()}}
    missing = [name for name in wanted if name not in schema.names]
    if missing:
        raise ValueError(
            f"{source} has no column {missing[0]!r}, only {schema.names}. Write it with export_rows"
            f"{', optimizer=True' if missing[0] not in (_ID, _ROW) else ''}."
        )
    for name, width in wanted.items():
        _check_type(source, name, schema.field(name).type, width)
    if place.seed is not None and num > place.most:
        raise ValueError(
            f"{source} has {num:,} rows, and max_rows of table {place.path!r} is {place.most:,}. Nothing was "
            "changed. Raise max_rows of the table's keys."
        )
    parts = [ids for ids, _ in _blocks(file, place.columns)]
    if place.seed is None:
        check_ids(parts, place.most, place.path)
    distinct = len(unique(torch.cat(parts))[0]) if parts else 0
    if distinct < num:
        raise ValueError(
            f"{source} has {num:,} rows of {distinct:,} distinct IDs. Nothing was changed. Leave one row for "
            "each ID."
        )


def _check_type(source: Path, name: str, kind: Any, width: int) -> None:
    pa = needs("pyarrow", "data")
    is_list = pa.types.is_fixed_size_list(kind) and pa.types.is_floating(kind.value_type)
    if width == 0:
        fits, allowed = pa.types.is_int64(kind), "int64"
    elif width == 1 and name != _ROW:
        fits, allowed = pa.types.is_floating(kind), "floats"
    else:
        fits, allowed = is_list and kind.list_size == width, f"lists of {width} floats (fixed_size_list)"
    if not fits:
        raise ValueError(f"{source}: column {name!r} is {kind}, and the table needs {allowed}.")


def _blocks(file: Any, columns: Mapping[str, bool]) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
    """Yield IDs and parts of rows.

    Raises:
        ValueError: a value is null.
    """
    names = [_ID, *map(_column, columns)]
    for batch in file.iter_batches(batch_size=_BLOCK_ROWS, columns=names):
        for name, array in zip(names, map(batch.column, names), strict=True):
            if array.null_count or (name != _ID and not columns[_part(name)] and array.values.null_count):
                raise ValueError(f"column {name!r} of the file has nulls. Leave such rows out.")
        ids = _tensor(batch.column(_ID).to_numpy())
        yield ids, {name: _values(batch.column(_column(name)), one) for name, one in columns.items()}


def _values(array: Any, one: bool) -> Tensor:
    found = _tensor((array if one else array.flatten()).to_numpy(zero_copy_only=False))
    return found if one else found.view(len(array), -1)


def _tensor(values: Any) -> Tensor:
    return torch.from_numpy(np.array(values))  # a copy: Arrow's memory is read-only


def _column(part: str) -> str:
    return _ROW if part == "weight" else part


def _part(column: str) -> str:
    return "weight" if column == _ROW else column


def _type_of(pa: Any, manifest: Manifest, name: str) -> Any:
    record = manifest.tensors[name]
    kind = pa.float16() if record.dtype == torch.float16 else pa.float32()
    return kind if len(record.shape) == 1 else pa.list_(kind, record.shape[1])


def _array_of(pa: Any, values: Tensor, kind: Any) -> Any:
    values = values.float() if values.dtype == torch.bfloat16 else values
    if values.dim() == 1:
        return pa.array(values.numpy())
    return pa.FixedSizeListArray.from_arrays(pa.array(values.flatten().numpy()), type=kind)


def _prefix_of(manifest: Manifest, table: str) -> str:
    """Return the prefix of the names of a table's parts in a checkpoint."""
    end = ".weight"
    found = {
        name.removesuffix(end)
        for name, record in manifest.tensors.items()
        if name.endswith(end)
        and len(record.shape) == 2
        and record.dtype.is_floating_point
        and manifest.values[record.entry]["kind"] == "module"
    }
    return f"{_chosen(found, table, 'the checkpoint')}."


def _chosen(paths: set[str], table: str, where: str) -> str:
    found = sorted(path for path in paths if path == table or path.endswith(f".{table}"))
    if len(found) == 1:
        return found[0]
    if found:
        raise ValueError(f"{where} has several tables {table!r}: {found}. Give more of the path.")
    raise ValueError(f"{where} has no table {table!r}. Name one of {sorted(paths)}.")


def _slots_of(manifest: Manifest, prefix: str) -> dict[str, str]:
    """Return the names of the tensors of a table's optimizer state, by slot."""
    entry = next(record.entry for name, record in manifest.tensors.items() if name == f"{prefix}weight")
    middle = f".state.{prefix.removeprefix(f'{entry}.')}weight."
    return {
        name.split(middle, 1)[1]: name
        for name, record in manifest.tensors.items()
        if name.startswith(f"{record.entry}{middle}")
    }
