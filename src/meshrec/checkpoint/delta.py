"""Record which table rows training changes, and export the rows changed since an earlier update.

A delta contains these rows, so servers can follow training without loading whole tables; see
``delta_files.py``.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from meshrec.checkpoint.agreement import agreed, ranks_of
from meshrec.checkpoint.blocks import FileWriter, memory_of
from meshrec.checkpoint.data_file import header_of
from meshrec.comms.collectives import gather_objects
from meshrec.distributed.routing import RoutedTable
from meshrec.distributed.touched_rows import TouchedRows, is_alive
from meshrec.durable import durable_file
from meshrec.model_parallel import DistributedModelParallel
from meshrec.ops.index import mix
from meshrec.tables.hashed.admission import in_span
from meshrec.tables.hashed.table import has_growable_rows
from meshrec.tables.table import Table, read_weights

# Changed rows in a table rectangle: IDs [U], first column, end column, rows [U, columns].
_Piece = tuple[Tensor, int, int, Tensor]


class RowTracker:
    """Records, for every table row, the last update that changed it. Recording starts at construction.

    Only tables with a fused optimizer are tracked. The record takes 4 bytes per
    row, and a write per ID in every backward pass. Updates are numbered by the optimizer step (the maximum
    ``"step"`` over all tables), which checkpoints contain.

    Args:
        model: model to track. A new tracker replaces the model's previous tracker.

    Attributes:
        first_step: smallest ``since`` that `export` accepts. Older changes are unknown.
    """

    def __init__(self, model: DistributedModelParallel) -> None:
        self._modules = model.sharded_modules
        # Kept to notice resharding, which replaces a module's tables; see `_check`.
        self._tables = {path: module.tables for path, module in self._modules.items()}
        self._touched = {
            path: TouchedRows(module.tables, module.built.fused, self._current_update)
            for path, module in self._modules.items()
        }
        # Largest number returned by `step` until now.
        self._last_step = -1
        self.first_step = self.step

    @property
    def step(self) -> int:
        """Number of the last update. The number never decreases."""
        # Loading an older state decreases the tables' step counters, but no number may be used twice.
        self._last_step = max(self._last_step, self._max_step())
        return self._last_step

    @property
    def names(self) -> list[str]:
        """Parameter names of the tracked tables."""
        return [
            f"{path}.{name}" if path else name
            for path, module in self._modules.items()
            for name in module.fused_optimizer.params
        ]

    def export(self, path: str | Path, *, since: int, also: Mapping[str, Tensor] | None = None) -> "Exported":
        """Write the rows changed after update ``since`` to a safetensors file.

        Collective; call it between training steps. For every table with changed rows, the file has
        ``<name>.ids``, int64 [U], ascending, and ``<name>.rows`` [U, D]. For every hashed table, the file
        also has ``<name>.gone``, int64 [G]: IDs that were evicted and not admitted again. Whatever the plan,
        rank 0 collects the full rows and writes the file. The tracker then forgets evictions before
        ``since``, so ``since`` must not decrease from call to call.

        Args:
            path: output file.
            since: update number, at least `first_step`.
            also: IDs of additional rows to write, by parameter name; equal on all ranks.

        Returns:
            Numbers of written rows and of evicted IDs, by parameter name.

        Raises:
            ValueError: ``since`` is before `first_step`, or the model was resharded; raised on every rank.
            CheckpointError: a rank failed to read rows, or rank 0 failed to write the file; raised on every
                rank.
        """
        axis, path = ranks_of(None), Path(path)
        # Filled by `collect`, because `agreed` would send a result to all ranks.
        pieces: list[tuple[str, _LocalRows, int]] = []

        def collect() -> None:
            """Append this rank's changed rows, and its rows in ``also``, per tracked table to ``pieces``.

            Raises:
                ValueError: see ``export``.
            """
            self._check(since)
            pieces.extend(self._pieces(since, also or {}))

        # All ranks must have read before any rank gathers. Otherwise the others would wait for a failed rank.
        agreed(axis, collect, "exporting touched rows")
        counts = Exported({}, {})
        tensors: dict[str, Tensor] = {}
        errors: list[Exception] = []
        # Every rank assembles the tables: all need the counts, and all must see an error.
        for name, local_rows, dim in pieces:
            rows_by_rank = gather_objects(local_rows, axis, "touched rows")
            try:
                tensors |= _assemble_table(name, rows_by_rank, dim, counts)
            except Exception as error:  # raised on all ranks by `write` below
                errors.append(error)
            if axis.rank != 0:
                # Only rank 0 writes. Other ranks free the rows before the next table's rows arrive.
                tensors.clear()

        def write() -> None:
            """Raise the first error from assembling tables. Without errors, write the file on rank 0."""
            if errors:
                raise errors[0]
            if axis.rank == 0:
                write_tensors(path, tensors)

        agreed(axis, write, "writing touched rows")
        if counts.evicted:
            # Evictions before this update have been forgotten.
            self.first_step = since
        return counts

    def changed_ids(self, since: int) -> dict[str, Tensor]:
        """Return the IDs whose rows `export` would write or report as evicted. Collective.

        Args:
            since: update number, as for `export`.

        Returns:
            IDs by parameter name, int64, ascending, equal on all ranks. Tables without changes are missing.

        Raises:
            ValueError: as for `export`; raised on every rank.
        """
        axis = ranks_of(None)
        local = agreed(axis, lambda: self._local_changed_ids(since), "finding changed rows")
        names = dict.fromkeys(name for ids in local for name in ids)
        united = {name: torch.cat([ids[name] for ids in local if name in ids]).unique() for name in names}
        return {name: ids for name, ids in united.items() if len(ids)}

    def _local_changed_ids(self, since: int) -> dict[str, Tensor]:
        """Return the IDs of changed and evicted rows on this rank, by parameter name."""
        self._check(since)
        ids: dict[str, list[Tensor]] = {}
        for name, touched, t, _ in self._tracked_tables():
            # Evicted first, because this also takes over the evictions since the last update.
            evicted = [rows.ids_of(keys) for rows, keys in touched.evicted(t, since, self.step)]
            changed = [
                rows.ids_of(keys) if has_growable_rows(rows) else keys
                for rows, keys in touched.touched(t, since)
            ]
            ids[name] = [part.cpu() for part in (*evicted, *changed)]
        return {name: torch.cat(parts).unique() for name, parts in ids.items() if parts}

    def _max_step(self) -> int:
        """Return the largest optimizer step over all tables, or 0 without tables."""
        return max((step for m in self._modules.values() for step in m.built.steps()), default=0)

    def _current_update(self) -> int:
        """Return the number of the update in progress. The tracker records it for every row changed now.

        The number is greater than every value returned by ``step`` so far.
        """
        # Take the maximum over tables, because the step of a table that was frozen for a while lags behind.
        # With deferred updates, backward runs before the step counter increases.
        is_deferred = any(module.tables.collected is not None for module in self._modules.values())
        return max(self._max_step() + is_deferred, self._last_step + 1)

    def _check(self, since: int) -> None:
        """Raise ValueError if the changes after ``since`` are not completely recorded."""
        if since < self.first_step:
            raise ValueError(
                f"rows are tracked since update {self.first_step}, but since={since} was requested. "
                "Export whole tables (export_safetensors), or pass a later step."
            )
        # Resharding replaces this object in the module.
        if any(self._modules[path].tables is not tables for path, tables in self._tables.items()):
            raise ValueError(
                "the model was resharded after tracking started. Export whole tables, and create a new "
                "tracker."
            )

    def _pieces(self, since: int, also: Mapping[str, Tensor]) -> list[tuple[str, "_LocalRows", int]]:
        """Return name, rows changed after update ``since``, and dim of every tracked table on this rank."""
        changed = []
        for name, touched, t, table in self._tracked_tables():
            extra_ids = also.get(name)
            # Only hashed tables have a seed, by which IDs are hashed to keys.
            if table.mix_seed is not None:
                local_rows = _hashed_rows(touched, t, since, self.step, extra_ids)
            else:
                local_rows = _LocalRows(
                    [_fixed_rows(rows, keys, extra_ids) for rows, keys in touched.touched(t, since)], None
                )
            changed.append((name, local_rows, table.dim))
        return changed

    def _tracked_tables(self) -> Iterator[tuple[str, TouchedRows, int, RoutedTable]]:
        """Yield the parameter name, touched rows, number and description of every tracked table."""
        for path, module in self._modules.items():
            names = list(module.fused_optimizer.params)
            for t, table in enumerate(module.built.routing.tables):
                # A table without a fused optimizer has no parameter here, and is not tracked.
                # A parameter is called ``<module dict>.<table>.weight``.
                name = next((param for param in names if param.split(".")[-2] == table.name), None)
                if name is not None:
                    yield f"{path}.{name}" if path else name, self._touched[path], t, table


class Exported(NamedTuple):
    """Counts for an exported file, by parameter name.

    Attributes:
        rows: number of written rows; tables without changed rows are missing.
        evicted: number of evicted IDs, for every hashed table, including zeros.
    """

    rows: dict[str, int]
    evicted: dict[str, int]


class _LocalRows(NamedTuple):
    """Changed rows of a table on one rank.

    A rank has some rectangles of a table. A rectangle is a range of rows (in a hashed table, of keys) and a
    range of columns.

    Attributes:
        pieces: changed rows in every rectangle on the rank, as tuples (IDs [U], first column, end column,
            rows [U, columns]).
        evicted: IDs evicted from a hashed table, int64. None for a table that is not hashed, because such a
            table has a row for every ID and evicts nothing.
    """

    pieces: list[_Piece]
    evicted: Tensor | None


def _fixed_rows(rows: Table, keys: Tensor, extra_ids: Tensor | None) -> _Piece:
    """Return a rectangle's rows at ``keys``, ascending indices in the whole table, and ``extra_ids``."""
    _, r0, r1, c0, c1 = rows.rectangle
    if extra_ids is not None:
        keys = _union(keys, extra_ids, r0, r1)
    return keys, c0, c1, read_weights(rows, keys).cpu()


