"""The return of gradients of per-sample weights, from the ranks that looked IDs up to the rank that sent
them.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

import meshrec.ops.dist  # noqa: F401 - the ops must exist
from meshrec.comms.collectives import Splits, all_to_all
from meshrec.comms.mesh import Axis
from meshrec.distributed.input_dist import SourceIds
from meshrec.distributed.routing import Routing

# N ids of this rank, R ranks


class WeightGrads:
    """The return of gradients of per-sample weights for one module."""

    def __init__(self, routing: Routing, axis: Axis) -> None:
        self._router, self._axis = routing.router, axis
        self._routes_per_rank = [len(work.routes) for work in routing.work]

    def send_home(self, by_rank: Sequence[Tensor], local: Tensor | None, source: SourceIds) -> Tensor:
        """Return, for each ID of this rank, the sum over all of its lookups, fp32 [N]. Collective.

        ``by_rank``: the gradients of the IDs that each rank sent here, in the order of its message.
        ``local``: those of the data-parallel tables.
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
