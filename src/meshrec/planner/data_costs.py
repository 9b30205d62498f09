"""Memory, disk and time for data of a given size, predicted from costs per unit that were measured.

The costs are those of ``docs/guides/how-big.md``; a test compares them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

GIB = 1 << 30


class UnitCost(NamedTuple):
    """Cost per unit of a resource, and up to which size it was measured. A row of the page "How big"."""

    memory: float = 0.0
    """Bytes."""
    disk: float = 0.0
    """Bytes."""
    once: float = 0.0
    """Seconds before the first step of the first run."""
    start: float = 0.0
    """Seconds before the first step of every run."""
    step: float = 0.0
    """Seconds per pass, or per evaluation."""
    largest: float = 0.0
    """Largest count that was tried."""


COSTS = {
    "log row, with `histories`": UnitCost(disk=29, once=0.35e-6, largest=200e6),
    "log row, in memory": UnitCost(memory=150, start=0.55e-6, largest=8e6),
    "user in a log": UnitCost(memory=24, disk=54, largest=10e6),
    "item in a log, besides its embedding row": UnitCost(memory=166, disk=25, largest=2.2e6),
    "user x item in an evaluation": UnitCost(step=0.004e-6, largest=4.7e9),
    "table row, `train`": UnitCost(memory=4, step=0.8e-6, largest=16e6),
    "table row, fitting": UnitCost(once=0.35e-6, largest=8e6),
    "vocabulary value, integer": UnitCost(memory=28, once=0.9e-6, largest=16e6),
    "vocabulary value, text": UnitCost(memory=36, once=1.5e-6, largest=16e6),
    "embedding row": UnitCost(once=0.7e-6, largest=4e6),
}
"""Measured costs by resource. Embedding rows have memory by width and optimizer, see `DataSize`."""
TRAINING_BYTES = {"log": 1.2e9, "table": 1.4e9}
"""Memory of a rank that trains on little data: the process, and the batches of the page's examples."""
_BUILD_BYTES = 32
"""Disk per log row while histories are built, in addition to the folder."""
_CHECKPOINTS = 4
"""Checkpoints on disk: three are kept by default, while another one is written."""
_IDS = ("items", "values", "text_values")
"""Counts with which embedding tables grow."""


@dataclass(frozen=True, kw_only=True)
class DataSize:
    """Size of data and model, from which `predict` computes memory and time.

    Args:
        users: users in a log; None: the data is a table.
        items: items in a log; None: the data is a table.
        table_rows: rows of all embedding tables; None: one per item, or per value.
        row_bytes: bytes of an embedding row with its optimizer state.
        in_histories: whether a log is sorted into a folder, not in memory.
        samples: training samples per epoch; None: one per row.
        evaluated_users: users with whom a log is evaluated, in each evaluation; None: all.
        samples_per_second: training speed of one rank; None: unknown.
    """

    rows: int
    users: int | None = None
    items: int | None = None
    values: int = 0
    text_values: int = 0
    table_rows: int | None = None
    row_bytes: float
    in_histories: bool = True
    samples: int | None = None
    epochs: int = 1
    evaluated_users: int | None = 20_000
    samples_per_second: float | None = None

    @property
    def is_log(self) -> bool:
        """Whether the data is a log of users and items."""
        return self.users is not None

    @property
    def num_table_rows(self) -> int:
        """Total row count of all embedding tables."""
        if self.table_rows is not None:
            return self.table_rows
        return self.items if self.items is not None else self.values + self.text_values


class Prediction(NamedTuple):
    """Predicted cost of one resource. Memory is in bytes per rank, times are in seconds."""

    resource: str
    num: float
    """Number of units."""
    memory: float
    disk: float
    before: float
    """Time before the first step of the first run."""
    start: float
    """Time before the first step of later runs."""
    training: float
    """Time of all epochs, with one evaluation per epoch."""
    basis: str
    """Whether the cost was measured up to this size, or how much larger the size is than the largest one."""