def _hashed_rows(
    touched: TouchedRows, table: int, since: int, now: int, extra_ids: Tensor | None
) -> _LocalRows:
    """Return this rank's changed rows and evicted IDs for a hashed table.

    Args:
        since: return changes after this update.
        now: number of the last update.
        extra_ids: IDs of additional rows. IDs without a row are returned as evicted. None: none.
    """
    pieces, evicted = [], [torch.empty(0, dtype=torch.int64)]
    for (_, keys), (rows, evicted_keys) in zip(
        touched.touched(table, since), touched.evicted(table, since, now), strict=True
    ):
        r = rows.rectangle
        if extra_ids is not None:
            # `mix` hashes IDs to keys. Keep the IDs whose keys belong to this rectangle.
            extra_keys = mix(extra_ids, rows.storage.keys.seed)
            extra_keys = extra_keys[in_span(extra_keys, (r.r0, r.r1))]
            alive = is_alive(rows, extra_keys)
            keys, evicted_keys = (
                torch.cat([keys, extra_keys[alive]]).unique(),
                # Servers may have a row for an ID without one here, and must drop it.
                torch.cat([evicted_keys, extra_keys[~alive]]),
            )
        weights = rows.store.gather(rows.key_index.find(keys), r.columns, ["weight"])["weight"]
        pieces.append((rows.ids_of(keys), r.c0, r.c1, weights))
        evicted.append(rows.ids_of(evicted_keys))
    return _LocalRows(pieces, torch.cat(evicted))


