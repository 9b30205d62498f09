"""Load a table whose rows are found by ID, because it is hashed in the model, in the checkpoint, or in both.

A hashed table assigns rows to IDs as they occur, and places an ID by its key, a hash of the ID. In a fixed
table, row i belongs to ID i. A rectangle is the part of a table on a rank: a range of rows (in a hashed
table, of keys) and a range of columns.

A hashed table's checkpoint stores the rows in key order, together with a tensor ``ids``. To load it, every
rank reads all IDs, and then the rows whose keys lie in the rank's rectangles. A fixed table's checkpoint has
no IDs. A hashed table can load a fixed table's checkpoint, and vice versa: the row of ID i becomes row i.

All functions read block by block, so a table may be larger than memory.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from meshrec.checkpoint.manifest import Manifest
from meshrec.checkpoint.reading import read_rows
from meshrec.model_parallel import DistributedModelParallel
from meshrec.modules.embedding_modules import TableCollection
from meshrec.ops.index import mix
from meshrec.tables.hashed.admission import in_span
from meshrec.tables.hashed.io import WAITING, counts_in_rectangle, rows_in_rectangle, state_dict_names
from meshrec.tables.hashed.key_ordered import IDS
from meshrec.tables.hashed.table import HashedRows, HashedTable, is_growable
from meshrec.tables.module import TableModule
from meshrec.tables.table import Rectangle, RowBlock

_log = logging.getLogger(__name__)
# Rows per read, which bound load memory.
_BLOCK_ROWS = 1 << 16


class HashedTarget(NamedTuple):
    """Hashed table in the model, into which a checkpoint is to be loaded.

    Attributes:
        path: module path of the table.
        tables: parts of the table on this rank. A part has a range of keys and a range of columns.
        storage: row format, the settings of the hash from IDs to keys, and row limits.
        rows_loaded: function to call after a load, which counts the table's rows over all ranks. Collective.
    """

    path: str
    tables: Sequence[HashedTable]
    storage: HashedRows
    rows_loaded: Callable[[], object]

    def names(self) -> list[str]:
        """Return the state dict names of the table's tensors, without the module path, such as ``weight``."""
        return state_dict_names(self.storage)


def hashed_targets(item: nn.Module) -> dict[str, HashedTarget]:
    """Return a module's hashed tables by module path."""
    module = item.module if isinstance(item, DistributedModelParallel) else item
    targets: dict[str, HashedTarget] = {}
    for path, child in module.named_modules():
        if isinstance(child, TableModule) and is_growable(child.storage):
            targets[path] = HashedTarget(path, child.tables, child.storage, child.rows_loaded)
    return targets


def check_fits(target: HashedTarget, manifest: Manifest, prefix: str) -> None:
    """Check that a hashed table can load rows from a checkpoint.

    Args:
        target: table to load.
        manifest: checkpoint manifest.
        prefix: prefix of the table's tensor names in the checkpoint.

    Raises:
        ValueError: the checkpoint lacks the table, or has it with another width, other row parts (tensors
            with a value or values per row, such as quantization scales) or too many rows.
    """
    name, storage = f"{prefix}weight", target.storage
    if name not in manifest.tensors:
        raise ValueError(f"the checkpoint lacks {name!r}. Load it into the same model.")
    shape = manifest.tensors[name].shape
    if len(shape) != 2 or shape[1] != storage.part_column(storage.dim):
        raise ValueError(
            f"{name} has shape {list(shape)} in the checkpoint, and the table has "
            f"{storage.part_column(storage.dim)} columns. Load it into a model of the same size."
        )
    for part in storage.row_format.row_parts:
        record = manifest.tensors.get(f"{prefix}{part.name}")
        # Floating-point rows are converted when they are loaded. Codes cannot be converted.
        if record is None or (storage.bits and record.dtype != part.dtype):
            raise ValueError(
                f"the checkpoint has no {f'{prefix}{part.name}'!r} of {part.dtype}, which a table of "
                f"{storage.bits} bits needs. Load the checkpoint of a model that was quantised alike."
            )
    if shape[0] > storage.max_rows:
        raise ValueError(
            f"{name} has {shape[0]:,} rows in the checkpoint, and max_rows of table {storage.name!r} is "
            f"{storage.max_rows:,}. Nothing was changed. Raise max_rows of the table's keys."
        )


