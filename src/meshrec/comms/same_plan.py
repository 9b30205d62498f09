"""The check that all ranks hold the same plan."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from meshrec.comms.mesh import group_device
from meshrec.plan.sharding_plan import ShardingPlan


def verify_same_plan(plan: ShardingPlan, group: dist.ProcessGroup | None) -> None:
    """Check that all ranks of ``group`` hold the same plan. Collective.

    Raises:
        ValueError: the plans differ; raised with the same message on every rank.
    """
    if group is None or group.size() == 1:
        return
    mine = torch.frombuffer(bytearray.fromhex(plan.digest()), dtype=torch.uint8).to(group_device(group))
    digests = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(digests, mine, group=group)
    if all(torch.equal(digests[0], digest) for digest in digests):
        return
    # All ranks see the same digests, so all of them come here.
    parts = {(path, table): sharding.digest() for path, table, sharding in plan.tables()}
    everyone: list[Any] = [None] * group.size()
    dist.all_gather_object(everyone, parts, group=group)
    raise ValueError(_difference(everyone))


def _difference(everyone: Sequence[Mapping[tuple[str, str], str]]) -> str:
    for rank, other in enumerate(everyone):
        for key in sorted({*everyone[0], *other}):
            if everyone[0].get(key) != other.get(key):
                path, table = key
                holders = [f"rank {r}" for r in (0, rank) if key not in everyone[r]]
                what = (
                    f"it is missing on {holders[0]}"
                    if holders
                    else f"ranks 0 and {rank} place it differently"
                )
                return (
                    f"the ranks hold different plans: table {table!r} of module {path!r}: {what}. Make the "
                    "plan on one rank and broadcast it (EmbeddingShardingPlanner.collective_plan does)."
                )
    raise AssertionError("digests differ, plans do not")
