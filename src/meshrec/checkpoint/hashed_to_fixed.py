"""Loading fixed tables from the checkpoint of a hashed one: the row of ID i becomes row i."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from meshrec.checkpoint.hashed import read_rows
from meshrec.checkpoint.manifest import Manifest
from meshrec.distributed.table_shards import TableShards
from meshrec.model_parallel import DistributedModelParallel
from meshrec.modules.embedding_modules import TableCollection
from meshrec.tables.at_rest import IDS
from meshrec.tables.table import Rectangle, RowBlock

_log = logging.getLogger(__name__)
_BLOCK_ROWS = 1 << 16


class LoadableRows(Protocol):
    """A rectangle that takes blocks of rows."""

    @property
    def rectangle(self) -> Rectangle:
        """The keys and columns that it has."""

    def load(self, blocks: Iterable[RowBlock]) -> None:
        """Replace rows, or parts of them."""


class WholeRows:
    """A table in the memory of a parameter, with its optimizer state beside it."""

    def __init__(self, weight: Tensor) -> None:
        self.rectangle = Rectangle(0, 0, weight.shape[0], 0, weight.shape[1])
        self.tensors = {"weight": weight}

    @torch.no_grad()
    def load(self, blocks: Iterable[RowBlock]) -> None:
        """Copy the blocks into the memory."""
        for block in blocks:
            keys = torch.arange(*_ends(block.keys)) if isinstance(block.keys, range) else block.keys
            for name, values in block.parts.items():
                self.tensors[name][keys] = values.to(self.tensors[name].dtype)


class FixedPlace(NamedTuple):
    """A table with a fixed number of rows in a module that is loaded."""

    path: str
    """The name of the module that holds it."""
    tables: Sequence[LoadableRows]
    """The rectangles of this rank."""
    num_rows: int
    dim: int
    changed: Callable[[], object]
    """Tells batches in flight that rows were loaded."""


def fixed_places(item: nn.Module) -> dict[str, FixedPlace]:
    """Return the fixed tables of a module that can be trained, by path."""
    module = item.module if isinstance(item, DistributedModelParallel) else item
    found: dict[str, FixedPlace] = {}
    for path, child in module.named_modules():
        if isinstance(child, TableShards) and child.hashed is None and child.storage.is_trainable:
            changed = partial(increment_version, child.weight)
            found[path] = FixedPlace(path, child.tables, child.table.num_rows, child.table.dim, changed)
        elif isinstance(child, TableCollection):
            name, _ = child.table_holders()
            start = f"{path}.{name}" if path else name
            for config, weight in child.tables().values():
                if config.keys is None and not config.data_type.bits:
                    rows = WholeRows(weight.detach())
                    where = f"{start}.{config.name}"
                    num_rows, dim = weight.shape
                    found[where] = FixedPlace(where, [rows], num_rows, dim, lambda: None)
    return found


def check_ids(ids: Iterable[Tensor], num_rows: int, table: str) -> int:
    """Check that IDs are rows of a fixed table, and return how many there are.

    Raises:
        ValueError: some are not.
    """
    count, outside, example = 0, 0, 0
    for each in ids:
        bad = each[(each < 0) | (each >= num_rows)]
        if len(bad) and not outside:
            example = int(bad[0])
        count, outside = count + len(each), outside + len(bad)
    if outside:
        raise ValueError(
            f"{outside:,} of {count:,} IDs of the hashed table are no rows of {table!r}, such as {example}: "
            f"they must lie in [0, {num_rows:,}). Nothing was changed. Raise num_embeddings, or give the "
            "table hashed keys."
        )
    return count


def check_fits_fixed(place: FixedPlace, folder: Path, manifest: Manifest, prefix: str) -> None:
    """Check that the rows of a hashed table's checkpoint fit a fixed one, before anything changes.

    Raises:
        ValueError: they have another width, or an ID is no row.
    """
    num, dim = manifest.tensors[f"{prefix}weight"].shape
    if dim != place.dim:
        raise ValueError(
            f"{prefix}weight has {dim} columns in the checkpoint, and the table has {place.dim}. Load it "
            "into a model of the same size."
        )
    blocks = (
        read_rows(folder, manifest, f"{prefix}{IDS}", (first, min(first + _BLOCK_ROWS, num)))
        for first in range(0, num, _BLOCK_ROWS)
    )
    count = check_ids(blocks, place.num_rows, f"{prefix}weight")
    if count < place.num_rows:
        _log.info(
            "%sweight: the checkpoint has rows of %s IDs; the other %s rows stay as they are",
            prefix,
            f"{count:,}",
            f"{place.num_rows - count:,}",
        )


def load_fixed(
    place: FixedPlace, folder: Path, manifest: Manifest, prefix: str, slots: Mapping[str, str]
) -> None:
    """Copy the rows of a hashed table's checkpoint: the row of ID i becomes row i.

    Args:
        place: the table.
        folder: the checkpoint.
        manifest: its table of contents.
        prefix: what begins the names of the table's parts there.
        slots: the names of the tensors of the optimizer's state, by slot.
    """
    parts = {"weight": f"{prefix}weight"} | {s: n for s, n in slots.items() if n in manifest.tensors}
    num = manifest.tensors[parts["weight"]].shape[0]
    for first in range(0, num, _BLOCK_ROWS):
        rows = (first, min(first + _BLOCK_ROWS, num))
        ids = read_rows(folder, manifest, f"{prefix}{IDS}", rows)
        values = {part: read_rows(folder, manifest, name, rows) for part, name in parts.items()}
        for table in place.tables:
            table.load(rows_by_id(table, ids, values))


def rows_by_id(table: LoadableRows, ids: Tensor, parts: Mapping[str, Tensor]) -> Iterable[RowBlock]:
    """Yield one block with the rows that belong to a rectangle of a fixed table, if there are any."""
    r = table.rectangle
    inside = ((ids >= r.r0) & (ids < r.r1)).nonzero()[:, 0]
    if len(inside):
        keys, order = ids[inside].sort()
        chosen = inside[order]
        cut = {name: v[chosen] if v.dim() == 1 else v[chosen, r.c0 : r.c1] for name, v in parts.items()}
        yield RowBlock(keys, r.columns, cut)


def _ends(keys: range) -> tuple[int, int]:
    return keys.start, keys.stop
