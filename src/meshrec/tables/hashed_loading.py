"""Filling hashed tables from whole tensors: state dicts of hashed tables and of fixed ones, and files."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from meshrec.ops.index import mix
from meshrec.tables.at_rest import IDS
from meshrec.tables.hashed import HashedRows, HashedTable
from meshrec.tables.storage import check_loadable
from meshrec.tables.streamed import StreamedPart, values_of
from meshrec.tables.table import RowBlock
from meshrec.tables.waiting import in_span

WAITING = ("waiting_ids", "waiting")
"""The names of the counts of IDs that wait for admission."""
_BLOCK_ROWS = 1 << 16


def whole_names(storage: HashedRows) -> list[str]:
    """Return the names of everything that a state dict has of a table."""
    counted = WAITING if storage.counts else ()
    return [*(part.name for part in storage.row_parts), IDS, *counted]


def load_whole(tables: Sequence[HashedTable], values: Mapping[str, Tensor], prefix: str) -> None:
    """Replace the rows of rectangles by those of a whole table: all of it, or nothing.

    Without ``ids``, row i is that of ID i, as in a fixed table. Missing parts of a policy begin anew.

    Args:
        tables: the rectangles of one table that are here.
        values: the parts of the whole table by name.
        prefix: what begins their names, for messages.

    Raises:
        ValueError: a part does not fit, or there are more rows than the table may have.
    """
    whole = {name: _plain(value) for name, value in values.items()}
    if not tables:
        return
    storage = tables[0].storage
    ids = checked(whole, storage, prefix)
    names = [part.name for part in storage.row_parts if part.name in whole]
    for table in tables:
        table.clear()
        for first in range(0, len(ids), _BLOCK_ROWS):
            rows = slice(first, first + _BLOCK_ROWS)
            table.load(own_rows(table, ids[rows], {name: whole[name][rows] for name in names}))
        if storage.counts and WAITING[0] in whole and len(whole[WAITING[0]]):
            table.load(own_counts(table, whole[WAITING[0]], whole[WAITING[1]]))


def own_rows(table: HashedTable, ids: Tensor, parts: Mapping[str, Tensor]) -> Iterator[RowBlock]:
    """Yield the block of those rows that belong to a rectangle, if there are some."""
    r = table.rectangle
    keys = mix(ids, table.storage.keys.seed)
    inside = in_span(keys, (r.r0, r.r1)).nonzero()[:, 0]
    if len(inside):
        keys, order = keys[inside].sort()
        chosen = inside[order]
        first, end = table.places(r.columns)
        cut = {name: v[chosen] if v.dim() == 1 else v[chosen, first:end] for name, v in parts.items()}
        yield RowBlock(keys, r.columns, cut)


def own_counts(table: HashedTable, keys: Tensor, counts: Tensor) -> Iterator[RowBlock]:
    """Yield the counts of waiting IDs that belong to a rectangle. ``keys`` are the mixed IDs."""
    inside = in_span(keys, (table.rectangle.r0, table.rectangle.r1))
    yield RowBlock(keys[inside], table.rectangle.columns, {"waiting": counts[inside]})


def checked(whole: Mapping[str, Tensor], storage: HashedRows, prefix: str) -> Tensor:
    """Return the IDs of a whole table's rows.

    Raises:
        ValueError: something does not fit the table.
    """
    weight, dim, most = whole["weight"], storage.part_column(storage.dim), storage.max_rows
    check_loadable(weight, f"{prefix}weight", storage)
    if missing := [part.name for part in storage.form.row_parts if part.name not in whole]:
        raise ValueError(f"{prefix}{missing[0]} is missing. Load what the quantised model's state_dict gave.")
    if weight.dim() != 2 or weight.shape[1] != dim:
        raise ValueError(
            f"{prefix}weight: the state dict has shape {list(weight.shape)}, and the table {dim} columns. "
            "Load it into a model with the same tables."
        )
    if len(weight) > most:
        raise ValueError(
            f"{prefix}weight: the state dict has {len(weight):,} rows, and max_rows is {most:,}. Nothing was "
            "changed. Raise max_rows of the table's keys."
        )
    ids = whole.get(IDS)
    if ids is None:
        return torch.arange(len(weight))
    for name, value in whole.items():
        if name not in WAITING and len(value) != len(weight):
            raise ValueError(
                f"{prefix}{name} has {len(value)} rows, and {prefix}weight has {len(weight)}. Load what one "
                "state_dict gave."
            )
    if ids.dtype != torch.int64 or len(torch.unique(ids)) != len(ids):
        raise ValueError(f"{prefix}{IDS} must be distinct int64 IDs, got {len(ids)} of {ids.dtype}.")
    return ids


def is_own(values: Mapping[str, Tensor], tables: Sequence[HashedTable]) -> bool:
    """Return whether the values are those that the tables have now."""
    if not tables:
        return True
    ids = values.get(IDS)
    local = getattr(ids, "local", None)
    parts = local.local_shards() if local is not None else [ids]
    if not parts:  # a split tensor leaves out what is empty
        return not any(table.num_alive for table in tables)
    own = [part for part in parts if isinstance(part, StreamedPart)]
    return bool(own) and len(own) == len(parts) and all(is_current(part, tables) for part in own)


def is_current(part: StreamedPart, tables: Sequence[HashedTable]) -> bool:
    """Return whether a part at rest shows one of the tables as it is now."""
    return any(getattr(part.table, "is_of", lambda _: False)(table) for table in tables)


def _plain(value: Tensor) -> Tensor:
    full = value.full_tensor() if hasattr(value, "full_tensor") else value
    found = values_of(full.detach())
    assert isinstance(found, Tensor)
    return found
