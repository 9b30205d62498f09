"""Plans by hand: one builder per sharding type, with TorchRec's names.

A builder returns a ``ShardingGenerator``. ``construct_module_sharding_plan`` calls it with the size of the
table and the number of ranks. Rows and columns that do not divide evenly are split as evenly as possible,
larger parts first.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from meshrec.plan.sharding_plan import (
    EmbeddingComputeKernel,
    EmbeddingModuleShardingPlan,
    EnumerableShardingSpec,
    ParameterSharding,
    RemoteDevice,
    ShardingType,
    ShardMetadata,
    TableSize,
)


class WorldShape(NamedTuple):
    """The ranks of a plan: their number, the number per node, and their type of device."""

    world_size: int
    local_size: int
    device: str = "cpu"


ShardingGenerator = Callable[[str, TableSize, WorldShape], ParameterSharding]


def even_splits(total: int, num_parts: int) -> list[tuple[int, int]]:
    """Split ``range(total)`` into ``num_parts`` half-open intervals, as evenly as possible. The last may be
    empty.
    """
    base, extra = divmod(total, num_parts)
    ends = accumulate((base + (part < extra) for part in range(num_parts)), initial=0)
    return list(pairwise(ends))


def tables_of(module: Any) -> dict[str, TableSize]:
    """Return the tables of an embedding module, sharded or not, by name and in its order."""
    configs = getattr(module, "embedding_bag_configs", None) or getattr(module, "embedding_configs", None)
    if configs is None:
        raise ValueError(
            f"{type(module).__name__} is no embedding module: it has neither embedding_bag_configs() nor "
            "embedding_configs(). Pass an EmbeddingBagCollection or an EmbeddingCollection."
        )
    return {c.name: TableSize(c.num_embeddings, c.embedding_dim) for c in configs()}


def data_parallel() -> ShardingGenerator:
    """Replicate the table on every rank. Gradients are all-reduced."""
    sharding = ParameterSharding(sharding_type=ShardingType.DATA_PARALLEL)
    return lambda table, size, ranks: sharding


def table_wise(
    *, rank: int, compute_kernel: EmbeddingComputeKernel = EmbeddingComputeKernel.FUSED
) -> ShardingGenerator:
    """Put the whole table on one rank."""

    def generate(table: str, size: TableSize, ranks: WorldShape) -> ParameterSharding:
        return _grid(
            table,
            ShardingType.TABLE_WISE,
            size,
            [(0, size.embedding_dim, [rank])],
            world=ranks,
            compute_kernel=compute_kernel,
        )

    return generate


def row_wise(
    *,
    ranks: Sequence[int] | None = None,
    compute_kernel: EmbeddingComputeKernel = EmbeddingComputeKernel.FUSED,
) -> ShardingGenerator:
    """Split the rows over ``ranks`` (default: all)."""

    def generate(table: str, size: TableSize, world: WorldShape) -> ParameterSharding:
        owners = list(range(world.world_size)) if ranks is None else list(ranks)
        bands = [(0, size.embedding_dim, owners)]
        return _grid(table, ShardingType.ROW_WISE, size, bands, world=world, compute_kernel=compute_kernel)

    return generate


def column_wise(
    *,
    ranks: Sequence[int] | None = None,
    compute_kernel: EmbeddingComputeKernel = EmbeddingComputeKernel.FUSED,
) -> ShardingGenerator:
    """Split the columns over ``ranks`` (default: all). A rank that is named twice gets two parts."""

    def generate(table: str, size: TableSize, world: WorldShape) -> ParameterSharding:
        owners = list(range(world.world_size)) if ranks is None else list(ranks)
        return _grid(
            table,
            ShardingType.COLUMN_WISE,
            size,
            _column_bands(size, owners),
            world=world,
            compute_kernel=compute_kernel,
        )

    return generate


def table_row_wise(
    *,
    node: int | None = None,
    host_index: int | None = None,
    compute_kernel: EmbeddingComputeKernel = EmbeddingComputeKernel.FUSED,
) -> ShardingGenerator:
    """Split the rows over the ranks of one node. ``host_index`` is TorchRec's name for ``node``."""

    def generate(table: str, size: TableSize, world: WorldShape) -> ParameterSharding:
        owners = _node_ranks(table, node if node is not None else host_index, world)
        bands = [(0, size.embedding_dim, owners)]
        return _grid(
            table, ShardingType.TABLE_ROW_WISE, size, bands, world=world, compute_kernel=compute_kernel
        )

    return generate