def load_hashed(
    target: HashedTarget, folder: Path, manifest: Manifest, prefix: str, slots: Mapping[str, str]
) -> None:
    """Replace a hashed table's rows with the rows in a checkpoint.

    Args:
        target: table to load.
        folder: checkpoint folder.
        manifest: checkpoint manifest.
        prefix: prefix of the table's tensor names in the checkpoint.
        slots: names of the optimizer state tensors in the checkpoint, by name in the optimizer (such as
            "exp_avg"). If empty, optimizer state is not loaded.
    """
    # Without IDs, the checkpoint's table is fixed: row i belongs to ID i.
    ids_name = f"{prefix}{IDS}" if f"{prefix}{IDS}" in manifest.tensors else None
    num_rows = manifest.tensors[f"{prefix}weight"].shape[0]
    parts = {part.name: f"{prefix}{part.name}" for part in target.storage.row_parts}
    parts = {part: name for part, name in {**parts, **slots}.items() if name in manifest.tensors}
    # From here on, rows change. The caller's ``filling`` makes the module unusable if the load fails.
    for table in target.tables:
        table.clear()
    for first in range(0, num_rows, _BLOCK_ROWS):
        rows = (first, min(first + _BLOCK_ROWS, num_rows))
        ids = read_rows(folder, manifest, ids_name, rows) if ids_name else torch.arange(*rows)
        # Keys depend on the seed of the model's table, which may differ from the saved table's, so hash
        # again.
        keys = mix(ids, target.storage.keys.seed)
        for table in target.tables:
            matches = in_span(keys, (table.rectangle.r0, table.rectangle.r1)).nonzero()[:, 0]
            if len(matches):
                # A hashed table is stored in key order, so a rectangle's rows are contiguous.
                start, end = int(matches[0]), int(matches[-1]) + 1
                here = (first + start, first + end)
                # With another seed, or from a fixed table, the range also has rows of other rectangles.
                # `rows_in_rectangle` drops these.
                values = {part: read_rows(folder, manifest, name, here) for part, name in parts.items()}
                table.load(rows_in_rectangle(table, ids[start:end], values))
    # Occurrence counts of IDs waiting for admission. Such IDs do not have a row yet.
    waiting = [f"{prefix}{name}" for name in WAITING]
    if target.storage.counts_waiting_ids and all(name in manifest.tensors for name in waiting):
        span = (0, manifest.tensors[waiting[0]].shape[0])
        counts = [read_rows(folder, manifest, name, span) for name in waiting]
        for table in target.tables:
            table.load(counts_in_rectangle(table, *counts))


class LoadableRows(Protocol):
    """Interface of a table part on a rank (a range of rows and of columns) into which rows can be loaded."""

    @property
    def rectangle(self) -> Rectangle:
        """Range of rows (in a hashed table, of keys) and range of columns."""

    def load(self, blocks: Iterable[RowBlock]) -> None:
        """Write row blocks into the table.

        A block may lack some of the table's tensors. For example, it may have the weight without optimizer
        state.
        """


class WholeRows:
    """Unsharded table that is an ordinary parameter, in which row i belongs to ID i.

    Args:
        weight: parameter [num_rows, dim].

    Attributes:
        rectangle: range of rows and of columns, which cover the whole table.
        tensors: tensors to load into, by name. Initially only ``weight``. A caller that loads optimizer state
            adds its tensors before `load`.
    """

    def __init__(self, weight: Tensor) -> None:
        self.rectangle = Rectangle(0, 0, weight.shape[0], 0, weight.shape[1])
        self.tensors = {"weight": weight}

    @torch.no_grad()
    def load(self, blocks: Iterable[RowBlock]) -> None:
        """Copy row blocks into the parameter and the optimizer state."""
        for block in blocks:
            keys = torch.arange(*_bounds(block.keys)) if isinstance(block.keys, range) else block.keys
            for name, values in block.parts.items():
                # Assignment by index does not convert the dtype, unlike ``copy_``.
                self.tensors[name][keys] = values.to(self.tensors[name].dtype)


class FixedTarget(NamedTuple):
    """Fixed table in the model (row i belongs to ID i), into which a checkpoint is to be loaded.

    Attributes:
        path: module path of the table.
        tables: parts of the table on this rank. A part has a range of rows and a range of columns.
        num_rows: row count of the unsharded table.
        dim: column count of the unsharded table.
        rows_loaded: function to call after a load, so batches in flight look up their rows again.
    """

    path: str
    tables: Sequence[LoadableRows]
    num_rows: int
    dim: int
    rows_loaded: Callable[[], object]


