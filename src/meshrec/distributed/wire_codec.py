"""Encode a module's embeddings or gradients for messages between ranks, and warn of infinity and NaN."""

import logging
import operator
import zlib
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate, compress
from typing import TYPE_CHECKING

from torch import Tensor

from meshrec.comms.encoding import Block, Columns, RowEncoding
from meshrec.comms.mesh import Axis
from meshrec.comms.wire import WireFormat, WireFormats
from meshrec.distributed.pieces import Span
from meshrec.distributed.routing import Routing

if TYPE_CHECKING:
    from meshrec.distributed.error_feedback import ErrorFeedback, Names

_logger = logging.getLogger("meshrec")
# Stochastic rounding is seeded by a key per row. Every rank has 2**40 separate keys, so rows on different
# ranks draw different random numbers.
_RANK_KEYS = 1 << 40
# The encoding kernel reports infinity and NaN. On a GPU, only every 256th report is read, because reading
# waits for the device.
_READ_EVERY = 256

# Directions: embeddings in the forward pass, gradients in the backward pass.
FORWARD, BACKWARD = 0, 1
_PAYLOADS = ("embeddings", "gradients")


def first_key(rank: int) -> int:
    """Return the key that seeds stochastic rounding for the first row which a rank requests.

    The rank's further rows have the next keys. Different ranks have different keys.
    """
    return rank * _RANK_KEYS


class Codec:
    """Encoder and decoder of a module's embeddings (FORWARD) or gradients (BACKWARD) in messages.

    Args:
        routing: the compiled plan.
        wires: wire formats for embeddings and gradients, by table number.
        direction: ``FORWARD`` or ``BACKWARD``.
        clock: function which returns the table update count so far. The count seeds stochastic rounding.
    """

    def __init__(
        self, routing: Routing, wires: Sequence[WireFormats], direction: int, clock: Callable[[], int]
    ) -> None:
        # The clock is read again for every message, because updates advance it.
        self._routing, self._direction, self._clock = routing, direction, clock
        # By table number.
        self._formats: list[WireFormat] = [pair[direction] for pair in wires]
        # Only tables split over ranks send rows.
        split = list(compress(self._formats, map(operator.not_, routing.replicated)))
        # Data-parallel tables send no rows, but without any other table the encoding needs some format.
        self.encoding = RowEncoding.from_formats(split or self._formats)
        # Lives for the whole run, so that a column is reported once.
        self._watch = _NonFiniteWatch(_PAYLOADS[direction])
        self.feedback: ErrorFeedback | None = None
        """Rounding errors of the rows this rank has sent; None if no format uses error feedback."""
        if any(wire_format.feedback for wire_format in split):
            from meshrec.distributed import error_feedback

            self.feedback = error_feedback.ErrorFeedback()
        self.draws = any(wire_format.stochastic for wire_format in split)
        """Whether some format uses stochastic rounding."""

    def encodes(self, axis: Axis) -> bool:
        """Return whether messages between the ranks on ``axis`` are encoded in a separate pass.

        If not, the lookup kernels read and write the message dtype, or nothing is sent.
        """
        return axis.group is not None and axis.size > 1 and not self.encoding.is_cast

    def columns(self, spans: Sequence[Span], first_rows: Sequence[int] | None = None) -> Columns:
        """Return the layout of a message row: width, format and rounding seed of every column.

        Args:
            spans: result columns of every part of the row. A part becomes a column of the message.
            first_rows: first table row of every part, if the parts are partial sums. Parts with different
                first rows draw different random numbers for rounding. None: 0 for all parts.
        """
        routing, starts = self._routing, self._routing.columns
        # The use to which a result column belongs.
        uses = [bisect_right(starts, span.column, hi=len(starts) - 1) - 1 for span in spans]
        names = [
            f"table {routing.tables[routing.uses[use].table].name!r}, feature {routing.uses[use].feature!r}"
            for use in uses
        ]
        rows = first_rows or [0] * len(spans)
        return Columns(
            widths=tuple(span.width for span in spans),
            formats=tuple(self._formats[routing.uses[use].table] for use in uses),
            seeds=tuple(
                # Seeds come from names instead of numbers, so they do not depend on the order of tables.
                zlib.crc32(f"{name}, {_PAYLOADS[self._direction]}, {row}".encode())
                for name, row in zip(names, rows, strict=True)
            ),
            origins=tuple(span.column - starts[use] for span, use in zip(spans, uses, strict=True)),
            names=tuple(names),
            uses=tuple(uses),
        )

    def encode(
        self,
        values: Tensor,
        blocks: Sequence[Block],
        *,
        keys: Tensor | None = None,
        names: "Names | None" = None,
    ) -> Tensor:
        """Encode rows into a message.

        Args:
            values: rows, flat, block by block.
            blocks: row count and columns for every block.
            keys: key for every row, which seeds stochastic rounding. None: consecutive keys from every
                block's ``first_key``.
            names: function which returns bag names for error feedback; see `Names`. None: no feedback.
        """
        # The step is part of the seed, so rounding errors differ from step to step.
        step = self._clock() if self.draws else 0
        feedback = self.feedback if names is not None else None
        if feedback is not None and names is not None:
            values = feedback.add_residuals(values, blocks, names)
        message, report = self.encoding.encode(values, blocks, step=step, keys=keys)
        if report is not None:
            # Reading the report waits for the device, see ``_READ_EVERY``.
            self._watch.warn(report, blocks)
        if feedback is not None:
            # Decoded as the receiver does it, so the stored errors are exact.
            feedback.store_errors(values, self.encoding.decode(message, blocks))
        return message

    def decode(self, message: Tensor, blocks: Sequence[Block]) -> Tensor:
        """Decode a message to rows, flat, block by block."""
        return self.encoding.decode(message, blocks)


class _NonFiniteWatch:
    """Warnings about infinity or NaN in messages, logged at most once per table and feature.

    Args:
        content: what messages contain, "embeddings" or "gradients".
    """

    def __init__(self, content: str) -> None:
        self._content = content
        # Names of the columns with a warning, for the whole run.
        self._warned: set[str] = set()
        # Number of GPU reports since the last one that was read.
        self._unread = 0

    def warn(self, report: Tensor, blocks: Sequence[Block]) -> None:
        """Log a warning if the encoding kernel has found infinity or NaN.

        Args:
            report: number of (row, column) pairs with such values, and the index of the first such value;
                int64 [2].
        """
        if not report.is_cpu:
            self._unread = (self._unread + 1) % _READ_EVERY
            if self._unread:
                return
        num_pairs, element = report.tolist()
        if not num_pairs:
            return
        # End of every block among the values in the message.
        ends = list(accumulate(block.num_rows * block.columns.width for block in blocks))
        number = bisect_right(ends, element)
        block = blocks[number]
        start = ends[number] - block.num_rows * block.columns.width
        row, column = divmod(element - start, block.columns.width)
        starts = list(accumulate(block.columns.widths, initial=0))
        name = block.columns.names[bisect_right(starts, column) - 1]
        # A message per column and run is enough; damaged weights would fill the log.
        if name in self._warned:
            return
        self._warned.add(name)
        _logger.warning(
            "%s: %s for row %d of rank %d's batch hold infinity or NaN, the first of %d pairs of row and "
            "column in a message. They arrive as such. Look for a learning rate that is too high, or for "
            "damaged weights: `meshrec inspect` and torch.autograd.set_detect_anomaly show where they begin.",
            name,
            self._content,
            row,
            block.first_key // _RANK_KEYS,
            num_pairs,
        )
