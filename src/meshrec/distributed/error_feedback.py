"""Error feedback: add the rounding error in a bag's encoded gradient to the next gradient for the same bag.

Gradients are rounded when they are encoded for a message between ranks. Two bags are the same if they have
the same IDs; a hash of the IDs is the bag's name. The sender stores the rounding error, called residual, per
bag and wire column. A wire column is the part of a message row that belongs to one lookup. The sum of all
gradients sent for a bag therefore differs from the true sum by at most one residual (Seide et al., "1-bit
stochastic gradient descent", 2014).

If a bag occurs several times in a batch, the residual is added to the first of its rows, and the errors in
all rows are summed. At most ``CAPACITY`` bags per column have residuals. Beyond the limit, the residuals for
the least recently seen bags are dropped, and a log line reports this once. Checkpoints contain the
residuals on all ranks (``checkpoint/residuals.py``), so a run resumed under the same plan rounds like the
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
"""Function from (block number, use) to the bag name (a hash) for every row in a wire column, int64 [N]. A
block is a run of rows in the message; a use is a feature looked up in a table.
"""

# N: rows in a column, K: bags with a residual, D: values in a column

_logger = logging.getLogger("meshrec")
CAPACITY = 1 << 16
"""Maximum number of bags with a residual, per wire column."""


class _Residuals(NamedTuple):
    """Residuals for all bags in a wire column, the part of a message row that belongs to one lookup."""

    bags: Tensor
    """Bag names, int64 [K], ascending."""
    residuals: Tensor
    """Rounding errors, fp32 [K, D]."""
    seen: Tensor
    """Number of the last message that contained the bag, int64 [K]. Used to drop the oldest bags."""


class _ColumnRows(NamedTuple):
    """Bags to which the rows of a message belong, for a single wire column."""

    column: tuple[int, int]
    """(block number, column number)."""
    bags: Tensor
    """Distinct bag names, int64 [U], ascending."""
    which: Tensor
    """Index into ``bags`` for every row, int64 [N]."""


class ErrorFeedback:
    """Store of a module's residuals, the rounding errors per bag, on the rank which sends the gradients.

    For every message, call ``add_residuals``, encode and decode the result, and call ``store_errors``.
    """

    def __init__(self) -> None:
        # By (block, column). Lives for the whole run; checkpoints save it.
        self._residuals: dict[tuple[int, int], _Residuals] = {}
        # Message count so far, the clock for ``_Residuals.seen``.
        self._messages = 0
        # Set by ``add_residuals``, consumed by ``store_errors`` for the same message.
        self._rows: list[_ColumnRows] = []
        self._has_warned = False
        # Blocks in the message between both calls.
        self._blocks: Sequence[Block] = ()

    def add_residuals(self, values: Tensor, blocks: Sequence[Block], names: Names) -> Tensor:
        """Return a copy of gradient rows to which the residuals of earlier messages are added.

        Args:
            values: gradient rows, fp32, flat, block by block.
            blocks: row count and columns of every block.
            names: function from (block number, use) to the bag name for every row; see `Names`.
        """
        self._messages += 1
        self._rows, self._blocks = [], blocks
        # A copy, because autograd may use the caller's gradient elsewhere.
        values = values.clone()
        for number, (block, part) in enumerate(self._split_blocks(values)):
            # First value of the column in a row.
            at = 0
            for c, (use, width) in enumerate(zip(block.columns.uses, block.columns.widths, strict=True)):
                # Tables in a module may have different formats, and not all use error feedback.
                if block.columns.formats[c].feedback:
                    rows = _ColumnRows((number, c), *torch.unique(names(number, use), return_inverse=True))
                    self._add_to_rows(rows, part[:, at : at + width])
                    self._rows.append(rows)
                at += width
        return values

    def store_errors(self, values: Tensor, decoded: Tensor) -> None:
        """Store the rounding errors ``values - decoded`` as new residuals for the bags in the message."""
        # ``values`` include the previous residual, so the new error replaces it.
        lost = values - decoded
        # Infinity and NaN arrive unchanged; as residuals they would spoil all later gradients.
        lost = torch.where(lost.isfinite(), lost, 0.0)
        parts = list(self._split_blocks(lost))
        for rows in self._rows:
            number, c = rows.column
            block, part = parts[number]
            at = sum(block.columns.widths[:c])
            errors = part[:, at : at + block.columns.widths[c]]
            # A bag may occur several times in the message, and only the sum of its errors is kept.
            sums = errors.new_zeros(len(rows.bags), errors.shape[1]).index_add_(0, rows.which, errors)
            self._merge(rows, sums)
        self._rows, self._blocks = [], ()

    def state(self) -> dict[str, Tensor]:
        """Return all residuals for a checkpoint, as tensors named "block.column.field".

        The field ``seen`` counts messages from the last message: it is 0 for bags in the last message, and
        negative for bags which occurred only in earlier messages.
        """
        return {
            f"{block}.{column}.{field}": tensor
            for (block, column), state in self._residuals.items()
            if len(state.bags)
            for field, tensor in state._replace(seen=state.seen - self._messages)._asdict().items()
        }

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Replace all residuals by the result of ``state()``, such as from a checkpoint."""
        columns: dict[tuple[int, int], dict[str, Tensor]] = {}
        for name, tensor in state.items():
            block, column, field = name.split(".")
            columns.setdefault((int(block), int(column)), {})[field] = tensor
        self._residuals = {column: _Residuals(**fields) for column, fields in columns.items()}
        # Loaded values of ``seen`` are at most 0, so they are older than every later message.
        self._messages = 0

    def _split_blocks(self, values: Tensor) -> list[tuple[Block, Tensor]]:
        """Split flat values into pairs (block, its rows as a view [num_rows, width])."""
        parts, start = [], 0
        for block in self._blocks:
            end = start + block.num_rows * block.columns.width
            parts.append((block, values.view(-1)[start:end].view(block.num_rows, block.columns.width)))
            start = end
        return parts

    def _add_to_rows(self, rows: _ColumnRows, values: Tensor) -> None:
        """Add the stored residuals to ``values`` [N, D] in place, at the first row of every bag."""
        previous = self._residuals.get(rows.column)
        if previous is None or not len(previous.bags) or not len(rows.which):
            return
        positions = torch.searchsorted(previous.bags, rows.bags).clamp(max=len(previous.bags) - 1)
        # searchsorted returns an insertion point, which may belong to another bag.
        is_seen = previous.bags[positions] == rows.bags
        # The first row by position takes the residual: adding it to every row would count it twice.
        order = torch.arange(len(rows.which), device=values.device)
        first = torch.full_like(rows.bags, len(order)).scatter_reduce_(0, rows.which, order, "amin")
        values[first[is_seen]] += previous.residuals[positions[is_seen]]

    def _merge(self, rows: _ColumnRows, sums: Tensor) -> None:
        """Store ``sums`` [U, D] as the residuals for the bags in ``rows``. Other bags keep their residuals.

        If there are more than ``CAPACITY`` bags, drop the least recently seen bags.
        """
        seen = torch.full_like(rows.bags, self._messages)
        previous = self._residuals.get(rows.column)
        if previous is not None:
            # Bags which are not in this message keep their residuals.
            is_other = ~torch.isin(previous.bags, rows.bags)
            bags = torch.cat([previous.bags[is_other], rows.bags])
            # Ascending, as searchsorted requires.
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
    """Return a hash for every bag of a feature, int64 [B]. It depends on the IDs, but not on their order."""
    bounds, key = source.bag_bounds(), source.keys[use]
    offsets = source.offsets[bounds[key] : bounds[key + 1] + 1].long()
    if not len(offsets):
        return offsets
    # ``+ 1``, because the finalizer maps 0 to 0, and ID 0 would not change the sum.
    x = source.values[int(offsets[0]) : int(offsets[-1])].long() + 1
    # splitmix64 finalizer. The masks turn the arithmetic shift into a logical shift.
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    # The sum over a bag does not depend on ID order. int64 prefix sums may wrap around; differences
    # are exact.
    sums = torch.nn.functional.pad((x ^ ((x >> 31) & 0x1FFFFFFFF)).cumsum(0), (1, 0))
    return sums[offsets[1:] - offsets[0]] - sums[offsets[:-1] - offsets[0]]