def table_column_wise(
    *, node: int, compute_kernel: EmbeddingComputeKernel = EmbeddingComputeKernel.FUSED
) -> ShardingGenerator:
    """Split the columns over the ranks of one node."""

    def generate(table: str, size: TableSize, world: WorldShape) -> ParameterSharding:
        bands = _column_bands(size, _node_ranks(table, node, world))
        return _grid(
            table, ShardingType.TABLE_COLUMN_WISE, size, bands, world=world, compute_kernel=compute_kernel
        )

    return generate


def grid_shard(
    *,
    nodes: Sequence[int] | None = None,
    host_indexes: Sequence[int] | None = None,
    compute_kernel: EmbeddingComputeKernel = EmbeddingComputeKernel.FUSED,
) -> ShardingGenerator:
    """Split the columns over nodes (default: all), and the rows of each column part over the ranks of its
    node.
    """

    def generate(table: str, size: TableSize, world: WorldShape) -> ParameterSharding:
        chosen = nodes if nodes is not None else host_indexes
        if chosen is None:
            chosen = range(world.world_size // world.local_size)
        bands = [
            (c0, c1, _node_ranks(table, node, world))
            for node, (c0, c1) in zip(chosen, even_splits(size.embedding_dim, len(chosen)), strict=True)
        ]
        return _grid(table, ShardingType.GRID_SHARD, size, bands, world=world, compute_kernel=compute_kernel)

    return generate


def construct_module_sharding_plan(
    module: Any,
    per_param_sharding: Mapping[str, ShardingGenerator],
    *,
    world_size: int,
    local_size: int | None = None,
    device_type: str = "cpu",
) -> EmbeddingModuleShardingPlan:
    """Build the plan of ``module`` from one builder per table.

    Args:
        module: an embedding module.
        per_param_sharding: the builder of each table, by name.
        world_size: number of ranks.
        local_size: ranks per node, for sharding types that use nodes (default: all ranks on one node).
        device_type: type of the ranks' devices.

    Raises:
        ValueError: a table has no builder, a builder is for an unknown table, or a builder names a rank that
            does not exist.
    """
    tables = tables_of(module)
    if missing := [name for name in tables if name not in per_param_sharding]:
        raise ValueError(f"table {missing[0]!r} has no sharding: give one for each of {list(tables)}.")
    if unknown := [name for name in per_param_sharding if name not in tables]:
        raise ValueError(
            f"{unknown[0]!r} is no table of this module, which has {list(tables)}. Name one of them."
        )
    local_size = world_size if local_size is None else local_size
    if local_size < 1 or world_size % local_size:
        raise ValueError(
            f"world_size {world_size} is no multiple of local_size {local_size} (ranks per node). "
            "Nodes have equally many ranks."
        )
    ranks = WorldShape(world_size, local_size, device_type)
    return EmbeddingModuleShardingPlan(
        {name: per_param_sharding[name](name, size, ranks) for name, size in tables.items()}
    )


def _column_bands(size: TableSize, owners: Sequence[int]) -> list[tuple[int, int, list[int]]]:
    splits = even_splits(size.embedding_dim, len(owners))
    return [(c0, c1, [rank]) for rank, (c0, c1) in zip(owners, splits, strict=True)]


def _node_ranks(table: str, node: int | None, world: WorldShape) -> list[int]:
    num_nodes = world.world_size // world.local_size
    if node is None or not 0 <= node < num_nodes:
        raise ValueError(
            f"table {table!r}: node {node} is not one of the {num_nodes} nodes [0, {num_nodes}) that "
            f"{world.world_size} ranks make with local_size {world.local_size}. Pass another node or "
            "local_size."
        )
    return list(range(node * world.local_size, (node + 1) * world.local_size))


def _grid(
    table: str,
    sharding_type: ShardingType,
    size: TableSize,
    bands: Sequence[tuple[int, int, list[int]]],
    *,
    world: WorldShape,
    compute_kernel: EmbeddingComputeKernel,
) -> ParameterSharding:
    """Split the rows of each band of columns (first, end, owners) over its owners."""
    shards = []
    for c0, c1, owners in bands:
        for rank, (r0, r1) in zip(owners, even_splits(size.num_embeddings, len(owners)), strict=True):
            if not 0 <= rank < world.world_size:
                raise ValueError(
                    f"table {table!r}: rank {rank} is not one of the {world.world_size} ranks "
                    f"[0, {world.world_size}). Name ranks of the plan."
                )
            if r1 > r0 and c1 > c0:
                shards.append(
                    ShardMetadata(
                        shard_offsets=(r0, c0),
                        shard_sizes=(r1 - r0, c1 - c0),
                        placement=RemoteDevice(rank=rank, device=world.device),
                    )
                )
    return ParameterSharding(
        sharding_type=sharding_type,
        compute_kernel=compute_kernel,
        ranks=tuple(shard.placement.rank for shard in shards),
        sharding_spec=EnumerableShardingSpec(shards=tuple(shards)),
    )
