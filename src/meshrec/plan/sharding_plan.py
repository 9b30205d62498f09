"""Sharding plans: which rectangle of which table lives on which rank.

A plan is data only. It is made by hand (``distributed.plan_builders``) or by the planner, verified here, and
read once, when a module is sharded. Ranks are positions on the mesh's ``shard`` axis: with a ``replicate``
axis every replica group follows the same plan.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple


class ShardingType(Enum):
    """The way to split a table. Only the planner uses these words; at run time there are rectangles."""

    DATA_PARALLEL = "data_parallel"
    TABLE_WISE = "table_wise"
    COLUMN_WISE = "column_wise"
    ROW_WISE = "row_wise"
    TABLE_ROW_WISE = "table_row_wise"
    TABLE_COLUMN_WISE = "table_column_wise"
    GRID_SHARD = "grid_shard"


class EmbeddingComputeKernel(Enum):
    """The way to update a table.

    ``dense``: by autograd's ordinary gradients; ``fused``: in the backward pass; ``quant``: never. A plan
    that was made beforehand has the kernel that its maker assumed. The plan of a sharded module has the
    kernel that runs, which the attached optimizer decides.
    """

    DENSE = "dense"
    FUSED = "fused"
    QUANT = "quant"


class TableSize(NamedTuple):
    """Rows and columns of a whole table."""

    num_embeddings: int
    embedding_dim: int


@dataclass(frozen=True, kw_only=True)
class RemoteDevice:
    """The place of a rectangle: a rank of the ``shard`` axis, and the type of its device."""

    rank: int
    device: str = "cpu"

    def __str__(self) -> str:
        return f"rank:{self.rank}/{self.device}"


@dataclass(frozen=True, kw_only=True)
class ShardMetadata:
    """One rectangle: first row and column, number of rows and columns, and its rank."""

    shard_offsets: tuple[int, int]
    shard_sizes: tuple[int, int]
    placement: RemoteDevice

    @property
    def rows(self) -> tuple[int, int]:
        """The rows as a half-open interval."""
        return self.shard_offsets[0], self.shard_offsets[0] + self.shard_sizes[0]

    @property
    def columns(self) -> tuple[int, int]:
        """The columns as a half-open interval."""
        return self.shard_offsets[1], self.shard_offsets[1] + self.shard_sizes[1]

    def __str__(self) -> str:
        (r0, r1), (c0, c1) = self.rows, self.columns
        return f"[{r0}:{r1}, {c0}:{c1}]@{self.placement.rank}"


@dataclass(frozen=True, kw_only=True)
class EnumerableShardingSpec:
    """The rectangles of one table."""

    shards: tuple[ShardMetadata, ...]


@dataclass(frozen=True, kw_only=True)
class ParameterSharding:
    """The placement of one table.

    ``ranks``: the ranks that hold a part of it, in the order of the rectangles; for ``DATA_PARALLEL`` all
    ranks, which is written as None, with no ``sharding_spec``.
    """

    sharding_type: ShardingType
    compute_kernel: EmbeddingComputeKernel = EmbeddingComputeKernel.FUSED
    ranks: tuple[int, ...] | None = None
    sharding_spec: EnumerableShardingSpec | None = None

    @property
    def shards(self) -> tuple[ShardMetadata, ...]:
        """The rectangles; none for a data-parallel table."""
        return self.sharding_spec.shards if self.sharding_spec is not None else ()

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types. A shard is [first row, first column, rows, columns, rank, device]."""
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
        """Make a placement from what ``to_dict`` returned.

        Raises:
            ValueError: the sharding type or the compute kernel is unknown.
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
            sharding_spec=EnumerableShardingSpec(shards=shards) if shards else None,
        )

    def digest(self) -> str:
        """Return a hash of what all ranks must agree on; the type of device may differ."""
        data = self.to_dict()
        data["shards"] = [shard[:5] for shard in data["shards"]]
        return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


class EmbeddingModuleShardingPlan(dict[str, ParameterSharding]):
    """The placement of every table of one module: table name -> ``ParameterSharding``."""

    def with_kernels(self, kernels: Mapping[str, EmbeddingComputeKernel]) -> "EmbeddingModuleShardingPlan":
        """Return the same placement with the given kernel for each table."""
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
    """The placement of every table of a model: path of a module in the model -> plan of that module."""

    plan: dict[str, EmbeddingModuleShardingPlan] = field(default_factory=dict)

    def get_plan_for_module(self, module_path: str) -> EmbeddingModuleShardingPlan | None:
        """Return the plan of the module at ``module_path``, as in ``model.named_modules()``, or None."""
        return self.plan.get(module_path)

    def tables(self) -> Iterator[tuple[str, str, ParameterSharding]]:
        """Yield (module path, table, placement) of all tables."""
        for path, module_plan in self.plan.items():
            for table, sharding in module_plan.items():
                yield path, table, sharding

    def digest(self) -> str:
        """Return a hash that is equal for two plans if and only if they place every table alike.

        The order of tables does not matter.
        """
        parts = sorted(f"{path}\n{table}\n{sharding.digest()}" for path, table, sharding in self.tables())
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    def to_json(self) -> str:
        """Return the plan as JSON text."""
        plan = {path: {t: s.to_dict() for t, s in tables.items()} for path, tables in self.plan.items()}
        return json.dumps({"version": 1, "plan": plan}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> "ShardingPlan":
        """Read what ``to_json`` wrote.

        Raises:
            ValueError: the text is not a plan, or has a newer version.
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
        """Writes the plan as JSON."""
        Path(path).write_text(self.to_json())

    @classmethod
    def load(cls, path: str | Path) -> "ShardingPlan":
        """Reads a plan that ``save`` wrote. ValueError for a file that holds something else."""
        try:
            return cls.from_json(Path(path).read_text())
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(
                f"{path} is no sharding plan; name a file that `meshrec plan --out` wrote. Cause: {error}"
            ) from error

    def __str__(self) -> str:
        return "\n\n".join(
            f"module: {path or '(the model itself)'}\n{plan}" for path, plan in self.plan.items()
        )