def fixed_targets(item: nn.Module) -> dict[str, FixedTarget]:
    """Return a module's trainable tables that are not hashed, by module path."""
    module = item.module if isinstance(item, DistributedModelParallel) else item
    targets: dict[str, FixedTarget] = {}
    for path, child in module.named_modules():
        # Quantized tables for inference are not trainable, and are loaded by DCP like other tensors.
        if isinstance(child, TableModule) and not child.is_growable and child.storage.is_trainable:
            rows_loaded = child.rows_loaded
            targets[path] = FixedTarget(path, child.tables, child.num_rows, child.dim, rows_loaded)
        elif isinstance(child, TableCollection):
            name, _ = child.table_holders()
            start = f"{path}.{name}" if path else name
            for config, weight in child.tables().values():
                # Unsharded tables: only plain float tables are parameters with fixed rows.
                if config.keys is None and not config.data_type.bits:
                    rows = WholeRows(weight.detach())
                    where = f"{start}.{config.name}"
                    num_rows, dim = weight.shape
                    # An unsharded table has no batches in flight to tell about the load.
                    targets[where] = FixedTarget(where, [rows], num_rows, dim, lambda: None)
    return targets


def check_ids(ids: Iterable[Tensor], num_rows: int, table: str) -> int:
    """Check that every ID has a row in a table in which row i belongs to ID i.

    Args:
        ids: blocks of IDs, int64 [N].
        num_rows: number of rows in the table.
        table: table name for errors.

    Returns:
        Number of IDs in all blocks.

    Raises:
        ValueError: an ID is outside [0, num_rows).
    """
    # Count all bad IDs, so that the error tells how many there are.
    count, outside, example = 0, 0, 0
    for block in ids:
        bad = block[(block < 0) | (block >= num_rows)]
        if len(bad) and not outside:
            example = int(bad[0])
        count, outside = count + len(block), outside + len(bad)
    if outside:
        raise ValueError(
            f"{outside:,} of {count:,} IDs of the hashed table are outside {table!r}, such as {example}: "
            f"they must lie in [0, {num_rows:,}). Nothing was changed. Raise num_embeddings, or give the "
            "table hashed keys."
        )
    return count


def check_fits_fixed(target: FixedTarget, folder: Path, manifest: Manifest, prefix: str) -> None:
    """Check that a fixed table in the model can load a table that is hashed in the checkpoint.

    In a fixed table, row i belongs to ID i.

    Args:
        target, folder, manifest, prefix: as for `load_hashed`.

    Raises:
        ValueError: the widths differ, or an ID in the checkpoint is outside the table.
    """
    num, dim = manifest.tensors[f"{prefix}weight"].shape
    if dim != target.dim:
        raise ValueError(
            f"{prefix}weight has {dim} columns in the checkpoint, and the table has {target.dim}. Load it "
            "into a model of the same size."
        )
    blocks = (
        read_rows(folder, manifest, f"{prefix}{IDS}", (first, min(first + _BLOCK_ROWS, num)))
        for first in range(0, num, _BLOCK_ROWS)
    )
    count = check_ids(blocks, target.num_rows, f"{prefix}weight")
    if count < target.num_rows:
        _log.info(
            "%sweight: the checkpoint has rows for %s IDs; the remaining %s rows are unchanged",
            prefix,
            f"{count:,}",
            f"{target.num_rows - count:,}",
        )


def load_fixed(
    target: FixedTarget, folder: Path, manifest: Manifest, prefix: str, slots: Mapping[str, str]
) -> None:
    """Load a fixed table from a checkpoint in which the table is hashed: the row of ID i becomes row i.

    Args:
        target, folder, manifest, prefix, slots: as for `load_hashed`.
    """
    parts = {"weight": f"{prefix}weight"} | {s: n for s, n in slots.items() if n in manifest.tensors}
    num = manifest.tensors[parts["weight"]].shape[0]
    for first in range(0, num, _BLOCK_ROWS):
        rows = (first, min(first + _BLOCK_ROWS, num))
        ids = read_rows(folder, manifest, f"{prefix}{IDS}", rows)
        values = {part: read_rows(folder, manifest, name, rows) for part, name in parts.items()}
        for table in target.tables:
            table.load(rows_by_id(table, ids, values))


def rows_by_id(table: LoadableRows, ids: Tensor, parts: Mapping[str, Tensor]) -> Iterable[RowBlock]:
    """Select the rows that belong to a part of a fixed table, and yield them as a single row block.

    If none of the IDs is in the part's row range, yield nothing.

    Args:
        table: part of the table, with a row range and a column range. Row i belongs to ID i.
        ids: IDs of the rows, int64 [N], in any order.
        parts: weight and optimizer state by name, [N] (a value per row) or [N, D], with all columns.
    """
    r = table.rectangle
    inside = ((ids >= r.r0) & (ids < r.r1)).nonzero()[:, 0]
    if len(inside):
        # Row block keys must be ascending.
        keys, order = ids[inside].sort()
        positions = inside[order]
        cut = {name: v[positions] if v.dim() == 1 else v[positions, r.c0 : r.c1] for name, v in parts.items()}
        yield RowBlock(keys, r.columns, cut)


def _bounds(keys: range) -> tuple[int, int]:
    """Return start and end of a range, for ``torch.arange``."""
    return keys.start, keys.stop