def predict(size: DataSize, ranks: int) -> list[Prediction]:
    """Predict memory, disk and time for each resource.

    Sharded tables are divided among ranks, as are reading, training and evaluation. Logs in memory and
    vocabularies are on every rank.
    """
    parts = [_process(size, ranks)]
    if size.users is not None and size.items is not None:
        rows = "log row, with `histories`" if size.in_histories else "log row, in memory"
        evaluated = min(size.users, size.evaluated_users or size.users)
        parts += [
            _cost(rows, size.rows, size, ranks),
            _cost("user in a log", size.users, size, ranks),
            _cost("item in a log, besides its embedding row", size.items, size, ranks),
            _cost("user x item in an evaluation", evaluated * size.items, size, ranks),
        ]
    else:
        parts += [
            _cost("table row, fitting", size.rows, size, ranks),
            _cost("table row, `train`", size.rows, size, ranks),
            _cost("vocabulary value, integer", size.values, size, ranks),
            _cost("vocabulary value, text", size.text_values, size, ranks),
        ]
    tables = _cost("embedding row", size.num_table_rows, size, ranks)
    num_bytes = size.num_table_rows * size.row_bytes
    parts.append(tables._replace(memory=num_bytes / ranks, disk=_CHECKPOINTS * num_bytes))
    if size.samples_per_second is not None:
        samples = size.epochs * (size.rows if size.samples is None else size.samples)
        seconds = samples / (size.samples_per_second * ranks)
        basis = _basis(ranks, 1)
        parts.append(Prediction("training sample", samples, 0, 0, 0, 0, seconds, basis))
    return [part for part in parts if part.num]


def total(parts: list[Prediction]) -> Prediction:
    """Return the sum of predictions."""
    names = ("memory", "disk", "before", "start", "training")
    sums = {name: sum(getattr(part, name) for part in parts) for name in names}
    are_measured = all(part.basis == "measured" for part in parts)
    return Prediction("total", 0, **sums, basis="measured" if are_measured else "partly extrapolated")


def as_json(size: DataSize, ranks: int) -> dict[str, Any]:
    """Return the predictions and their sum as JSON types; bytes and seconds."""
    parts = predict(size, ranks)
    return {
        "ranks": ranks,
        "size": {**vars(size), "table_rows": size.num_table_rows},
        "resources": [part._asdict() for part in parts],
        "total": total(parts)._asdict(),
        "build_disk": build_disk(size),
    }


def build_disk(size: DataSize) -> float:
    """Return the bytes of disk that building the histories needs for a while, in addition to the folder."""
    return _BUILD_BYTES * size.rows if size.is_log and size.in_histories else 0.0


def with_counts(size: DataSize, counts: Mapping[str, Any]) -> DataSize:
    """Return a size with other counts. Counts that follow from the rows grow with them."""
    if size.samples is not None and "rows" in counts and "samples" not in counts:
        size = replace(size, samples=round(size.samples * counts["rows"] / size.rows))
    if size.table_rows is not None and "table_rows" not in counts:
        # More rows alone need not have more IDs, so tables grow only with the counts of IDs.
        before = (size.items or 0) + size.values + size.text_values
        ids: dict[str, Any] = {name: counts[name] for name in _IDS if name in counts}
        changed = replace(size, **ids)
        after = (changed.items or 0) + changed.values + changed.text_values
        if before:
            size = replace(size, table_rows=round(size.table_rows * after / before))
    return replace(size, **counts)


def _process(size: DataSize, ranks: int) -> Prediction:
    memory = TRAINING_BYTES["log" if size.is_log else "table"]
    return Prediction("rank that trains, with its batches", ranks, memory, 0, 0, 0, 0, _basis(ranks, 1))


def _cost(name: str, count: int, size: DataSize, ranks: int) -> Prediction:
    """Return the cost of a resource by `COSTS`, for one rank."""
    cost = COSTS[name]
    # All ranks wait while rank 0 builds the histories. Fitting and later work is divided.
    share = 1 if name.startswith("log row") else ranks
    return Prediction(
        name,
        count,
        memory=count * cost.memory,
        disk=0 if name == "user in a log" and not size.in_histories else count * cost.disk,
        before=count * (cost.once + cost.start) / share,
        start=count * cost.start,
        training=size.epochs * count * cost.step / ranks,
        basis=_basis(count, cost.largest),
    )


def _basis(count: float, largest: float) -> str:
    return "measured" if count <= largest else f"extrapolated {count / largest:,.1f}x"
