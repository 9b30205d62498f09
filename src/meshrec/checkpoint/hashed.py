"""Loading tables with hashed keys from checkpoints, block by block, under any plan.

A checkpoint has such a table at rest: its rows in the order of their keys, and their ``ids``. Every rank
reads the IDs, and the rows that belong to it. The checkpoint of a fixed table has no IDs: row i is that of
ID i.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from meshrec.checkpoint.blocks import read_region
from meshrec.checkpoint.manifest import Manifest
from meshrec.checkpoint.reading import open_data, stored_rows
from meshrec.distributed.hashed_shards import HashedParts
from meshrec.distributed.spread_hashed import SpreadHashed
from meshrec.distributed.table_shards import TableShards
from meshrec.model_parallel import DistributedModelParallel
from meshrec.modules.hashed_holder import HashedHolder
from meshrec.ops.index import mix
from meshrec.tables.at_rest import IDS
from meshrec.tables.hashed import HashedRows, HashedTable
from meshrec.tables.hashed_loading import WAITING, own_counts, own_rows, whole_names
from meshrec.tables.waiting import in_span

_BLOCK_ROWS = 1 << 16


class HashedPlace(NamedTuple):
    """A table with hashed keys in a module that is loaded."""

    path: str
    """The name of the module that holds it."""
    tables: Sequence[HashedTable]
    """The rectangles of this rank."""
    storage: HashedRows
    changed: Callable[[], object]
    """Tells all ranks that rows were loaded. Collective."""

    def names(self) -> list[str]:
        """Return the names of all parts that a state dict has of the table."""
        return whole_names(self.storage)


def hashed_places(item: nn.Module) -> dict[str, HashedPlace]:
    """Return the hashed tables of a module, by path."""
    module = item.module if isinstance(item, DistributedModelParallel) else item
    found: dict[str, HashedPlace] = {}
    for path, child in module.named_modules():
        if isinstance(child, TableShards) and isinstance(child.hashed, HashedParts):
            found[path] = HashedPlace(path, child.hashed.tables, child.hashed.storage, child.hashed.changed)
        elif isinstance(child, SpreadHashed):
            found[path] = HashedPlace(path, child.tables, child.storage, lambda: None)
        elif isinstance(child, HashedHolder):
            found[path] = HashedPlace(path, [child.table], child.storage, lambda: None)
    return found


def check_fits(place: HashedPlace, manifest: Manifest, prefix: str) -> None:
    """Check that a checkpoint's rows fit a table, before anything changes.

    Raises:
        ValueError: it has no such table, rows of another width, or too many.
    """
    name, storage = f"{prefix}weight", place.storage
    if name not in manifest.tensors:
        raise ValueError(f"the checkpoint lacks {name!r}. Load it into the same model.")
    shape = manifest.tensors[name].shape
    if len(shape) != 2 or shape[1] != storage.part_column(storage.dim):
        raise ValueError(
            f"{name} has shape {list(shape)} in the checkpoint, and the table has "
            f"{storage.part_column(storage.dim)} columns. Load it into a model of the same size."
        )
    for part in storage.form.row_parts:
        record = manifest.tensors.get(f"{prefix}{part.name}")
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
    place: HashedPlace, folder: Path, manifest: Manifest, prefix: str, slots: Mapping[str, str]
) -> None:
    """Replace the rows of a table by those of a checkpoint.

    Args:
        place: the table.
        folder: the checkpoint.
        manifest: its table of contents.
        prefix: what begins the names of the table's parts there.
        slots: the names of the tensors of the optimizer's state, by slot; empty: none is loaded.
    """
    ids_name = f"{prefix}{IDS}" if f"{prefix}{IDS}" in manifest.tensors else None
    num_rows = manifest.tensors[f"{prefix}weight"].shape[0]
    parts = {part.name: f"{prefix}{part.name}" for part in place.storage.row_parts}
    parts = {part: name for part, name in {**parts, **slots}.items() if name in manifest.tensors}
    for table in place.tables:
        table.clear()
    for first in range(0, num_rows, _BLOCK_ROWS):
        rows = (first, min(first + _BLOCK_ROWS, num_rows))
        ids = read_rows(folder, manifest, ids_name, rows) if ids_name else torch.arange(*rows)
        keys = mix(ids, place.storage.keys.seed)
        for table in place.tables:
            own = in_span(keys, (table.rectangle.r0, table.rectangle.r1)).nonzero()[:, 0]
            if len(own):
                begin, end = int(own[0]), int(own[-1]) + 1
                here = (first + begin, first + end)
                values = {part: read_rows(folder, manifest, name, here) for part, name in parts.items()}
                table.load(own_rows(table, ids[begin:end], values))
    waiting = [f"{prefix}{name}" for name in WAITING]
    if place.storage.counts and all(name in manifest.tensors for name in waiting):
        span = (0, manifest.tensors[waiting[0]].shape[0])
        found = [read_rows(folder, manifest, name, span) for name in waiting]
        for table in place.tables:
            table.load(own_counts(table, *found))


def read_rows(folder: Path, manifest: Manifest, name: str, rows: tuple[int, int]) -> Tensor:
    """Read some rows of a tensor, verified.

    Raises:
        DamagedCheckpointError: they are not what was written.
    """
    record = manifest.tensors[name]
    found = torch.empty((rows[1] - rows[0], *record.shape[1:]), dtype=record.dtype)
    with ExitStack() as stack:
        opened: dict[int, int] = {}
        for piece in record.pieces:
            low, high = max(rows[0], piece.offset[0]), min(rows[1], piece.offset[0] + piece.shape[0])
            if low >= high or 0 in piece.shape:
                continue
            if piece.file not in opened:
                opened[piece.file] = stack.enter_context(open_data(folder, manifest, piece.file))
            target = found[low - rows[0] : high - rows[0]]
            for dim in range(1, len(piece.shape)):
                target = target.narrow(dim, piece.offset[dim], piece.shape[dim])
            stored = stored_rows(folder, manifest, opened[piece.file], name, record=record, piece=piece)
            read_region(stored, (low - piece.offset[0], *[0] * (len(piece.shape) - 1)), target)
    return found