def _union(keys: Tensor, extra_ids: Tensor, first: int, end: int) -> Tensor:
    """Return the distinct values among ``keys`` and the extra IDs in [first, end), ascending."""
    inside = extra_ids[(extra_ids >= first) & (extra_ids < end)]
    united: Tensor = torch.cat([keys, inside.to(keys.device)]).unique()
    return united


def _assemble_table(name: str, pieces: list[_LocalRows], dim: int, counts: Exported) -> dict[str, Tensor]:
    """Combine a table's changed rows, by rank, into tensors ``<name>.ids``, ``.rows`` and ``.gone``."""
    ids, rows = _join_columns([piece for local_rows in pieces for piece in local_rows.pieces], dim)
    tensors: dict[str, Tensor] = {}
    if len(ids):
        counts.rows[name] = len(ids)
        tensors = {f"{name}.ids": ids, f"{name}.rows": rows}
    if evicted := [local_rows.evicted for local_rows in pieces if local_rows.evicted is not None]:
        evicted_ids = tensors[f"{name}.gone"] = torch.cat(evicted).unique()
        counts.evicted[name] = len(evicted_ids)
    return tensors


def _join_columns(pieces: list[_Piece], dim: int) -> tuple[Tensor, Tensor]:
    """Return the distinct IDs [U], ascending, and full rows [U, dim] of a table split by rows and columns."""
    # The empty tensor keeps the dtype if ``pieces`` is empty.
    ids = torch.cat([torch.empty(0, dtype=torch.int64), *(rows for rows, *_ in pieces)]).unique()
    dtype = pieces[0][3].dtype if pieces else torch.float32
    # Every column is written below: all column shards of a row see the same IDs, and thus record the same
    # changes.
    whole = torch.empty(len(ids), dim, dtype=dtype)
    for rows, c0, c1, values in pieces:
        # `ids` is sorted and contains all rows, so searchsorted finds their exact positions.
        whole[torch.searchsorted(ids, rows), c0:c1] = values
    return ids, whole


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors to a safetensors file. The file appears only when it is complete and on disk."""
    with durable_file(path) as file:
        writer = FileWriter(file.fileno())
        writer.write(header_of({name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()}))
        for tensor in tensors.values():
            writer.write(memory_of(tensor))
