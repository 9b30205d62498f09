"""Table rows touched by training since a given step, for deltas."""

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
from meshrec.tables.table import Table, weights_at

# IDs [U], first and end column, rows [U, columns] of one rectangle.
_Piece = tuple[Tensor, int, int, Tensor]


class RowTracker:
    """Records which rows of a model's fused tables are touched by each update, from construction on.

    Costs 4 bytes per row, plus a store per ID in every backward pass. Updates are numbered by the optimizer
    step (the maximum ``"step"`` over all tables), which checkpoints contain.

    Args:
        model: model to track; a model can have a single tracker.

    Attributes:
        first_step: earliest update number accepted by `export`.
    """

    def __init__(self, model: DistributedModelParallel) -> None:
        self._modules = model.sharded_modules
        self._tables = {path: module.tables for path, module in self._modules.items()}
        self._touched = {
            path: TouchedRows(module.tables, module.built.fused, self._now)
            for path, module in self._modules.items()
        }
        self._last_step = -1
        self.first_step = self.step

    @property
    def step(self) -> int:
        """Last update number."""
        # Never decreases: loading an older state must not reuse earlier numbers.
        self._last_step = max(self._last_step, self._last())
        return self._last_step

    @property
    def names(self) -> list[str]:
        """Tracked parameter names."""
        return [
            f"{path}.{name}" if path else name
            for path, module in self._modules.items()
            for name in module.fused_optimizer.params
        ]

    def export(self, path: str | Path, *, since: int, also: Mapping[str, Tensor] | None = None) -> "Exported":
        """Write the rows touched after update ``since`` to a safetensors file. Collective, between steps.

        For every touched table, the file contains ``<name>.ids``, int64 [U], ascending, and ``<name>.rows``
        [U, D]. Rows have all columns under any plan: the first rank assembles and writes them. For each
        hashed table it also contains ``<name>.gone``, int64 [G]: IDs evicted and not admitted again.
        Evictions before ``since`` are forgotten, so later calls must not pass an earlier ``since``.

        Args:
            path: output file.
            since: tracked update number, or `first_step`.
            also: additional row IDs by table name; equal on all ranks.

        Returns:
            Row and eviction counts per table.

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
                tensors |= _assembled(name, rows_by_rank, dim, counts)
            except Exception as error:  # raised on all ranks by `write` below
                errors.append(error)
            if axis.rank != 0:
                # Only the first rank writes; the other ranks free a table's rows before the next table
                # arrives.
                tensors.clear()

        def write() -> None:
            if errors:
                raise errors[0]
            if axis.rank == 0:
                write_tensors(path, tensors)

        agreed(axis, write, "writing touched rows")
        if counts.evicted:
            # The trackers have dropped evictions before this update.
            self.first_step = since
        return counts

    def _last(self) -> int:
        return max((step for m in self._modules.values() for step in m.built.steps()), default=0)

    def _now(self) -> int:
        """Return the mark for rows touched now; greater than every update number reported so far.

        A frozen table counts fewer updates than other tables, so the table's local step is not usable.
        """
        # With deferred updates, backward runs before the step counter increases.
        is_deferred = any(module.tables.collected is not None for module in self._modules.values())
        return max(self._last() + is_deferred, self._last_step + 1)

    def _check(self, since: int) -> None:
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
        """Return this rank's rows to export per tracked table, as (parameter name, rows, embedding dim)."""
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
                    local_rows = _hashed(touched, t, since, self.step, extra_ids)
                else:
                    local_rows = _LocalRows(
                        [_piece(rows, keys, extra_ids) for rows, keys in touched.touched(t, since)], None
                    )
                changed.append((full, local_rows, table.dim))
        return changed


class Exported(NamedTuple):
    """Rows written per table, and evicted IDs per hashed table."""

    rows: dict[str, int]
    evicted: dict[str, int]


class _LocalRows(NamedTuple):
    """This rank's part of a table: rows by rectangle, and evicted IDs (None for a fixed table)."""

    pieces: list[_Piece]
    evicted: Tensor | None


def _piece(rows: Table, keys: Tensor, extra_ids: Tensor | None) -> _Piece:
    _, r0, r1, c0, c1 = rows.rectangle
    if extra_ids is not None:
        keys = _united(keys, extra_ids, r0, r1)
    return keys, c0, c1, weights_at(rows, keys).cpu()


def _hashed(touched: TouchedRows, table: int, since: int, now: int, extra_ids: Tensor | None) -> _LocalRows:
    pieces, evicted = [], [torch.empty(0, dtype=torch.int64)]
    for (_, keys), (rows, evicted_keys) in zip(
        touched.touched(table, since), touched.evicted(table, since, now), strict=True
    ):
        r = rows.rectangle
        if extra_ids is not None:
            # Extra IDs may have been evicted since: those are reported as evicted.
            owed = mix(extra_ids, rows.storage.keys.seed)
            owed = owed[in_span(owed, (r.r0, r.r1))]
            alive = is_alive(rows, owed)
            keys, evicted_keys = (
                torch.cat([keys, owed[alive]]).unique(),
                torch.cat([evicted_keys, owed[~alive]]),
            )
        weights = rows.gathered(rows.slots.find(keys), r.columns, ["weight"])["weight"]
        pieces.append((rows.ids_of(keys), r.c0, r.c1, weights))
        evicted.append(rows.ids_of(evicted_keys))
    return _LocalRows(pieces, torch.cat(evicted))


def _united(keys: Tensor, extra_ids: Tensor, first: int, end: int) -> Tensor:
    inside = extra_ids[(extra_ids >= first) & (extra_ids < end)]
    united: Tensor = torch.cat([keys, inside.to(keys.device)]).unique()
    return united


def _assembled(name: str, pieces: list[_LocalRows], dim: int, counts: Exported) -> dict[str, Tensor]:
    """Assemble a table's tensors for the output file.

    Args:
        name: parameter name.
        pieces: part of the table per rank.
        dim: embedding dim.
        counts: receives the numbers of rows and of evicted IDs.

    Returns:
        Tensors ``<name>.ids``, ``<name>.rows`` and ``<name>.gone``; see `export`. IDs and rows are missing if
        no row is exported, ``<name>.gone`` if the table is not hashed.
    """
    ids, rows = _joined([piece for local_rows in pieces for piece in local_rows.pieces], dim)
    tensors: dict[str, Tensor] = {}
    if len(ids):
        counts.rows[name] = len(ids)
        tensors = {f"{name}.ids": ids, f"{name}.rows": rows}
    if evicted := [local_rows.evicted for local_rows in pieces if local_rows.evicted is not None]:
        evicted_ids = tensors[f"{name}.gone"] = torch.cat(evicted).unique()
        counts.evicted[name] = len(evicted_ids)
    return tensors


def _joined(pieces: list[_Piece], dim: int) -> tuple[Tensor, Tensor]:
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
