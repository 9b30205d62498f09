"""Sharding plans: which rank holds which rectangle (row range and column range) of which table.

Plans are written by hand (``plan.builders``) or by the planner, validated (``plan.checks``), and read when a
module is sharded. A plan's ranks are indices on the mesh's ``shard`` axis. If the mesh has a ``replicate``
axis, all replica groups follow the same plan.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple


class ShardingType(Enum):
    """How a table is split.

    The type describes the split for the planner and for display. Sharded modules use only the rectangles (row
    and column ranges).
    """

    # The values are those of TorchRec: JSON plans are readable in both libraries.
    DATA_PARALLEL = "data_parallel"
    TABLE_WISE = "table_wise"
    COLUMN_WISE = "column_wise"
    ROW_WISE = "row_wise"
    TABLE_ROW_WISE = "table_row_wise"
    TABLE_COLUMN_WISE = "table_column_wise"
    GRID_SHARD = "grid_shard"


class EmbeddingComputeKernel(Enum):
    """How a table is updated.

    A plan for an unsharded model has the kernels that its author expects. The plan of a sharded module has
    the kernels in use, which depend on the tables' optimizers.
    """

    DENSE = "dense"
    """By a torch optimizer, from autograd's gradients."""
    FUSED = "fused"
    """By a fused optimizer, from the gradients of looked-up rows only."""
    QUANT = "quant"
    """Never: the table is quantized."""


class TableSize(NamedTuple):
    """Number of rows and columns of an unsharded table."""

    num_embeddings: int
    embedding_dim: int


@dataclass(frozen=True, kw_only=True)
class RemoteDevice:
    """Location of a rectangle (row range and column range of a table).

    It has the rank on the mesh's ``shard`` axis, and the device type on that rank.
    """

    rank: int
    device: str = "cpu"

    def __str__(self) -> str:
        return f"rank:{self.rank}/{self.device}"


@dataclass(frozen=True, kw_only=True)
class ShardMetadata:
    """Rectangle of a table (row range and column range), and the rank which holds it."""

    shard_offsets: tuple[int, int]  # first row, first column
    shard_sizes: tuple[int, int]  # number of rows, number of columns
    placement: RemoteDevice

    @property
    def rows(self) -> tuple[int, int]:
        """Row range (first, end); ``end`` is not included."""
        return self.shard_offsets[0], self.shard_offsets[0] + self.shard_sizes[0]

    @property
    def columns(self) -> tuple[int, int]:
        """Column range (first, end); ``end`` is not included."""
        return self.shard_offsets[1], self.shard_offsets[1] + self.shard_sizes[1]

    def __str__(self) -> str:
        (r0, r1), (c0, c1) = self.rows, self.columns
        return f"[{r0}:{r1}, {c0}:{c1}]@{self.placement.rank}"


@dataclass(frozen=True, kw_only=True)
class EnumerableShardingSpec:
    """All rectangles (row range and column range) into which a table is split."""

    shards: tuple[ShardMetadata, ...]


