"""Check that all ranks have the same sharding plan."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from meshrec.comms.mesh import group_device
from meshrec.plan.sharding_plan import ShardingPlan


def verify_same_plan(plan: ShardingPlan, group: dist.ProcessGroup | None) -> None:
    """Check that all ranks in ``group`` have the same plan. Collective.

    Raises:
        ValueError: the plans differ. All ranks raise the same message.
    """
    if group is None or group.size() == 1:
        return
    # An argument of the wrong type is rejected after this exchange, so that no rank waits alone.
    # Compare digests first: plans are large, and usually equal.
    digest = plan.digest() if isinstance(plan, ShardingPlan) else "00" * 32
    local_digest = torch.frombuffer(bytearray.fromhex(digest), dtype=torch.uint8).to(group_device(group))
    digests = [torch.empty_like(local_digest) for _ in range(group.size())]
    dist.all_gather(digests, local_digest, group=group)
    if all(torch.equal(digests[0], digest) for digest in digests):
        return
    # All ranks see the same digests, so all reach this collective.
    parts = {(path, table): sharding.digest() for path, table, sharding in plan.tables()}
    tables_by_rank: list[Any] = [None] * group.size()
    dist.all_gather_object(tables_by_rank, parts, group=group)
    raise ValueError(_difference(tables_by_rank))


def _difference(tables_by_rank: Sequence[Mapping[tuple[str, str], str]]) -> str:
    for rank, other in enumerate(tables_by_rank):
        for key in sorted({*tables_by_rank[0], *other}):
            if tables_by_rank[0].get(key) != other.get(key):
                path, table = key
                missing_on = [f"rank {r}" for r in (0, rank) if key not in tables_by_rank[r]]
                reason = (
                    f"it is missing on {missing_on[0]}"
                    if missing_on
                    else f"ranks 0 and {rank} place it differently"
                )
                return (
                    f"the ranks hold different plans: table {table!r} of module {path!r}: {reason}. Make the "
                    "plan on one rank and broadcast it (EmbeddingShardingPlanner.collective_plan does)."
                )
    raise AssertionError("digests differ, plans do not")
