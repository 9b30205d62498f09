"""The rows of tables that training has touched since a step, for deltas."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from meshrec.checkpoint.agreement import agreed, ranks_of
from meshrec.checkpoint.blocks import FileWriter, memory_of
from meshrec.checkpoint.data_file import header_of
from meshrec.comms.collectives import gather_objects
from meshrec.distributed.touched_rows import TouchedRows
from meshrec.durable import durable_file
from meshrec.model_parallel import DistributedModelParallel
from meshrec.tables.table import weights_at

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
        for module in self._modules.values():
            for table in module.built.routing.tables:
                if table.mix_seed is not None:
                    raise ValueError(
                        f"table {table.name!r} has hashed keys, whose rows are not published in deltas yet. "
                        "Save checkpoints for its readers instead."
                    )
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

    def export(
        self, path: str | Path, *, since: int, also: Mapping[str, Tensor] | None = None
    ) -> dict[str, int]:
        """Write the rows touched after update ``since`` to a safetensors file; return their number by table.

        Collective, between steps. The file has, for each touched table, ``<name>.ids``, int64 [U], ascending,
        and ``<name>.rows`` [U, D]. Rows are whole under any plan: the first rank assembles and writes them.

        Args:
            path: the file.
            since: the number of a tracked update, or `first_step`.
            also: IDs of further rows, by the table's name; equal on all ranks.

        Raises:
            ValueError: ``since`` is before tracking began, or the model was resharded; raised on every rank.
        """
        axis, path = ranks_of(None), Path(path)
        agreed(axis, lambda: self._check(since), "exporting touched rows")
        counts: dict[str, int] = {}
        found: dict[str, Tensor] = {}
        for name, pieces, dim in self._pieces(since, also or {}):
            everyone = gather_objects(pieces, axis, "touched rows")
            ids, rows = _joined([piece for of_rank in everyone for piece in of_rank], dim)
            if len(ids):
                counts[name] = len(ids)
                if axis.rank == 0:
                    found |= {f"{name}.ids": ids, f"{name}.rows": rows}
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

    def _pieces(self, since: int, also: Mapping[str, Tensor]) -> list[tuple[str, list[_Piece], int]]:
        """Return, by table, this rank's touched rows: global IDs, first column, last column + 1, and
        values.
        """
        found = []
        for path, module in self._modules.items():
            names = list(module.fused_optimizer.params)
            for t, table in enumerate(module.built.routing.tables):
                name = next((each for each in names if each.split(".")[-2] == table.name), None)
                if name is None:
                    continue
                full = f"{path}.{name}" if path else name
                pieces = []
                for rows, keys in self._touched[path].touched(t, since):
                    _, r0, r1, c0, c1 = rows.rectangle
                    if full in also:
                        keys = _united(keys, also[full], r0, r1)
                    pieces.append((keys, c0, c1, weights_at(rows, keys).cpu()))
                found.append((full, pieces, table.dim))
        return found


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
