"""Sharding plans in TorchRec's form: strings, lists and torch's shard metadata, printed as TorchRec does.

``to_core`` converts to MeshRec's plans, ``from_core`` converts back.
"""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharding_spec.api import EnumerableShardingSpec
from torch.distributed.remote_device import _remote_device

from meshrec.plan import sharding_plan as core


class BoundsCheckMode(enum.IntEnum):
    """FBGEMM's names for the handling of IDs outside a table.

    In MeshRec, the handling is an option of a collection, not of a table. Only FATAL and V2_FATAL are errors.
    """

    FATAL = 0
    WARNING = 1
    IGNORE = 2
    NONE = 3
    V2_IGNORE = 4
    V2_WARNING = 5
    V2_FATAL = 6


def raises_on_invalid_ids(mode: Any) -> bool:
    """Return whether a `BoundsCheckMode` raises an error for invalid IDs, which is MeshRec's default."""
    return mode in (BoundsCheckMode.FATAL, BoundsCheckMode.V2_FATAL)


# ParameterSharding arguments without a counterpart in MeshRec's kernels.
_NOT_HERE = ("cache_params", "enforce_hbm", "bounds_check_mode", "output_dtype", "key_value_params")


@dataclass
class ParameterSharding:
    """Placement of a table: sharding type, compute kernel, rank per shard, and shards.

    A data-parallel table has no shards.
    """

    sharding_type: str
    compute_kernel: str
    ranks: list[int] | None = None
    sharding_spec: EnumerableShardingSpec | None = None
    cache_params: object | None = None
    enforce_hbm: bool | None = None
    stochastic_rounding: bool | None = None
    bounds_check_mode: object | None = None
    output_dtype: object | None = None
    key_value_params: object | None = None


class EmbeddingModuleShardingPlan(dict[str, ParameterSharding]):
    """Placements in a module, by table name."""

    def __str__(self) -> str:
        tables = [[name, p.sharding_type, p.compute_kernel, p.ranks] for name, p in self.items()]
        shards = [
            [name, shard.shard_offsets, shard.shard_sizes, shard.placement]
            for name, placed in self.items()
            for shard in (placed.sharding_spec.shards if placed.sharding_spec is not None else [])
        ]
        head = _table(["param", "sharding type", "compute kernel", "ranks"], tables)
        tail = _table(["param", "shard offsets", "shard sizes", "placement"], shards)
        return f"\n\n{head}\n\n{tail}"


@dataclass
class ShardingPlan:
    """Placements in a model, by module path."""

    plan: dict[str, EmbeddingModuleShardingPlan]

    def get_plan_for_module(self, module_path: str) -> EmbeddingModuleShardingPlan | None:
        """Return the plan for a module path; None if absent."""
        return self.plan.get(module_path)

    def __str__(self) -> str:
        return "\n\n".join(f"module: {path}{plan}" for path, plan in self.plan.items())


