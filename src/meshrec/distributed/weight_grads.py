"""Return path for per-sample weight gradients, from the lookup ranks to the rank that sent the IDs."""

from collections.abc import Sequence

import torch
from torch import Tensor

import meshrec.ops.dist  # noqa: F401 - the ops must exist
from meshrec.comms.collectives import Splits, all_to_all
from meshrec.comms.mesh import Axis
from meshrec.distributed.lookup_batch import SourceIds
from meshrec.distributed.routing import Routing
from meshrec.ops import operators

# N: IDs on this rank, R: ranks


class WeightGrads:
    """Return path for a module's per-sample weight gradients."""

    def __init__(self, routing: Routing, axis: Axis) -> None:
        self._router, self._axis = routing.router, axis
        self._routes_per_rank = [len(work.routes) for work in routing.work]

    def send_home(self, by_rank: Sequence[Tensor], local: Tensor | None, source: SourceIds) -> Tensor:
        """Return the gradient per local ID, summed over all lookups of that ID, fp32 [N]. Collective.

        Args:
            by_rank: gradients by the rank that sent the IDs here, in message order.
            local: gradients from the data-parallel tables; None if there are none.
            source: this rank's IDs.
        """
        *routes, _ = source.counts.split(
            [*self._routes_per_rank, source.counts.numel() - sum(self._routes_per_rank)]
        )
        splits = Splits([part.numel() for part in by_rank], [int(counts.sum()) for counts in routes])
        received = all_to_all(torch.cat(list(by_rank)), splits, self._axis, "gradients of weights").wait()
        return operators.gather_weight_grads(  # type: ignore[no-any-return]
            received if local is None else torch.cat([received, local]),
            source.values,
            source.offsets,
            source.segments,
            source.num_keys,
            source.keys,
            self._router,
            source.counts,
        )
