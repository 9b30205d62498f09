"""Export the table rows changed by training since an update, for deltas."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from meshrec.checkpoint.agreement import agreed, ranks_of
from meshrec.checkpoint.blocks import FileWriter, memory_of
from meshrec.checkpoint.data_file import header_of
from meshrec.comms.collectives import gather_objects
from meshrec.distributed.touched_rows import TouchedRows, is_alive
from meshrec.durable import durable_file
from meshrec.model_parallel import DistributedModelParallel
from meshrec.ops.index import mix
from meshrec.tables.hashed.admission import in_span
from meshrec.tables.table import Table, read_weights

# Changed rows in a rectangle: IDs [U], first column, end column, rows [U, columns].
_Piece = tuple[Tensor, int, int, Tensor]


class RowTracker:
    """Records the fused table rows changed by every update, from construction on.

    Takes 4 bytes per row, and a write per ID in every backward pass. The update number is the optimizer
    step (the maximum ``"step"`` over all tables), which checkpoints contain.

    Args:
        model: model to track. A new tracker replaces the model's previous one.

    Attributes:
        first_step: smallest ``since`` that `export` accepts.
    """

    def __init__(self, model: DistributedModelParallel) -> None:
        self._modules = model.sharded_modules
        self._tables = {path: module.tables for path, module in self._modules.items()}
        self._touched = {
            path: TouchedRows(module.tables, module.built.fused, self._next_mark)
            for path, module in self._modules.items()
        }
        self._last_step = -1
        self.first_step = self.step

    @property
    def step(self) -> int:
        """Number of the last update. It never decreases."""
        # Loading an older state decreases the table steps, but numbers must not be used twice.
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
        """Write the rows changed after update ``since`` to a safetensors file. Collective, between steps.

        For every table with changed rows, the file has ``<name>.ids``, int64 [U], ascending, and
        ``<name>.rows`` [U, D]. The first rank collects all columns for the rows, whatever the plan, and
        writes the file. For every hashed table, the file also has ``<name>.gone``, int64 [G]: IDs evicted
        and not admitted again. Evictions before ``since`` are forgotten, so ``since`` must not decrease from
        call to call.

        Args:
            path: output file.
            since: update number, at least `first_step`.
            also: additional row IDs to write, by table name; equal on all ranks.

        Returns:
            Row counts and evicted ID counts, by table.

        Raises:
            ValueError: ``since`` is before tracking started, or the model was resharded; raised on every
                rank.
            CheckpointError: a rank failed to read rows, or the first rank failed to write; raised on every
                rank.
        """
        axis, path = ranks_of(None), Path(path)
        pieces: list[tuple[str, _LocalRows, int]] = []

        def read() -> None:
            self._check(since)
            pieces.extend(self._pieces(since, also or {}))

        agreed(axis, read, "exporting touched rows")
        counts = Exported({}, {})
        tensors: dict[str, Tensor] = {}
        errors: list[Exception] = []
        for name, local_rows, dim in pieces:
            rows_by_rank = gather_objects(local_rows, axis, "touched rows")
            try:
                tensors |= _assemble_table(name, rows_by_rank, dim, counts)
            except Exception as error:  # raised on all ranks by `write` below
                errors.append(error)
            if axis.rank != 0:
                # Only the first rank writes. Other ranks free the rows before the next table's rows arrive.
                tensors.clear()

        def write() -> None:
            if errors:
                raise errors[0]
            if axis.rank == 0:
                write_tensors(path, tensors)

        agreed(axis, write, "writing touched rows")
        if counts.evicted:
            # Evictions before this update have been forgotten.
            self.first_step = since
        return counts

    def _max_step(self) -> int:
        return max((step for m in self._modules.values() for step in m.built.steps()), default=0)

    def _next_mark(self) -> int:
        """Return the current update's number, for the rows it changes.

        It is greater than every value returned by ``step``.
        """
        # The maximum over tables is used because the step lags in a table frozen for a while.
        # With deferred updates, backward runs before the step counter increases.
        is_deferred = any(module.tables.collected is not None for module in self._modules.values())
        return max(self._max_step() + is_deferred, self._last_step + 1)

    def _check(self, since: int) -> None:
        """Raise ValueError if changes after ``since`` are not known."""
        if since < self.first_step:
            raise ValueError(
                f"rows are tracked since update {self.first_step}, but since={since} was requested. "
                "Export whole tables (export_safetensors), or pass a later step."
            )
        if any(self._modules[path].tables is not tables for path, tables in self._tables.items()):
            raise ValueError(
                "the model was resharded after tracking started. Export whole tables, and create a new "
                "tracker."
            )

    def _pieces(self, since: int, also: Mapping[str, Tensor]) -> list[tuple[str, "_LocalRows", int]]:
        """Return (parameter name, this rank's changed rows, embedding dim) for every tracked table."""
        changed = []
        for path, module in self._modules.items():
            names = list(module.fused_optimizer.params)
            for t, table in enumerate(module.built.routing.tables):
                name = next((param for param in names if param.split(".")[-2] == table.name), None)
                if name is None:
                    continue
                full = f"{path}.{name}" if path else name
                touched, extra_ids = self._touched[path], also.get(full)
                if table.mix_seed is not None:
                    local_rows = _hashed_rows(touched, t, since, self.step, extra_ids)
                else:
                    local_rows = _LocalRows(
                        [_fixed_rows(rows, keys, extra_ids) for rows, keys in touched.touched(t, since)], None
                    )
                changed.append((full, local_rows, table.dim))
        return changed


class Exported(NamedTuple):
    """Written row count by table, and evicted ID count by hashed table."""

    rows: dict[str, int]
    evicted: dict[str, int]


class _LocalRows(NamedTuple):
    """A rank's changed rows in table rectangles, and evicted IDs (None for a table with fixed rows)."""

    pieces: list[_Piece]
    evicted: Tensor | None


def _fixed_rows(rows: Table, keys: Tensor, extra_ids: Tensor | None) -> _Piece:
    """Return a fixed table's rows for the given keys, and for ``extra_ids`` in the rectangle."""
    _, r0, r1, c0, c1 = rows.rectangle
    if extra_ids is not None:
        keys = _union(keys, extra_ids, r0, r1)
    return keys, c0, c1, read_weights(rows, keys).cpu()


def _hashed_rows(
    touched: TouchedRows, table: int, since: int, now: int, extra_ids: Tensor | None
) -> _LocalRows:
    """Return this rank's changed rows and evicted IDs for a hashed table.

    Args:
        touched: record of updated rows.
        table: table number.
        since: return changes after this update.
        now: number of the last update.
        extra_ids: additional row IDs; IDs without a row are returned as evicted. None: none.
    """
    pieces, evicted = [], [torch.empty(0, dtype=torch.int64)]
    for (_, keys), (rows, evicted_keys) in zip(
        touched.touched(table, since), touched.evicted(table, since, now), strict=True
    ):
        r = rows.rectangle
        if extra_ids is not None:
            owed = mix(extra_ids, rows.storage.keys.seed)
            owed = owed[in_span(owed, (r.r0, r.r1))]
            alive = is_alive(rows, owed)
            keys, evicted_keys = (
                torch.cat([keys, owed[alive]]).unique(),
                torch.cat([evicted_keys, owed[~alive]]),
            )
        weights = rows.gather_parts(rows.slots.find(keys), r.columns, ["weight"])["weight"]
        pieces.append((rows.ids_of(keys), r.c0, r.c1, weights))
        evicted.append(rows.ids_of(evicted_keys))
    return _LocalRows(pieces, torch.cat(evicted))


def _union(keys: Tensor, extra_ids: Tensor, first: int, end: int) -> Tensor:
    """Return the distinct values from ``keys`` and from the extra IDs in [first, end), ascending."""
    inside = extra_ids[(extra_ids >= first) & (extra_ids < end)]
    united: Tensor = torch.cat([keys, inside.to(keys.device)]).unique()
    return united


def _assemble_table(name: str, pieces: list[_LocalRows], dim: int, counts: Exported) -> dict[str, Tensor]:
    """Combine a table's rows from all ranks into the output file tensors.

    Args:
        name: parameter name.
        pieces: changed rows by rank.
        dim: embedding dim.
        counts: receives the row and evicted ID counts.

    Returns:
        Tensors ``<name>.ids``, ``<name>.rows`` and ``<name>.gone``; see `export`. IDs and rows are missing if
        no row is exported, ``<name>.gone`` if the table is not hashed.
    """
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
    """Join row columns: return the distinct IDs [U], ascending, and rows [U, dim]."""
    ids = torch.cat([torch.empty(0, dtype=torch.int64), *(rows for rows, *_ in pieces)]).unique()
    dtype = pieces[0][3].dtype if pieces else torch.float32
    whole = torch.empty(len(ids), dim, dtype=dtype)
    for rows, c0, c1, values in pieces:
        whole[torch.searchsorted(ids, rows), c0:c1] = values
    return ids, whole


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file atomically."""
    with durable_file(path) as file:
        writer = FileWriter(file.fileno())
        writer.write(header_of({name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()}))
        for tensor in tensors.values():
            writer.write(memory_of(tensor))