@dataclass(frozen=True, kw_only=True)
class ParameterSharding:
    """Sharding of a table: the sharding type, how rows are updated, and which rank holds which rectangle.

    A rectangle is a row range and column range of the table.
    """

    sharding_type: ShardingType
    compute_kernel: EmbeddingComputeKernel = EmbeddingComputeKernel.FUSED
    ranks: tuple[int, ...] | None = None  # owner per rectangle, in order; None if data-parallel: all ranks
    sharding_spec: EnumerableShardingSpec | None = None  # None if data-parallel

    @property
    def shards(self) -> tuple[ShardMetadata, ...]:
        """All rectangles (row and column ranges) of the table; empty for a data-parallel table."""
        return self.sharding_spec.shards if self.sharding_spec is not None else ()

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON types. A shard is [first row, first column, rows, columns, rank, device]."""
        return {
            "sharding_type": self.sharding_type.value,
            "compute_kernel": self.compute_kernel.value,
            "ranks": None if self.ranks is None else list(self.ranks),
            "shards": [
                [*s.shard_offsets, *s.shard_sizes, s.placement.rank, s.placement.device] for s in self.shards
            ],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "ParameterSharding":
        """Create a sharding from the result of ``to_dict``.

        Raises:
            ValueError: The sharding type or compute kernel is unknown.
        """
        shards = tuple(
            ShardMetadata(
                shard_offsets=(r0, c0),
                shard_sizes=(rows, columns),
                placement=RemoteDevice(rank=rank, device=device),
            )
            for r0, c0, rows, columns, rank, device in data["shards"]
        )
        ranks = data["ranks"]
        return cls(
            sharding_type=ShardingType(data["sharding_type"]),
            compute_kernel=EmbeddingComputeKernel(data["compute_kernel"]),
            ranks=None if ranks is None else tuple(ranks),
            # Restores None for data-parallel tables, whose JSON has an empty list.
            sharding_spec=EnumerableShardingSpec(shards=shards) if shards else None,
        )

    def digest(self) -> str:
        """Return a hash of all fields except device types, which may differ between ranks."""
        data = self.to_dict()
        # The first five values are offsets, sizes and rank; the sixth is the device type.
        data["shards"] = [shard[:5] for shard in data["shards"]]
        return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


class EmbeddingModuleShardingPlan(dict[str, ParameterSharding]):
    """Plan for an embedding module: sharding by table name."""

    def with_kernels(self, kernels: Mapping[str, EmbeddingComputeKernel]) -> "EmbeddingModuleShardingPlan":
        """Return a copy with other compute kernels. ``kernels`` has the kernel of every table, by name."""
        return EmbeddingModuleShardingPlan(
            {table: replace(sharding, compute_kernel=kernels[table]) for table, sharding in self.items()}
        )

    def __str__(self) -> str:
        rows = [("table", "sharding type", "kernel", "ranks", "rectangles [rows, columns]@rank")]
        for table, sharding in self.items():
            ranks = "all" if sharding.ranks is None else ",".join(map(str, sharding.ranks))
            shards = " ".join(map(str, sharding.shards)) or "whole on every rank"
            rows.append((table, sharding.sharding_type.value, sharding.compute_kernel.value, ranks, shards))
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        return "\n".join(
            "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[4]])
            for row in rows
        )


@dataclass(frozen=True)
class ShardingPlan:
    """Plan for a model: plans of all embedding modules, by module path.

    Args:
        plan: plan by module path, as in ``model.named_modules()``; "" is the model itself.
    """

    plan: dict[str, EmbeddingModuleShardingPlan] = field(default_factory=dict)

    def get_plan_for_module(self, module_path: str) -> EmbeddingModuleShardingPlan | None:
        """Return the plan for ``module_path``, as in ``model.named_modules()``, or None."""
        return self.plan.get(module_path)

    def tables(self) -> Iterator[tuple[str, str, ParameterSharding]]:
        """Yield (module path, table name, sharding) for every table in the plan."""
        for path, module_plan in self.plan.items():
            for table, sharding in module_plan.items():
                yield path, table, sharding

    def digest(self) -> str:
        """Return a hash of all shardings, independent of the order of modules and tables."""
        # Sorted, because ranks may build modules in different orders.
        parts = sorted(f"{path}\n{table}\n{sharding.digest()}" for path, table, sharding in self.tables())
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    def to_json(self) -> str:
        """Serialize as JSON."""
        plan = {path: {t: s.to_dict() for t, s in tables.items()} for path, tables in self.plan.items()}
        # Increase the version on incompatible changes, because from_json rejects other versions.
        return json.dumps({"version": 1, "plan": plan}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> "ShardingPlan":
        """Parse ``to_json`` output.

        Raises:
            ValueError: The JSON is not a plan, or has another version.
        """
        data = json.loads(text)
        if not isinstance(data, dict) or data.get("version") != 1:
            got = data.get("version") if isinstance(data, dict) else type(data).__name__
            raise ValueError(
                f"not a sharding plan of version 1: got version {got!r}. Write plans with "
                "ShardingPlan.to_json()."
            )
        return cls(
            {
                path: EmbeddingModuleShardingPlan(
                    {table: ParameterSharding.from_dict(sharding) for table, sharding in tables.items()}
                )
                for path, tables in data["plan"].items()
            }
        )

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON, replacing an existing file."""
        Path(path).write_text(self.to_json())

    @classmethod
    def load(cls, path: str | Path) -> "ShardingPlan":
        """Read a plan file.

        Raises:
            ValueError: The file is not a sharding plan.
        """
        try:
            return cls.from_json(Path(path).read_text())
        # JSON with another structure fails in many ways; the user needs to know only that it is not a plan.
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(
                f"{path} is not a sharding plan; name a file that `meshrec plan --out` wrote. Cause: {error}"
            ) from error

    def __str__(self) -> str:
        return "\n\n".join(
            f"module: {path or '(the model itself)'}\n{plan}" for path, plan in self.plan.items()
        )
