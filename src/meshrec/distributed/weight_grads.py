"""Brings gradients of per-sample weights home: from the ranks that looked the ids up to the one that gave
them, on the reverse of the ids' way.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

import meshrec.ops.dist  # noqa: F401 - the ops must exist
from meshrec.comms.collectives import Splits, all_to_all
from meshrec.distributed.input_dist import SourceIds
from meshrec.distributed.routing import Routing
from meshrec.plan.mesh import Axis

# N ids of this rank, R ranks


class WeightGrads:
    """The way back of one module."""

    def __init__(self, routing: Routing, axis: Axis) -> None:
        self._router, self._axis = routing.router, axis
        self._routes_per_rank = [len(work.routes) for work in routing.work]

    def send_home(self, by_rank: Sequence[Tensor], local: Tensor | None, source: SourceIds) -> Tensor:
        """fp32 [N]: for each id of this rank the sum over all places where it was looked up. Collective.

        ``by_rank``: for every rank the gradients of the ids it sent here, in the order of its message.
        ``local``: those of the tables that every rank holds.
        """
        *routes, _ = source.counts.split(
            [*self._routes_per_rank, source.counts.numel() - sum(self._routes_per_rank)]
        )
        splits = Splits([part.numel() for part in by_rank], [int(counts.sum()) for counts in routes])
        received = all_to_all(torch.cat(list(by_rank)), splits, self._axis, "gradients of weights").wait()
        return torch.ops.meshrec.gather_weight_grads.default(  # type: ignore[no-any-return]
            received if local is None else torch.cat([received, local]),
            source.values,
            source.offsets,
            source.segments,
            source.num_keys,
            source.keys,
            self._router,
            source.counts,
        )
