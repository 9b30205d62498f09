"""Norms and means over whole rows, for tables whose columns lie on several ranks.

The ranks that hold the same rows of a table got the same ids, so they touch the same rows in the same order,
and their partial sums line up without an id being sent. One all-to-all of a few numbers per touched row
brings them together; PartialRowWiseLAMB needs two, because its second moment comes before its norm.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from meshrec.comms.collectives import Splits, all_to_all
from meshrec.comms.phase_clock import OFF, phase, recorders
from meshrec.distributed.routing import Rectangle, Routing
from meshrec.ops.tbe import naive_update
from meshrec.ops.tbe.naive_update import Hyper, Rows
from meshrec.plan.mesh import Axis

# U touched rows, D columns of the rectangle

_GRADIENT, _WEIGHT, _STEP = 0, 1, 2
_GRADIENT_ONLY = frozenset({naive_update.ROWWISE_ADAGRAD, naive_update.PARTIAL_ROWWISE_ADAM})

ROW_WISE = frozenset(
    {
        naive_update.ROWWISE_ADAGRAD,
        naive_update.PARTIAL_ROWWISE_ADAM,
        naive_update.LAMB,
        naive_update.PARTIAL_ROWWISE_LAMB,
        naive_update.LARS,
    }
)
"""The codes of the optimizers that need whole rows."""


class Touched(NamedTuple):
    """The touched rows of one rectangle: ``rows`` int64 [U], ``grad`` and ``weight`` fp32 [U, D], the
    state's rows; weight and state are empty where the sums are of the gradient alone
    (``needs_gradient_only``).
    """

    rows: Tensor
    grad: Tensor
    weight: Tensor
    slots: list[Tensor]


def needs_gradient_only(optimizer: int, hyper: Hyper) -> bool:
    """Whether the sums over a row are those of its squared gradient alone."""
    return optimizer in _GRADIENT_ONLY and hyper.decay_mode != naive_update.L2_DECAY


class ColumnPeers:
    """Who holds other columns of the same rows, for the tables of one fused group, over all ranks.

    ``tables``: the tables of the group; every rank must name the same. They were compiled for whole rows (see
    ``compile_plan``).
    """

    def __init__(self, routing: Routing, axis: Axis, tables: Sequence[int]) -> None:
        self._axis = axis
        self._bands: list[list[_Band]] = []
        """For each rank the bands of rows it has columns of."""
        for work in routing.work:
            chosen = [rectangle for rectangle in work.rectangles if rectangle.table in tables]
            self._bands.append(sorted({_band(rectangle) for rectangle in chosen}))
        own = routing.work[axis.rank].rectangles
        self._own = [_band(rectangle) for rectangle in own if rectangle.table in tables]

    def summed(self, partial: Sequence[Tensor]) -> list[Tensor]:
        """For each own rectangle of the group its [U, S] sums, added over all columns of its rows.

        Parts are added in the order of ranks, so that all ranks get the same bits.
        """
        mine: dict[_Band, Tensor] = {}
        for band, part in zip(self._own, partial, strict=True):
            mine[band] = mine[band] + part if band in mine else part
        shared = [
            [band for band in bands if band in mine and rank != self._axis.rank]
            for rank, bands in enumerate(self._bands)
        ]
        sizes = [sum(mine[band].numel() for band in bands) for bands in shared]
        parts = [mine[band].reshape(-1) for bands in shared for band in bands]
        sent = torch.cat(parts) if parts else torch.empty(0)
        received = all_to_all(sent, Splits(sizes, sizes), self._axis, "row statistics").wait()
        total: dict[_Band, Tensor] = {}
        for rank, (bands, piece) in enumerate(zip(shared, received.split(sizes), strict=True)):
            terms = dict(zip(bands, piece.split([mine[band].numel() for band in bands]), strict=True))
            for band in mine if rank == self._axis.rank else bands:
                term = mine[band] if rank == self._axis.rank else terms[band].view_as(mine[band])
                total[band] = total[band] + term if band in total else term
        return [total[band] for band in self._own]

    def mean_squares(self, squares: Tensor, counts: Sequence[int], row_dims: Sequence[int]) -> Tensor:
        """fp32 [sum of U]: the means of squared gradients over whole rows, from the sums over the columns of
        each own rectangle, in order, which has ``counts`` rows of ``row_dims`` columns.
        """
        with phase("row_stats") if recorders else OFF:
            sums = self.summed(squares.split(counts))
            means = [each / dim for each, dim in zip(sums, row_dims, strict=True)]
            return torch.cat([squares[:0], *means])  # there may be none

    def row_stats(self, touched: Sequence[Touched], optimizer: int, hyper: Sequence[Hyper]) -> list[Tensor]:
        """For each own rectangle what ``tbe_update`` takes as ``row_stats``: fp32 [U, 3]."""
        with phase("row_stats") if recorders else OFF:
            return self._row_stats(touched, optimizer, hyper)

    def _row_stats(self, touched: Sequence[Touched], optimizer: int, hyper: Sequence[Hyper]) -> list[Tensor]:
        if optimizer in _GRADIENT_ONLY:
            own = [_gradient_squares(rows, h)[:, None] for rows, h in zip(touched, hyper, strict=True)]
            return [torch.nn.functional.pad(squares, (0, 2)) for squares in self.summed(own)]
        first = [_first_sums(rows, optimizer, h) for rows, h in zip(touched, hyper, strict=True)]
        if optimizer != naive_update.PARTIAL_ROWWISE_LAMB:
            return self.summed(first)
        whole = self.summed(first)
        steps = []
        for rows, h, stats in zip(touched, hyper, whole, strict=True):
            steps.append(_squares(_lamb_step(rows, h, stats))[:, None])
        for stats, step in zip(whole, self.summed(steps), strict=True):
            stats[:, _STEP] = step[:, 0]
        return whole


class _Band(NamedTuple):
    table: int
    r0: int
    r1: int


def _band(rectangle: Rectangle) -> _Band:
    return _Band(rectangle.table, rectangle.r0, rectangle.r1)


def _squares(x_UD: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(x_UD, dim=1)  # one pass: half the time of squares and their sum
    return norms.square_()


def _gradient_squares(touched: Touched, h: Hyper) -> Tensor:
    rows = Rows(touched.weight, touched.grad, touched.slots, None)
    return _squares(naive_update.decayed_gradient(rows, h))


def _first_sums(touched: Touched, optimizer: int, h: Hyper) -> Tensor:
    """[U, 3]: the sums over this rectangle's columns, the last one only where it needs no other sum first."""
    rows = Rows(touched.weight, touched.grad, touched.slots, None)
    stats = touched.grad.new_zeros(touched.grad.shape[0], 3)
    lars = optimizer == naive_update.LARS
    stats[:, _GRADIENT] = _squares(touched.grad if lars else naive_update.decayed_gradient(rows, h))
    stats[:, _WEIGHT] = _squares(touched.weight)
    if optimizer == naive_update.LAMB:
        stats[:, _STEP] = _squares(_lamb_step(touched, h, None))
    return stats


def _lamb_step(touched: Touched, h: Hyper, stats: Tensor | None) -> Tensor:
    """The step of LAMB before the trust ratio, from copies of the state."""
    rows = Rows(touched.weight, touched.grad, [slot.clone() for slot in touched.slots], stats)
    step = naive_update.moments_step(rows, h)
    if h.decay_mode == naive_update.DECOUPLED_DECAY:
        step = step + h.weight_decay * touched.weight
    return step
