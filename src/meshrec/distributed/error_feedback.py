"""Error feedback: what rounding took from a bag's gradient is added to the next gradient of that bag.

A row of gradients has no name of its own, but its bag has one: a hash of the bag's IDs. So the sender keeps
one residual for each bag and use, and the sum of all gradients that it has sent for a bag differs from the
true sum by one residual at most (Seide et al., "1-bit stochastic gradient descent", 2014).

Where a bag occurs several times in a batch, its first row takes the residual, and the errors of all its rows
are kept. Memory is bounded: ``CAPACITY`` bags for each column. Beyond it, the bags that have not been seen
for longest lose their residuals, as if they had been rounded without feedback; one log line says so.
Checkpoints contain the residuals of each rank (``checkpoint/residuals.py``), so a run that resumes under the
same plan rounds as the first run did.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from meshrec.comms.encoding import Block
from meshrec.distributed.input_dist import SourceIds

Names = Callable[[int, int], Tensor]
"""Return the name of the bag of each row, int64 [N], given the block's number and the use."""

# N rows of a column, K kept bags, D values of a column

_logger = logging.getLogger("meshrec")
CAPACITY = 1 << 16
"""The largest number of bags with a residual, for each column."""


class _Residuals(NamedTuple):
    """The residuals of one column, by bag."""

    bags: Tensor
    """int64 [K], ascending."""
    residuals: Tensor
    """fp32 [K, D]."""
    seen: Tensor
    """int64 [K]: the message in which each bag came last."""


class _ColumnRows(NamedTuple):
    """The rows of one column of a message."""

    column: tuple[int, int]
    """The block's number and the column's."""
    bags: Tensor
    """int64 [U]: the distinct bags, ascending."""
    which: Tensor
    """int64 [N]: the bag of each row."""


class ErrorFeedback:
    """The residuals of one module on the rank that sends its gradients."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int], _Residuals] = {}
        self._messages = 0
        self._rows: list[_ColumnRows] = []
        self._is_told = False
        self._blocks: Sequence[Block] = ()

    def corrected(self, values: Tensor, blocks: Sequence[Block], names: Names) -> Tensor:
        """Return the rows with the residuals of their bags.

        Args:
            values: the rows, fp32, flat, block by block.
            blocks: their shapes.
            names: the names of the bags.
        """
        self._messages += 1
        self._rows, self._blocks = [], blocks
        values = values.clone()
        for number, (block, part) in enumerate(self._parts(values)):
            at = 0
            for c, (use, width) in enumerate(zip(block.columns.uses, block.columns.widths, strict=True)):
                if block.columns.formats[c].feedback:
                    rows = _ColumnRows((number, c), *torch.unique(names(number, use), return_inverse=True))
                    self._add(rows, part[:, at : at + width])
                    self._rows.append(rows)
                at += width
        return values

    def keep(self, values: Tensor, decoded: Tensor) -> None:
        """Keep what the receiver does not get: ``values`` less ``decoded``."""
        lost = values - decoded
        # A value that is not finite arrives as such, and must not come back in later steps.
        lost = torch.where(lost.isfinite(), lost, 0.0)
        parts = list(self._parts(lost))
        for rows in self._rows:
            number, c = rows.column
            block, part = parts[number]
            at = sum(block.columns.widths[:c])
            own = part[:, at : at + block.columns.widths[c]]
            sums = own.new_zeros(len(rows.bags), own.shape[1]).index_add_(0, rows.which, own)
            self._merge(rows, sums)
        self._rows, self._blocks = [], ()

    def state(self) -> dict[str, Tensor]:
        """Return the residuals by name, see ``load``. ``seen`` counts messages back from now."""
        return {
            f"{block}.{column}.{field}": tensor
            for (block, column), kept in self._kept.items()
            if len(kept.bags)
            for field, tensor in kept._replace(seen=kept.seen - self._messages)._asdict().items()
        }

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Replace all residuals by those that ``state`` returned."""
        columns: dict[tuple[int, int], dict[str, Tensor]] = {}
        for name, tensor in state.items():
            block, column, field = name.split(".")
            columns.setdefault((int(block), int(column)), {})[field] = tensor
        self._kept = {place: _Residuals(**fields) for place, fields in columns.items()}
        self._messages = 0

    def _parts(self, values: Tensor) -> list[tuple[Block, Tensor]]:
        """Return each block with its rows, [num_rows, width]."""
        parts, start = [], 0
        for block in self._blocks:
            end = start + block.num_rows * block.columns.width
            parts.append((block, values.view(-1)[start:end].view(block.num_rows, block.columns.width)))
            start = end
        return parts

    def _add(self, rows: _ColumnRows, numbers: Tensor) -> None:
        kept = self._kept.get(rows.column)
        if kept is None or not len(kept.bags) or not len(rows.which):
            return
        place = torch.searchsorted(kept.bags, rows.bags).clamp(max=len(kept.bags) - 1)
        known = kept.bags[place] == rows.bags
        order = torch.arange(len(rows.which), device=numbers.device)
        first = torch.full_like(rows.bags, len(order)).scatter_reduce_(0, rows.which, order, "amin")
        numbers[first[known]] += kept.residuals[place[known]]

    def _merge(self, rows: _ColumnRows, sums: Tensor) -> None:
        seen = torch.full_like(rows.bags, self._messages)
        kept = self._kept.get(rows.column)
        if kept is not None:
            others = ~torch.isin(kept.bags, rows.bags)
            bags = torch.cat([kept.bags[others], rows.bags])
            order = bags.argsort()
            sums = torch.cat([kept.residuals[others], sums])[order]
            seen = torch.cat([kept.seen[others], seen])[order]
            rows = rows._replace(bags=bags[order])
        bags = rows.bags
        if len(bags) > CAPACITY:
            if not self._is_told:
                self._is_told = True
                _logger.warning(
                    "error feedback remembers %d bags of a column, and a column has more: those that have "
                    "not been seen for longest are rounded without it.",
                    CAPACITY,
                )
            newest = seen.argsort(descending=True, stable=True)[:CAPACITY].sort().values
            bags, sums, seen = bags[newest], sums[newest], seen[newest]
        self._kept[rows.column] = _Residuals(bags, sums, seen)


def bag_names(source: SourceIds, use: int) -> Tensor:
    """Return a hash of the IDs of each bag that a use reads, int64 [B]."""
    bounds, key = source.bag_bounds(), source.keys[use]
    offsets = source.offsets[bounds[key] : bounds[key + 1] + 1].long()
    if not len(offsets):
        return offsets
    x = source.values[int(offsets[0]) : int(offsets[-1])].long() + 1
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    sums = torch.nn.functional.pad((x ^ ((x >> 31) & 0x1FFFFFFFF)).cumsum(0), (1, 0))
    return sums[offsets[1:] - offsets[0]] - sums[offsets[:-1] - offsets[0]]
