"""The rows of tables that training has touched since a step, for deltas."""

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
from meshrec.tables.table import TableRows, weights_at
from meshrec.tables.waiting import in_span

_Piece = tuple[Tensor, int, int, Tensor]


class RowTracker:
    """Records, from now on, which rows of a model's fused tables each update touches.

    It takes four bytes per row, and one store for each ID in each backward pass. Updates have the optimizer's
    numbers (the largest ``"step"`` of all tables), which a checkpoint stores.

    Args:
        model: the model to watch. It can have one tracker at a time.
    """

    def __init__(self, model: DistributedModelParallel) -> None:
        self._modules = model.sharded_modules
        self._tables = {path: module.tables for path, module in self._modules.items()}
        self._touched = {
            path: TouchedRows(module.tables, module.built.fused, self._now)
            for path, module in self._modules.items()
        }
        self._told = -1
        self.first_step = self.step
        """The update after which tracking began."""

    @property
    def step(self) -> int:
        """The number of the last update."""
        self._told = max(self._told, self._last())
        return self._told

    @property
    def names(self) -> list[str]:
        """The names of the tracked parameters."""
        return [
            f"{path}.{name}" if path else name
            for path, module in self._modules.items()
            for name in module.fused_optimizer.params
        ]

    def export(self, path: str | Path, *, since: int, also: Mapping[str, Tensor] | None = None) -> "Exported":
        """Write the rows touched after update ``since`` to a safetensors file.

        Collective, between steps. The file has, for each touched table, ``<name>.ids``, int64 [U], ascending,
        and ``<name>.rows`` [U, D]. Rows are whole under any plan: the first rank assembles and writes them.
        For each hashed table it has ``<name>.gone``, the IDs that were evicted and are not back, int64 [G].
        Evictions before ``since`` are forgotten, so that later calls cannot ask for them.

        Args:
            path: the file.
            since: the number of a tracked update, or `first_step`.
            also: IDs of further rows, by the table's name; equal on all ranks.

        Raises:
            ValueError: ``since`` is before tracking began, or the model was resharded; raised on every rank.
        """
        axis, path = ranks_of(None), Path(path)
        agreed(axis, lambda: self._check(since), "exporting touched rows")
        counts = Exported({}, {})
        found: dict[str, Tensor] = {}
        for name, own, dim in self._pieces(since, also or {}):
            everyone = gather_objects(own, axis, "touched rows")
            ids, rows = _joined([piece for each in everyone for piece in each.pieces], dim)
            gone = [each.gone for each in everyone if each.gone is not None]
            if len(ids):
                counts.rows[name] = len(ids)
                if axis.rank == 0:
                    found |= {f"{name}.ids": ids, f"{name}.rows": rows}
            if gone:
                left = torch.cat(gone).unique()
                counts.gone[name] = len(left)
                self.first_step = since
                if axis.rank == 0:
                    found[f"{name}.gone"] = left
        agreed(axis, lambda: write_tensors(path, found) if axis.rank == 0 else None, "writing touched rows")
        return counts

    def _last(self) -> int:
        return max((step for m in self._modules.values() for step in m.built.steps()), default=0)

    def _now(self) -> int:
        """Return the mark for rows that are touched now: larger than the number of any update reported so
        far.

        A table that was frozen for a while counts fewer updates than others, so its own step cannot be used.
        """
        is_deferred = any(module.tables.collected is not None for module in self._modules.values())
        return max(self._last() + is_deferred, self._told + 1)

    def _check(self, since: int) -> None:
        if since < self.first_step:
            raise ValueError(
                f"rows are tracked from update {self.first_step} on, and those since {since} are asked for. "
                "Export the whole tables (export_safetensors), or ask for a later step."
            )
        if any(self._modules[path].tables is not tables for path, tables in self._tables.items()):
            raise ValueError(
                "the model was resharded since tracking began. Export the whole tables, and make a new "
                "tracker."
            )

    def _pieces(self, since: int, also: Mapping[str, Tensor]) -> list[tuple[str, "_Own", int]]:
        """Return what this rank has of each table that changed, by the name of its parameter."""
        found = []
        for path, module in self._modules.items():
            names = list(module.fused_optimizer.params)
            for t, table in enumerate(module.built.routing.tables):
                name = next((each for each in names if each.split(".")[-2] == table.name), None)
                if name is None:
                    continue
                full = f"{path}.{name}" if path else name
                touched, others = self._touched[path], also.get(full)
                if table.mix_seed is not None:
                    own = _hashed(touched, t, since, self.step, others)
                else:
                    own = _Own([_piece(rows, keys, others) for rows, keys in touched.touched(t, since)], None)
                found.append((full, own, table.dim))
        return found


class Exported(NamedTuple):
    """The number of written rows of each table, and of evicted IDs (``gone``) of each hashed table."""

    rows: dict[str, int]
    gone: dict[str, int]


class _Own(NamedTuple):
    """A rank's part of a changed table: its rows, and the IDs that were evicted (None for a fixed table)."""

    pieces: list[_Piece]
    gone: Tensor | None


def _piece(rows: TableRows, keys: Tensor, others: Tensor | None) -> _Piece:
    _, r0, r1, c0, c1 = rows.rectangle
    if others is not None:
        keys = _united(keys, others, r0, r1)
    return keys, c0, c1, weights_at(rows, keys).cpu()


def _hashed(touched: TouchedRows, table: int, since: int, now: int, others: Tensor | None) -> _Own:
    pieces, gone = [], [torch.empty(0, dtype=torch.int64)]
    for (_, keys), (rows, left) in zip(
        touched.touched(table, since), touched.gone(table, since, now), strict=True
    ):
        r = rows.rectangle
        if others is not None:
            owed = mix(others, rows.storage.keys.seed)
            owed = owed[in_span(owed, (r.r0, r.r1))]
            alive = is_alive(rows, owed)
            keys, left = torch.cat([keys, owed[alive]]).unique(), torch.cat([left, owed[~alive]])
        weights = rows.gathered(rows.slots.find(keys), r.columns, ["weight"])["weight"]
        pieces.append((rows.ids_of(keys), r.c0, r.c1, weights))
        gone.append(rows.ids_of(left))
    return _Own(pieces, torch.cat(gone))


def _united(keys: Tensor, others: Tensor, first: int, end: int) -> Tensor:
    inside = others[(others >= first) & (others < end)]
    united: Tensor = torch.cat([keys, inside.to(keys.device)]).unique()
    return united


def _joined(pieces: list[_Piece], dim: int) -> tuple[Tensor, Tensor]:
    ids = torch.cat([torch.empty(0, dtype=torch.int64), *(rows for rows, *_ in pieces)]).unique()
    dtype = pieces[0][3].dtype if pieces else torch.float32
    whole = torch.empty(len(ids), dim, dtype=dtype)
    for rows, c0, c1, values in pieces:
        whole[torch.searchsorted(ids, rows), c0:c1] = values
    return ids, whole


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file. It appears only when it is complete."""
    with durable_file(path) as file:
        writer = FileWriter(file.fileno())
        writer.write(header_of({name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()}))
        for tensor in tensors.values():
            writer.write(memory_of(tensor))
