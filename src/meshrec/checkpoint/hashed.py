"""Load hashed tables from checkpoints under any plan, block by block.

A checkpoint stores hashed rows in key order, with their ``ids``. Every rank reads all IDs, and the rows of
its rectangles. The checkpoint of a fixed table has no IDs: row i belongs to ID i.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from meshrec.checkpoint.manifest import Manifest
from meshrec.checkpoint.reading import read_rows
from meshrec.model_parallel import DistributedModelParallel
from meshrec.ops.index import mix
from meshrec.tables.hashed.admission import in_span
from meshrec.tables.hashed.io import WAITING, counts_in_rectangle, rows_in_rectangle, state_dict_names
from meshrec.tables.hashed.table import IDS, HashedRows, HashedTable, is_growable
from meshrec.tables.module import TableModule

# Rows per read; bounds memory to 64 Ki rows.
_BLOCK_ROWS = 1 << 16


class HashedTarget(NamedTuple):
    """Hashed table being loaded.

    Attributes:
        path: table's module name.
        tables: this rank's rectangles.
        storage: row format, keys and limits.
        changed: reports loaded rows to all ranks. Collective.
    """

    path: str
    tables: Sequence[HashedTable]
    storage: HashedRows
    changed: Callable[[], object]

    def names(self) -> list[str]:
        """Return the state dict names of the table's tensors."""
        return state_dict_names(self.storage)


def hashed_targets(item: nn.Module) -> dict[str, HashedTarget]:
    """Return a module's hashed tables by path."""
    module = item.module if isinstance(item, DistributedModelParallel) else item
    targets: dict[str, HashedTarget] = {}
    for path, child in module.named_modules():
        if isinstance(child, TableModule) and is_growable(child.storage):
            targets[path] = HashedTarget(path, child.tables, child.storage, child.rows_loaded)
    return targets


def check_fits(target: HashedTarget, manifest: Manifest, prefix: str) -> None:
    """Check that a checkpoint's rows fit a hashed table, before anything changes.

    Args:
        target: table to load.
        manifest: checkpoint manifest.
        prefix: checkpoint name prefix of the table's tensors.

    Raises:
        ValueError: the checkpoint lacks the table, or has another width, other row parts or too many rows.
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
    target: HashedTarget, folder: Path, manifest: Manifest, prefix: str, slots: Mapping[str, str]
) -> None:
    """Replace a table's rows with those of a checkpoint.

    Args:
        target: table to load.
        folder: checkpoint folder.
        manifest: checkpoint manifest.
        prefix: checkpoint name prefix of the table's tensors.
        slots: checkpoint tensor name per optimizer state slot; empty: load no optimizer state.
    """
    ids_name = f"{prefix}{IDS}" if f"{prefix}{IDS}" in manifest.tensors else None
    num_rows = manifest.tensors[f"{prefix}weight"].shape[0]
    parts = {part.name: f"{prefix}{part.name}" for part in target.storage.row_parts}
    parts = {part: name for part, name in {**parts, **slots}.items() if name in manifest.tensors}
    for table in target.tables:
        table.clear()
    for first in range(0, num_rows, _BLOCK_ROWS):
        rows = (first, min(first + _BLOCK_ROWS, num_rows))
        ids = read_rows(folder, manifest, ids_name, rows) if ids_name else torch.arange(*rows)
        keys = mix(ids, target.storage.keys.seed)
        for table in target.tables:
            matches = in_span(keys, (table.rectangle.r0, table.rectangle.r1)).nonzero()[:, 0]
            if len(matches):
                # Rows are stored in key order, so this rectangle's rows are contiguous.
                start, end = int(matches[0]), int(matches[-1]) + 1
                here = (first + start, first + end)
                values = {part: read_rows(folder, manifest, name, here) for part, name in parts.items()}
                table.load(rows_in_rectangle(table, ids[start:end], values))
    # Occurrence counts of IDs not yet admitted.
    waiting = [f"{prefix}{name}" for name in WAITING]
    if target.storage.counts and all(name in manifest.tensors for name in waiting):
        span = (0, manifest.tensors[waiting[0]].shape[0])
        counts = [read_rows(folder, manifest, name, span) for name in waiting]
        for table in target.tables:
            table.load(counts_in_rectangle(table, *counts))
