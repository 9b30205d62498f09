"""Builders for manual sharding plans, one per sharding type, with TorchRec's names.

A builder such as ``row_wise()`` returns a ``ShardingGenerator``: a function from table name, table size and
world shape to the table's sharding. ``construct_module_sharding_plan`` calls it for every table. Rows and
columns are split as evenly as possible, larger parts first.
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
    """Number of ranks for which a plan is made, and how they are grouped into nodes."""

    world_size: int
    local_size: int
    """Number of ranks on every node."""
    device: str = "cpu"


ShardingGenerator = Callable[[str, TableSize, WorldShape], ParameterSharding]


def even_splits(total: int, num_parts: int) -> list[tuple[int, int]]:
    """Split ``range(total)`` into ``num_parts`` intervals [start, end), as evenly as possible.

    ``even_splits(5, 2)`` is [(0, 3), (3, 5)]. The last intervals are empty if ``total < num_parts``.
    """
    base, extra = divmod(total, num_parts)
    # The first `extra` parts get the remainder, one element each.
    ends = accumulate((base + (part < extra) for part in range(num_parts)), initial=0)
    return list(pairwise(ends))


def tables_of(module: Any) -> dict[str, TableSize]:
    """Return table sizes by name, in module order, for a plain or sharded embedding module.

    Raises:
        ValueError: The module has neither bag nor sequence embedding configs.
    """
    # Duck typing: plain, sharded and quantized collections share these methods, but no base class.
    configs = getattr(module, "embedding_bag_configs", None) or getattr(module, "embedding_configs", None)
    if configs is None:
        raise ValueError(
            f"{type(module).__name__} is not an embedding module: it has neither embedding_bag_configs() nor "
            "embedding_configs(). Pass an EmbeddingBagCollection or an EmbeddingCollection."
        )
    return {c.name: TableSize(c.num_embeddings, c.embedding_dim) for c in configs()}


def data_parallel() -> ShardingGenerator:
    """Return a generator which places the whole table on every rank. Gradients are then all-reduced."""
    # A data-parallel sharding lists no ranks and shards, because every rank holds the whole table.
    sharding = ParameterSharding(sharding_type=ShardingType.DATA_PARALLEL)
    # The dataclass is frozen, so tables can share it.
    return lambda table, size, ranks: sharding


def table_wise(
    *, rank: int, compute_kernel: EmbeddingComputeKernel = EmbeddingComputeKernel.FUSED
) -> ShardingGenerator:
    """Return a generator which places the whole table on rank ``rank``."""

    def _generate(table: str, size: TableSize, world: WorldShape) -> ParameterSharding:
        """Return the sharding with the whole table on ``rank``."""
        return _shard_bands(
            table,
            ShardingType.TABLE_WISE,
            size,
            [(0, size.embedding_dim, [rank])],
            world=world,
            compute_kernel=compute_kernel,
        )

    return _generate


def row_wise(
    *,
    ranks: Sequence[int] | None = None,
    compute_kernel: EmbeddingComputeKernel = EmbeddingComputeKernel.FUSED,
) -> ShardingGenerator:
    """Return a generator which splits the rows over ``ranks``, by default over all ranks.

    The i-th row range is on ``ranks[i]``.
    """

    def _generate(table: str, size: TableSize, world: WorldShape) -> ParameterSharding:
        """Return the sharding with a row range per rank."""
        owners = list(range(world.world_size)) if ranks is None else list(ranks)
        bands = [(0, size.embedding_dim, owners)]
        return _shard_bands(
            table, ShardingType.ROW_WISE, size, bands, world=world, compute_kernel=compute_kernel
        )

    return _generate


def column_wise(
    *,
    ranks: Sequence[int] | None = None,
    compute_kernel: EmbeddingComputeKernel = EmbeddingComputeKernel.FUSED,
) -> ShardingGenerator:
    """Return a generator which splits the columns over ``ranks``, by default over all ranks.

    A rank listed twice gets two column shards.
    """

    def _generate(table: str, size: TableSize, world: WorldShape) -> ParameterSharding:
        """Return the sharding with a column range per rank."""
        owners = list(range(world.world_size)) if ranks is None else list(ranks)
        return _shard_bands(
            table,
            ShardingType.COLUMN_WISE,
            size,
            _column_bands(size, owners),
            world=world,
            compute_kernel=compute_kernel,
        )

    return _generate


def table_row_wise(
    *,
    node: int | None = None,
    host_index: int | None = None,
    compute_kernel: EmbeddingComputeKernel = EmbeddingComputeKernel.FUSED,
) -> ShardingGenerator:
    """Return a generator which splits the rows over the ranks of a node.

    Args:
        node: Node number; node n has ranks [n * local_size, (n + 1) * local_size).
        host_index: TorchRec's name for ``node``; used if ``node`` is None.
        compute_kernel: How the table is updated.
    """

    def _generate(table: str, size: TableSize, world: WorldShape) -> ParameterSharding:
        """Return the sharding with a row range per rank of the node."""
        owners = _node_ranks(table, node if node is not None else host_index, world)
        bands = [(0, size.embedding_dim, owners)]
        return _shard_bands(
            table, ShardingType.TABLE_ROW_WISE, size, bands, world=world, compute_kernel=compute_kernel
        )

    return _generate


def table_column_wise(
    *, node: int, compute_kernel: EmbeddingComputeKernel = EmbeddingComputeKernel.FUSED
) -> ShardingGenerator:
    """Return a generator which splits the columns over the ranks of a node."""

    def _generate(table: str, size: TableSize, world: WorldShape) -> ParameterSharding:
        """Return the sharding with a column range per rank of the node."""
        bands = _column_bands(size, _node_ranks(table, node, world))
        return _shard_bands(
            table, ShardingType.TABLE_COLUMN_WISE, size, bands, world=world, compute_kernel=compute_kernel
        )

    return _generate


def grid_shard(
    *,
    nodes: Sequence[int] | None = None,
    host_indexes: Sequence[int] | None = None,
    compute_kernel: EmbeddingComputeKernel = EmbeddingComputeKernel.FUSED,
) -> ShardingGenerator:
    """Return a generator which splits the columns over nodes, and the columns of a node by rows over ranks.

    Args:
        nodes: Node numbers, by default all nodes. Every node in the list gets a column range.
        host_indexes: TorchRec's name for ``nodes``; used if ``nodes`` is None.
        compute_kernel: How the table is updated.
    """

    def _generate(table: str, size: TableSize, world: WorldShape) -> ParameterSharding:
        """Return the sharding with a column range per node, divided by rows over the ranks of the node."""
        column_nodes = nodes if nodes is not None else host_indexes
        if column_nodes is None:
            # With fewer columns than nodes, the last nodes get no shard.
            column_nodes = range(world.world_size // world.local_size)
        bands = [
            (c0, c1, _node_ranks(table, node, world))
            for node, (c0, c1) in zip(
                column_nodes, even_splits(size.embedding_dim, len(column_nodes)), strict=True
            )
        ]
        return _shard_bands(
            table, ShardingType.GRID_SHARD, size, bands, world=world, compute_kernel=compute_kernel
        )

    return _generate


def construct_module_sharding_plan(
    module: Any,
    per_param_sharding: Mapping[str, ShardingGenerator],
    *,
    world_size: int,
    local_size: int | None = None,
    device_type: str = "cpu",
) -> EmbeddingModuleShardingPlan:
    """Build the plan for ``module`` from one generator per table.

    Args:
        module: An embedding module, plain or sharded.
        per_param_sharding: Sharding generator by table name, for every table of the module.
        world_size: Number of ranks.
        local_size: Ranks per node, for sharding types that use nodes. None: all ranks are on a single node.
        device_type: Device type of all ranks.

    Returns:
        Sharding by table name, in module order.

    Raises:
        ValueError: A table has no generator, a generator is for an unknown table, or a rank does not exist.

    Example::

        >>> from meshrec.modules import EmbeddingBagCollection, EmbeddingBagConfig
        >>> item = EmbeddingBagConfig(name="item", num_embeddings=10, embedding_dim=4, feature_names=["item"])
        >>> module = EmbeddingBagCollection(tables=[item])
        >>> plan = construct_module_sharding_plan(module, {"item": row_wise()}, world_size=2)
        >>> print(*plan["item"].shards)
        [0:5, 0:4]@0 [5:10, 0:4]@1
    """
    tables = tables_of(module)
    # A default sharding for tables without a generator would hide mistakes in plans.
    if missing := [name for name in tables if name not in per_param_sharding]:
        raise ValueError(f"table {missing[0]!r} has no sharding: give one for each of {list(tables)}.")
    if unknown := [name for name in per_param_sharding if name not in tables]:
        raise ValueError(
            f"{unknown[0]!r} is not a table of this module, which has {list(tables)}. Name one of them."
        )
    # A single node: table_row_wise and grid_shard then use all ranks.
    local_size = world_size if local_size is None else local_size
    if local_size < 1 or world_size % local_size:
        raise ValueError(
            f"world_size {world_size} is not a multiple of local_size {local_size} (ranks per node). "
            "All nodes must have the same number of ranks."
        )
    world = WorldShape(world_size, local_size, device_type)
    return EmbeddingModuleShardingPlan(
        {name: per_param_sharding[name](name, size, world) for name, size in tables.items()}
    )


def _column_bands(size: TableSize, owners: Sequence[int]) -> list[tuple[int, int, list[int]]]:
    """Split the columns over the ranks in ``owners``, as evenly as possible.

    Returns:
        Tuple (first column, end column, [rank]) for every owner, in the form that `_shard_bands` takes.
    """
    # More owners than columns give empty bands, which _shard_bands skips.
    splits = even_splits(size.embedding_dim, len(owners))
    return [(c0, c1, [rank]) for rank, (c0, c1) in zip(owners, splits, strict=True)]


def _node_ranks(table: str, node: int | None, world: WorldShape) -> list[int]:
    """Return the ranks of a node, from node * local_size up to (node + 1) * local_size - 1."""
    # construct_module_sharding_plan has checked that local_size divides world_size.
    num_nodes = world.world_size // world.local_size
    if node is None or not 0 <= node < num_nodes:
        raise ValueError(
            f"table {table!r}: node {node} is not one of the {num_nodes} nodes [0, {num_nodes}) that "
            f"{world.world_size} ranks make with local_size {world.local_size}. Pass another node or "
            "local_size."
        )
    return list(range(node * world.local_size, (node + 1) * world.local_size))


def _shard_bands(
    table: str,
    sharding_type: ShardingType,
    size: TableSize,
    bands: Sequence[tuple[int, int, list[int]]],
    *,
    world: WorldShape,
    compute_kernel: EmbeddingComputeKernel,
) -> ParameterSharding:
    """Return the sharding in which every column band is split by rows over the band's owners.

    A column band is a column range with a list of owner ranks. Empty shards are left out.

    Args:
        bands: (first column, end column, owner ranks) of every column band.
    """
    shards = []
    for c0, c1, owners in bands:
        for rank, (r0, r1) in zip(owners, even_splits(size.num_embeddings, len(owners)), strict=True):
            if not 0 <= rank < world.world_size:
                raise ValueError(
                    f"table {table!r}: rank {rank} is not one of the {world.world_size} ranks "
                    f"[0, {world.world_size}). Name ranks of the plan."
                )
            # Small tables leave some owners without a shard. Plans never list empty shards.
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
        # Owners of non-empty shards only, as the checks require.
        ranks=tuple(shard.placement.rank for shard in shards),
        sharding_spec=EnumerableShardingSpec(shards=tuple(shards)),
    )
