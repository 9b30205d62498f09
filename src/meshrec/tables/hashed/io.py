"""State dicts of hashed tables: load whole-table tensors into the rectangles on a rank, and return them.

A rectangle is a key interval times a column interval of a table, and has a separate ``HashedTable`` object.
A whole table in a state dict is a set of tensors (*parts*) with a row per ID: ``ids``, ``weight`` and others.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from meshrec.ops.index import mix
from meshrec.tables.hashed.admission import in_span, waiting_counts
from meshrec.tables.hashed.key_ordered import IDS
from meshrec.tables.hashed.table import HashedRows, HashedTable
from meshrec.tables.storage import check_loadable
from meshrec.tables.streamed import StreamedPart, values_of
from meshrec.tables.table import RowBlock

WAITING = ("waiting_ids", "waiting")
"""State dict names for IDs waiting for admission: their keys, and their counts."""
_BLOCK_ROWS = 1 << 16  # rows loaded at once, which bounds the memory for their copies


def state_dict_names(storage: HashedRows) -> list[str]:
    """Return the names of a hashed table's parts in a state dict, such as ``weight`` and ``ids``."""
    counted = WAITING if storage.counts_waiting_ids else ()
    return [*(part.name for part in storage.row_parts), IDS, *counted]


def load_full_table(tables: Sequence[HashedTable], values: Mapping[str, Tensor], prefix: str) -> None:
    """Replace all rows in a table's rectangles on this rank by rows from a state dict.

    All parts are checked first: if one does not fit, nothing changes. Without the part ``ids``, row i belongs
    to ID i, as in a fixed table. Policy parts that are missing get initial values.

    Args:
        tables: the table's rectangles on this rank.
        values: whole-table parts, by name.
        prefix: prefix for part names in messages.

    Raises:
        ValueError: a part does not fit, or there are more rows than ``max_rows``.
    """
    # Collective for split tensors, so before the return of ranks without rectangles.
    full_parts = {name: _to_tensor(value) for name, value in values.items()}
    if not tables:
        return
    storage = tables[0].storage
    ids = _validated_ids(full_parts, storage, prefix)
    names = [part.name for part in storage.row_parts if part.name in full_parts]
    # All values were checked above. From here on rows change.
    for table in tables:
        table.clear()
        for first in range(0, len(ids), _BLOCK_ROWS):
            rows = slice(first, first + _BLOCK_ROWS)
            table.load(rows_in_rectangle(table, ids[rows], {name: full_parts[name][rows] for name in names}))
        if storage.counts_waiting_ids and WAITING[0] in full_parts and len(full_parts[WAITING[0]]):
            table.load(counts_in_rectangle(table, full_parts[WAITING[0]], full_parts[WAITING[1]]))


def rows_in_rectangle(table: HashedTable, ids: Tensor, parts: Mapping[str, Tensor]) -> Iterator[RowBlock]:
    """Select the rows that belong to a rectangle, and yield them as a single block. Yield nothing if none do.

    Args:
        table: rectangle.
        ids: ID per row, int64 [n].
        parts: row parts by name, with whole rows.
    """
    r = table.rectangle
    keys = mix(ids, table.storage.keys.seed)
    inside = in_span(keys, (r.r0, r.r1)).nonzero()[:, 0]
    if len(inside):
        # Blocks have ascending keys, and the state dict may have another order.
        keys, order = keys[inside].sort()
        selected = inside[order]
        first, end = table.store.part_columns(r.columns)
        cut = {name: v[selected] if v.dim() == 1 else v[selected, first:end] for name, v in parts.items()}
        yield RowBlock(keys, r.columns, cut)


def counts_in_rectangle(table: HashedTable, keys: Tensor, counts: Tensor) -> Iterator[RowBlock]:
    """Select the admission counts for a rectangle, and yield them as a single block.

    Args:
        table: rectangle.
        keys: keys of IDs waiting for admission, which have no row yet, int64 [n].
        counts: count per key, int64 [n].
    """
    inside = in_span(keys, (table.rectangle.r0, table.rectangle.r1))
    yield RowBlock(keys[inside], table.rectangle.columns, {"waiting": counts[inside]})