def _table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Format a table with headers as text, as TorchRec prints it."""
    # Without rows, zip yields no columns, and TorchRec prints two empty lines. Programs' tests compare the
    # text.
    columns = zip(*rows, strict=True)
    widths = [
        max(len(header), *(len(str(cell)) for cell in column))
        for header, column in zip(headers, columns, strict=False)
    ]
    lines = [" | ".join(header.center(width) for header, width in zip(headers, widths, strict=False))]
    lines.append(" | ".join("-" * width for width in widths))
    lines += [
        " | ".join(str(cell).ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows
    ]
    return "\n".join(lines)


def to_core(plan: Any) -> core.ShardingPlan:
    """Convert TorchRec's plan of a model to MeshRec's. A plan of MeshRec is returned unchanged.

    Raises:
        TypeError: ``plan`` is not a model plan.
        ValueError: MeshRec's plans cannot express it.
    """
    if isinstance(plan, core.ShardingPlan):
        return plan
    if not isinstance(plan, ShardingPlan):
        raise TypeError(
            f"the plan of a model must be a ShardingPlan, got a {type(plan).__name__}. Write "
            'ShardingPlan({path: plan}) with the path of each embedding module ("" for the model itself).'
        )
    return core.ShardingPlan({path: module_to_core(tables) for path, tables in plan.plan.items()})


def module_to_core(tables: Mapping[str, Any]) -> core.EmbeddingModuleShardingPlan:
    """Convert a module plan to MeshRec's form. Its entries may be TorchRec's or MeshRec's.

    Raises:
        TypeError: ``tables`` is not a module plan.
        ValueError: MeshRec's plans cannot express it.
    """
    if not isinstance(tables, Mapping):
        raise TypeError(
            f"the plan of one module maps its tables to ParameterSharding, got a {type(tables).__name__}. "
            "Take plan.plan[path] of a model's plan."
        )
    return core.EmbeddingModuleShardingPlan(
        {
            name: placed if isinstance(placed, core.ParameterSharding) else _table_to_core(name, placed)
            for name, placed in tables.items()
        }
    )


def from_core(plan: core.ShardingPlan, *, world_size: int, local_size: int) -> ShardingPlan:
    """Convert MeshRec's plan to TorchRec's form.

    Args:
        plan: MeshRec's plan.
        world_size: number of ranks.
        local_size: ranks per node.
    """
    return ShardingPlan(
        {
            path: EmbeddingModuleShardingPlan(
                {
                    name: table_from_core(placed, world_size=world_size, local_size=local_size)
                    for name, placed in tables.items()
                }
            )
            for path, tables in plan.plan.items()
        }
    )


def table_from_core(placed: core.ParameterSharding, *, world_size: int, local_size: int) -> ParameterSharding:
    """Convert a table placement to TorchRec's form.

    Args:
        placed: MeshRec's placement.
        world_size: number of ranks.
        local_size: ranks per node.
    """
    # TorchRec lists all ranks for a data-parallel table, and no shards.
    if placed.sharding_type is core.ShardingType.DATA_PARALLEL:
        kernel, ranks = placed.compute_kernel.value, list(range(world_size))
        return ParameterSharding(placed.sharding_type.value, kernel, ranks)
    shards = [
        ShardMetadata(
            shard_offsets=list(shard.shard_offsets),
            shard_sizes=list(shard.shard_sizes),
            placement=_placement(shard.placement, local_size),
        )
        for shard in placed.shards
    ]
    return ParameterSharding(
        sharding_type=placed.sharding_type.value,
        compute_kernel=placed.compute_kernel.value,
        ranks=[shard.placement.rank for shard in placed.shards],
        sharding_spec=EnumerableShardingSpec(shards),
    )


def _placement(placement: core.RemoteDevice, local_size: int) -> str:
    """Convert a placement to torch's string form, such as ``rank:3/cuda:1``."""
    device = placement.device
    # torch's placement strings count GPUs within the node.
    where = device if device == "cpu" else f"{device}:{placement.rank % local_size}"
    return f"rank:{placement.rank}/{where}"


def _table_to_core(name: str, placed: ParameterSharding) -> core.ParameterSharding:
    """Convert the placement of a table to MeshRec's form."""
    for argument in _NOT_HERE:
        # A mode that raises for invalid IDs is accepted, because MeshRec's lookups raise as well.
        value = getattr(placed, argument)
        if value is not None and not (argument == "bounds_check_mode" and raises_on_invalid_ids(value)):
            raise ValueError(f"table {name!r}: MeshRec has no {argument}. Leave it out of the plan.")
    sharding_type = _member(core.ShardingType, name, placed.sharding_type)
    kernel = _member(core.EmbeddingComputeKernel, name, placed.compute_kernel)
    if sharding_type is core.ShardingType.DATA_PARALLEL:
        return core.ParameterSharding(sharding_type=sharding_type, compute_kernel=kernel)
    if placed.sharding_spec is None:
        raise ValueError(
            f"table {name!r} is {sharding_type.value} and needs a sharding_spec: which rows and columns "
            "are on which rank. construct_module_sharding_plan makes it."
        )
    shards = tuple(_shard_to_core(shard) for shard in placed.sharding_spec.shards)
    return core.ParameterSharding(
        sharding_type=sharding_type,
        compute_kernel=kernel,
        ranks=tuple(shard.placement.rank for shard in shards),
        sharding_spec=core.EnumerableShardingSpec(shards=shards),
    )


def _shard_to_core(shard: ShardMetadata) -> core.ShardMetadata:
    assert isinstance(shard.placement, _remote_device)
    rank, device = shard.placement.rank(), shard.placement.device()
    assert rank is not None
    (r0, c0), (rows, columns) = shard.shard_offsets, shard.shard_sizes
    return core.ShardMetadata(
        shard_offsets=(r0, c0),
        shard_sizes=(rows, columns),
        placement=core.RemoteDevice(rank=rank, device=device.type),
    )


def _member(kind: Any, table: str, value: object) -> Any:
    """Return the member of an enum with a given value.

    Args:
        value: value, or a member of another enum with this value, such as TorchRec's.
    """
    values = [member.value for member in kind]
    value = getattr(value, "value", value)
    if value not in values:
        raise ValueError(
            f"table {table!r}: MeshRec has no {kind.__name__} {value!r}, only {values}. Choose one of these."
        )
    return kind(value)
