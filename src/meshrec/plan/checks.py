"""Plan validation: all tables are planned, ranks exist, and shards cover every table element exactly once."""

from collections.abc import Mapping, Sequence

from meshrec.plan.sharding_plan import (
    EmbeddingModuleShardingPlan,
    ParameterSharding,
    ShardingPlan,
    ShardingType,
    ShardMetadata,
    TableSize,
)


def verify_plan(
    plan: ShardingPlan, tables: Mapping[str, Mapping[str, TableSize]], *, world_size: int
) -> None:
    """Raise an error unless ``plan`` covers all embedding tables in a model with valid shards.

    Args:
        plan: Plan for all embedding modules in the model.
        tables: Table sizes by module path and table name (see ``tables_of``).
        world_size: Number of ranks on the ``shard`` axis.

    Raises:
        TypeError: ``plan`` is not a ShardingPlan, but for example the plan of a single module.
        ValueError: The plan is invalid. The message names the module and table.
    """
    if not isinstance(plan, ShardingPlan):
        raise TypeError(
            f"the plan of a model must be a ShardingPlan, got a {type(plan).__name__}. Write "
            'ShardingPlan({path: plan}) with the path of each embedding module ("" for the model itself).'
        )
    for path in tables:
        if path not in plan.plan:
            raise ValueError(
                f"the plan has no module {path!r}; it has {list(plan.plan)}. Every embedding module needs "
                "a plan."
            )
    for path, module_plan in plan.plan.items():
        if path not in tables:
            raise ValueError(f"the plan names module {path!r}; the embedding modules are {list(tables)}.")
        verify_module_plan(module_plan, tables[path], world_size=world_size)


def verify_module_plan(
    plan: EmbeddingModuleShardingPlan, tables: Mapping[str, TableSize], *, world_size: int
) -> None:
    """Raise an error unless shards on existing ranks cover every table in a module exactly once.

    Args:
        plan: Sharding by table name.
        tables: Table sizes by name.
        world_size: Number of ranks on the ``shard`` axis.

    Raises:
        ValueError: The plan is invalid. The message names the table.
    """
    for table in tables:
        if table not in plan:
            raise ValueError(
                f"table {table!r} is not in the plan, which has {list(plan)}. Plan all tables of the module."
            )
    for table, sharding in plan.items():
        if table not in tables:
            raise ValueError(f"the plan has a table {table!r}; the module has {list(tables)}.")
        # Sizes may come from JSON as plain lists.
        _verify_table(table, sharding, TableSize(*tables[table]), world_size)


def _verify_table(table: str, sharding: ParameterSharding, size: TableSize, world_size: int) -> None:
    """Raise ValueError unless a table's shards cover the table exactly once and are on existing ranks.

    A data-parallel table must not have shards.
    """
    # A data-parallel table has no shards.
    if sharding.sharding_type is ShardingType.DATA_PARALLEL:
        if sharding.shards:
            raise ValueError(
                f"table {table!r} is data-parallel, but its plan has rectangles. Leave them out."
            )
        return
    if not sharding.shards:
        raise ValueError(
            f"table {table!r} is {sharding.sharding_type.value}, but its plan has no rectangle. "
            "Only data-parallel tables have none."
        )
    for shard in sharding.shards:
        _verify_shard(table, shard, size, world_size)
    # `ranks` repeats the owners, so a manual plan may contradict itself.
    owners = tuple(shard.placement.rank for shard in sharding.shards)
    if sharding.ranks is not None and set(sharding.ranks) != set(owners):
        raise ValueError(
            f"table {table!r}: ranks is {sharding.ranks}, but the rectangles are on ranks {owners}. They "
            "must agree."
        )
    # Before the area check, which proves coverage only for disjoint shards.
    _verify_disjoint(table, sharding.shards)
    # Disjoint shards inside the table cover it if and only if their areas sum to the table area.
    covered = sum(shard.shard_sizes[0] * shard.shard_sizes[1] for shard in sharding.shards)
    total = size.num_embeddings * size.embedding_dim
    if covered != total:
        raise ValueError(
            f"table {table!r}: its rectangles {' '.join(map(str, sharding.shards))} cover {covered} of "
            f"{total} elements ({size.num_embeddings} x {size.embedding_dim}). Add the missing rectangles."
        )


def _verify_shard(table: str, shard: ShardMetadata, size: TableSize, world_size: int) -> None:
    """Raise ValueError if a shard is empty, reaches beyond the table, or is on an unknown rank."""
    rank = shard.placement.rank
    if not 0 <= rank < world_size:
        raise ValueError(
            f"table {table!r}: rectangle {shard} is on rank {rank}; the ranks are [0, {world_size})."
        )
    if min(shard.shard_sizes) < 1 or min(shard.shard_offsets) < 0:
        raise ValueError(f"table {table!r}: rectangle {shard} is empty or starts below 0. Leave it out.")
    if shard.rows[1] > size.num_embeddings or shard.columns[1] > size.embedding_dim:
        raise ValueError(
            f"table {table!r}: rectangle {shard} goes beyond the table, which is "
            f"{size.num_embeddings} x {size.embedding_dim}. Plan for this size."
        )


def _verify_disjoint(table: str, shards: Sequence[ShardMetadata]) -> None:
    """Raise ValueError if two shards overlap."""
    # A sweep over ascending rows, which needs far fewer comparisons than all pairs. Open shards are those
    # that contain the current row.
    open_shards: list[ShardMetadata] = []
    # Sorted by first row, so that a shard that ends above the current row cannot overlap a later one.
    for shard in sorted(shards, key=lambda s: s.shard_offsets):
        open_shards = [open_shard for open_shard in open_shards if open_shard.rows[1] > shard.rows[0]]
        for open_shard in open_shards:
            if open_shard.columns[0] < shard.columns[1] and shard.columns[0] < open_shard.columns[1]:
                raise ValueError(
                    f"table {table!r}: rectangles {open_shard} and {shard} overlap. Make them disjoint."
                )
        open_shards.append(shard)