def _validated_ids(full_parts: Mapping[str, Tensor], storage: HashedRows, prefix: str) -> Tensor:
    """Check that the parts of a whole table fit, and return the ID per row, int64 [n]."""
    weight, num_columns, max_rows = full_parts["weight"], storage.part_column(storage.dim), storage.max_rows
    check_loadable(weight, f"{prefix}weight", storage)
    if missing := [part.name for part in storage.row_format.row_parts if part.name not in full_parts]:
        raise ValueError(f"{prefix}{missing[0]} is missing. Load what the quantised model's state_dict gave.")
    if weight.dim() != 2 or weight.shape[1] != num_columns:
        raise ValueError(
            f"{prefix}weight: the state dict has shape {list(weight.shape)}, and the table {num_columns} "
            "columns. Load it into a model with the same tables."
        )
    if len(weight) > max_rows:
        raise ValueError(
            f"{prefix}weight: the state dict has {len(weight):,} rows, and max_rows is {max_rows:,}. Nothing "
            "was changed. Raise max_rows of the table's keys."
        )
    ids = full_parts.get(IDS)
    # A fixed table's state dict has no IDs.
    if ids is None:
        return torch.arange(len(weight))
    for name, value in full_parts.items():
        if name not in WAITING and len(value) != len(weight):
            raise ValueError(
                f"{prefix}{name} has {len(value)} rows, and {prefix}weight has {len(weight)}. Load what one "
                "state_dict gave."
            )
    if ids.dtype != torch.int64 or len(torch.unique(ids)) != len(ids):
        raise ValueError(f"{prefix}{IDS} must be distinct int64 IDs, got {len(ids)} of {ids.dtype}.")
    return ids


def shows_current_rows(values: Mapping[str, Tensor], tables: Sequence[HashedTable]) -> bool:
    """Return whether values to load were read from the same tables and are still up to date.

    A load can then be skipped. This happens if a table's state dict is loaded into the same table.
    """
    if not tables:
        return True
    ids = values.get(IDS)
    local = getattr(ids, "local", None)
    parts = local.local_shards() if local is not None else [ids]
    # A split tensor omits empty parts.
    if not parts:
        return not any(table.num_alive for table in tables)
    return all(
        isinstance(part, StreamedPart)
        and any(getattr(part.table, "is_of", lambda _: False)(table.slots) for table in tables)
        for part in parts
    )


def key_ordered_parts(table: HashedTable) -> dict[str, Tensor]:
    """Return a table's parts for a state dict, in key order. Values are read on demand, not copied."""
    tensors, counts = table.tensors(), waiting_counts(table.admission_counts)
    names = state_dict_names(table.storage)
    return {name: tensors[name] if name in tensors else counts[name] for name in names}


def merge_by_key(tables: Sequence[HashedTable], storage: HashedRows) -> dict[str, Tensor]:
    """Return copies of a whole table's parts in key order, merged from rectangles all on this rank."""
    # Rectangles with column 0 together contain every key once.
    first = [table for table in tables if table.rectangle.c0 == 0]
    empty = torch.empty(0, dtype=torch.int64)
    keys = torch.cat([empty, *(table.live_keys()[0] for table in first)]).sort().values
    columns = storage.part_column(storage.dim)
    parts = {
        part.name: torch.empty([len(keys)] if part.per_row else [len(keys), columns], dtype=part.dtype)
        for part in storage.row_parts
    }
    for table in tables:
        start, end = table.store.part_columns(table.rectangle.columns)
        for block in table.stream():
            assert isinstance(block.keys, Tensor)
            # Skips optimizer state, which a state dict does not show, and counts of waiting IDs.
            for name, values in block.parts.items():
                if name in parts:
                    rows = torch.searchsorted(keys, block.keys)
                    target = parts[name]
                    (target if values.dim() == 1 else target[:, start:end])[rows] = values
    parts[IDS] = tables[0].ids_of(keys)
    if storage.counts_waiting_ids:
        counts = [waiting_counts(table.admission_counts) for table in first]
        order = torch.cat([count[WAITING[0]] for count in counts]).argsort()
        parts |= {name: torch.cat([count[name] for count in counts])[order] for name in WAITING}
    return parts


def _to_tensor(value: Tensor) -> Tensor:
    """Return a state dict value as an ordinary tensor in memory."""
    full = value.full_tensor() if hasattr(value, "full_tensor") else value
    plain = values_of(full.detach())
    assert isinstance(plain, Tensor)
    return plain
