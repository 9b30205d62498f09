"""Printable summaries of a sharded module: which table shards a stage, such as the lookup, works on."""

from dataclasses import dataclass

from meshrec.plan.sharding_plan import EmbeddingModuleShardingPlan, ShardingType


@dataclass(frozen=True)
class PrintedStage:
    """Summary of a stage for all tables with the same sharding type. ``repr`` prints it."""

    title: str
    """Stage description, such as "lookup of rows"."""
    sharding_type: str
    tables: dict[str, tuple[str, ...]]
    """Shards of each table as strings with rows, columns and rank, such as ``[0:10, 0:4]@1``."""

    def __repr__(self) -> str:
        # A rank may have no shard of a table.
        shards = [f"    {name}: {', '.join(texts) or 'nothing'}" for name, texts in self.tables.items()]
        return "\n".join([f"{self.title}, {self.sharding_type}", *shards])


def printed_stages(
    title: str, plan: EmbeddingModuleShardingPlan, rank: int | None = None
) -> list[PrintedStage]:
    """Return summaries of a stage, one for each sharding type in the plan.

    Args:
        title: stage description.
        plan: the module's plan.
        rank: list only shards on this rank; None: list all shards.
    """
    by_type: dict[str, dict[str, tuple[str, ...]]] = {}
    for name, sharding in plan.items():
        here = [shard for shard in sharding.shards if rank in (None, shard.placement.rank)]
        is_whole = sharding.sharding_type is ShardingType.DATA_PARALLEL
        texts = ("on every rank",) if is_whole else tuple(map(str, here))
        by_type.setdefault(sharding.sharding_type.value, {})[name] = texts
    return [PrintedStage(title, kind, tables) for kind, tables in by_type.items()]
