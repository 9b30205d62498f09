"""Error feedback: add a bag's rounding error to the next gradient for that bag.

A gradient row has no identity, but the bag has: a hash over the bag's IDs. The sender keeps a residual
per bag and use, so the accumulated gradients sent for a bag differ from the true sum by at most one residual
(Seide et al., "1-bit stochastic gradient descent", 2014).

If a bag occurs several times in a batch, the first row takes the residual, and the errors from all rows are
summed. Memory is bounded at ``CAPACITY`` bags per column. Beyond that limit, the least recently seen bags
lose their residuals, as if rounded without feedback, and a single log line reports this. Checkpoints contain
the residuals per rank (``checkpoint/residuals.py``), so a run resumed under the same plan rounds as the
original run.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from meshrec.comms.encoding import Block
from meshrec.distributed.lookup_batch import SourceIds

Names = Callable[[int, int], Tensor]
"""Returns a bag name per row, int64 [N], from the block number and the use."""

# N: rows in a column, K: bags with a residual, D: values in a column

_logger = logging.getLogger("meshrec")
CAPACITY = 1 << 16
"""Maximum bags with a residual, per column."""


class _Residuals(NamedTuple):
    """Residuals for a single column, by bag."""

    bags: Tensor
    """int64 [K], ascending."""
    residuals: Tensor
    """fp32 [K, D]."""
    seen: Tensor
    """int64 [K]: number of the last message with this bag."""


class _ColumnRows(NamedTuple):
    """Rows from a single column in a message."""

    column: tuple[int, int]
    """(block number, column number)."""
    bags: Tensor
    """int64 [U]: distinct bags, ascending."""
    which: Tensor
    """int64 [N]: index into ``bags``, by row."""


class ErrorFeedback:
    """Residuals for a module, on the rank that sends the gradients."""

    def __init__(self) -> None:
        # By (block, column). Lives for the whole run; checkpoints save it.
        self._residuals: dict[tuple[int, int], _Residuals] = {}
        self._messages = 0
        # Set by ``corrected``, consumed by ``keep`` for the same message.
        self._rows: list[_ColumnRows] = []
        self._has_warned = False
        self._blocks: Sequence[Block] = ()

    def corrected(self, values: Tensor, blocks: Sequence[Block], names: Names) -> Tensor:
        """Return the rows with their bags' residuals added.

        Args:
            values: rows, fp32, flat, block by block.
            blocks: block shapes.
            names: returns the bag names.
        """
        self._messages += 1
        self._rows, self._blocks = [], blocks
        # The caller's gradient must not change: autograd may use it elsewhere.
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
        """Store the rounding error, ``values`` minus ``decoded``, as the new residual.

        Args:
            values: the result from ``corrected``.
            decoded: the values that arrive at the receiver.
        """
        lost = values - decoded
        # A non-finite value arrives as such and must not come back in later steps.
        lost = torch.where(lost.isfinite(), lost, 0.0)
        parts = list(self._parts(lost))
        for rows in self._rows:
            number, c = rows.column
            block, part = parts[number]
            at = sum(block.columns.widths[:c])
            errors = part[:, at : at + block.columns.widths[c]]
            sums = errors.new_zeros(len(rows.bags), errors.shape[1]).index_add_(0, rows.which, errors)
            self._merge(rows, sums)
        self._rows, self._blocks = [], ()

    def state(self) -> dict[str, Tensor]:
        """Return the residuals by name for ``load``. ``seen`` counts messages backward from now."""
        return {
            f"{block}.{column}.{field}": tensor
            for (block, column), state in self._residuals.items()
            if len(state.bags)
            for field, tensor in state._replace(seen=state.seen - self._messages)._asdict().items()
        }

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Replace all residuals with a result from ``state``."""
        columns: dict[tuple[int, int], dict[str, Tensor]] = {}
        for name, tensor in state.items():
            block, column, field = name.split(".")
            columns.setdefault((int(block), int(column)), {})[field] = tensor
        self._residuals = {column: _Residuals(**fields) for column, fields in columns.items()}
        self._messages = 0

    def _parts(self, values: Tensor) -> list[tuple[Block, Tensor]]:
        """Return (block, rows [num_rows, width]) pairs."""
        parts, start = [], 0
        for block in self._blocks:
            end = start + block.num_rows * block.columns.width
            parts.append((block, values.view(-1)[start:end].view(block.num_rows, block.columns.width)))
            start = end
        return parts

    def _add(self, rows: _ColumnRows, values: Tensor) -> None:
        previous = self._residuals.get(rows.column)
        if previous is None or not len(previous.bags) or not len(rows.which):
            return
        positions = torch.searchsorted(previous.bags, rows.bags).clamp(max=len(previous.bags) - 1)
        is_seen = previous.bags[positions] == rows.bags
        # The first row by position takes the residual: adding it to every row would count it twice.
        order = torch.arange(len(rows.which), device=values.device)
        first = torch.full_like(rows.bags, len(order)).scatter_reduce_(0, rows.which, order, "amin")
        values[first[is_seen]] += previous.residuals[positions[is_seen]]

    def _merge(self, rows: _ColumnRows, sums: Tensor) -> None:
        seen = torch.full_like(rows.bags, self._messages)
        previous = self._residuals.get(rows.column)
        if previous is not None:
            is_other = ~torch.isin(previous.bags, rows.bags)
            bags = torch.cat([previous.bags[is_other], rows.bags])
            order = bags.argsort()
            sums = torch.cat([previous.residuals[is_other], sums])[order]
            seen = torch.cat([previous.seen[is_other], seen])[order]
            rows = rows._replace(bags=bags[order])
        bags = rows.bags
        if len(bags) > CAPACITY:
            if not self._has_warned:
                self._has_warned = True
                _logger.warning(
                    "error feedback remembers %d bags of a column, and a column has more: those that have "
                    "not been seen for longest are rounded without it.",
                    CAPACITY,
                )
            # LRU eviction. Sorting the positions afterward keeps ``bags`` ascending for searchsorted.
            newest = seen.argsort(descending=True, stable=True)[:CAPACITY].sort().values
            bags, sums, seen = bags[newest], sums[newest], seen[newest]
        self._residuals[rows.column] = _Residuals(bags, sums, seen)


def bag_names(source: SourceIds, use: int) -> Tensor:
    """Return a hash over the IDs in every bag that a use reads, int64 [B]."""
    bounds, key = source.bag_bounds(), source.keys[use]
    offsets = source.offsets[bounds[key] : bounds[key + 1] + 1].long()
    if not len(offsets):
        return offsets
    x = source.values[int(offsets[0]) : int(offsets[-1])].long() + 1
    # splitmix64 finalizer. The masks turn the arithmetic shift into a logical shift.
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    # A sum does not depend on the order within the bag. Prefix sums wrap around, which is harmless.
    sums = torch.nn.functional.pad((x ^ ((x >> 31) & 0x1FFFFFFFF)).cumsum(0), (1, 0))
    return sums[offsets[1:] - offsets[0]] - sums[offsets[:-1] - offsets[0]]
