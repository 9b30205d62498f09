"""Counters for IDs waiting for admission to a table, on one rank: exact, or in a count-min sketch."""

from collections.abc import Iterator

import torch
from torch import Tensor
from typing_extensions import override

from meshrec.ops.index import HashIndex, mix
from meshrec.tables.hashed.keys import (
    FIRST_KEY,
    Admission,
    Hashed,
    MinCount,
    MinCountSketch,
    Probability,
    bucket_of,
    first_keys,
)
from meshrec.tables.hashed.memory import GrowingRows
from meshrec.tables.table import Span

# Shape legend: N IDs, C cells per ID.

_CELLS = 4  # cells per ID
_WORD = 8  # cells per int64 word, the unit of checkpoints
_MOST = 255  # greatest cell count


class AdmissionCounts:
    """Occurrences of a rectangle's IDs without a row yet.

    This base class counts nothing. It serves policies admitting IDs at once or with a probability.

    Args:
        admission: policy; None: all IDs are admitted.
        seed: table seed.
    """

    def __init__(self, admission: Probability | None, seed: int) -> None:
        self._admission, self._seed = admission, seed

    def admits(self, keys: Tensor, counts: Tensor, step: int) -> Tensor | None:
        """Return which new IDs to admit, bool [N]. None: all.

        Args:
            keys: ID keys, ascending, int64 [N].
            counts: occurrences per ID in this update, int64 [N].
            step: update number.
        """
        if self._admission is None:
            return None
        return self._admission.admits(keys, counts, step, self._seed)

    def count(self, keys: Tensor, counts: Tensor, admitted: Tensor) -> None:
        """Add an update's occurrences, and forget admitted IDs.

        Args:
            keys: ID keys, ascending, int64 [N].
            counts: occurrences per ID in this update, int64 [N].
            admitted: which IDs are admitted, bool [N].
        """

    def stream(self, keys: Span | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield waiting IDs' keys, ascending, and their counts: both int64 [N].

        Args:
            keys: key interval; None: all keys.
        """
        yield from ()

    def load(self, keys: Tensor, counts: Tensor) -> None:
        """Add counts from ``stream``, perhaps on another rank or under another policy."""

    def early(self) -> float:
        """Estimate the fraction of new IDs admitted too early. 0 for exact counts."""
        return 0.0


class ExactCounts(AdmissionCounts):
    """Exact counts for waiting IDs, for ``MinCount``."""

    def __init__(self, k: int, seed: int, name: str) -> None:
        self._k = k
        most = (1 << 32) - 1
        self._slots = HashIndex(most, seed=seed, name=f"the waiting IDs of {name}")
        self._memory = GrowingRows([torch.zeros(1, dtype=torch.int64)], max_rows=most, name=name)

    def admits(self, keys: Tensor, counts: Tensor, step: int) -> Tensor:
        """Return which IDs reach ``k`` occurrences with this update, bool [N].

        Args:
            keys: ID keys, ascending, int64 [N].
            counts: occurrences per ID in this update, int64 [N].
            step: update number.
        """
        return self._so_far(keys) + counts >= self._k

    def count(self, keys: Tensor, counts: Tensor, admitted: Tensor) -> None:
        """Add waiting IDs' occurrences. An admitted ID restarts from 0 if it is evicted later.

        Args:
            keys: ID keys, ascending, int64 [N].
            counts: occurrences per ID in this update, int64 [N].
            admitted: which IDs are admitted, bool [N].
        """
        is_counted = self._slots.find(keys) >= 0
        if bool((is_finished := is_counted & admitted).any()):
            self._counts[self._slots.remove(keys[is_finished])] = 0
        waits = ~admitted
        self._add(keys[waits], counts[waits])

    @override
    def stream(self, keys: Span | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        all_keys, slots = self._slots.items()
        inside = in_span(all_keys, keys)
        yield all_keys[inside], self._counts[slots[inside]]

    @override
    def load(self, keys: Tensor, counts: Tensor) -> None:
        self._add(keys, counts)

    @property
    def _counts(self) -> Tensor:
        return self._memory.tensors[0]

    def _so_far(self, keys: Tensor) -> Tensor:
        """Return the present count per ID, int64 [N]."""
        slots = self._slots.find(keys)
        counts = torch.zeros_like(keys)
        counts[slots >= 0] = self._counts[slots[slots >= 0]]
        return counts

    def _add(self, keys: Tensor, counts: Tensor) -> None:
        """Add occurrences. Unknown IDs get a counter."""
        slots = self._slots.find(keys)
        new = slots < 0
        if bool(new.any()):
            slots[new] = self._slots.insert(keys[new])
            self._memory.grow(int(slots.max()) + 1)
            self._counts[slots[new]] = 0
        self._counts[slots] += counts


class CountMinSketch(AdmissionCounts):
    """Count-min sketch, for ``MinCountSketch``: one-byte cells, up to four per ID.

    Every key bucket (a plan "row") has ``num_cells`` cells, counting only IDs in the bucket.
    """

    def __init__(self, k: int, seed: int, *, rows: Span, max_rows: int, num_cells: int) -> None:
        self._k, self._seed, self._max_rows, self._num_cells = k, seed, max_rows, num_cells
        self._first = rows[0]
        self._cells = torch.zeros((rows[1] - rows[0]) * num_cells, dtype=torch.uint8)

    def admits(self, keys: Tensor, counts: Tensor, step: int) -> Tensor:
        """Return which IDs reach ``k`` with this update in all their cells, bool [N].

        Args:
            keys: ID keys, ascending, int64 [N].
            counts: occurrences per ID in this update, int64 [N].
            step: update number.
        """
        cells_NC, new_NC = self._cells_and_counts(keys, counts)
        return (self._cells[cells_NC].long() + new_NC).amin(1) >= self._k

    def count(self, keys: Tensor, counts: Tensor, admitted: Tensor) -> None:
        """Add an update's occurrences. A cell stops at 255.

        Args:
            keys: ID keys, ascending, int64 [N].
            counts: occurrences per ID in this update, int64 [N].
            admitted: unused: a sketch cannot remove an ID.
        """
        cells_NC, new_NC = self._cells_and_counts(keys, counts)
        self._cells[cells_NC] = (self._cells[cells_NC].long() + new_NC).clamp_(max=_MOST).byte()

    def stream(self, keys: Span | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield nonzero words (eight cells). Word i in a bucket has the bucket's i-th key."""
        words = self._cells.view(torch.int64)
        used = words.nonzero()[:, 0]
        per_row = self._num_cells // _WORD
        all_keys = first_keys(used // per_row + self._first, self._max_rows) + used % per_row
        inside = in_span(all_keys, keys)
        yield all_keys[inside], words[used[inside]]

    def load(self, keys: Tensor, counts: Tensor) -> None:
        """Copy words from ``stream`` to the cells. Words present only in a larger sketch are left out."""
        buckets = bucket_of(keys, self._max_rows)
        within = keys - first_keys(buckets, self._max_rows)
        fits = (within >= 0) & (within < self._num_cells // _WORD)
        words = self._cells.view(torch.int64)
        words[((buckets - self._first) * (self._num_cells // _WORD) + within)[fits]] = counts[fits]

    def early(self) -> float:
        """Return the probability for all cells of a new ID to be at ``k - 1`` or more already."""
        if self._cells.numel() == 0:
            return 0.0
        full = (self._cells >= self._k - 1).view(-1, self._num_cells).double().mean(1)
        return float((full ** min(_CELLS, self._num_cells)).mean())

    def _cells_and_counts(self, keys: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        """Return the cells per ID, [N, C], and the occurrences added per cell by the update."""
        bits = mix(keys, self._seed)
        first_cells = (bucket_of(keys, self._max_rows) - self._first) * self._num_cells
        offsets = [((bits >> (16 * c)) & 0xFFFF) % self._num_cells for c in range(_CELLS)]
        cells_NC = first_cells[:, None] + torch.stack(offsets, 1)
        distinct, inverse = torch.unique(cells_NC, return_inverse=True)
        sums = torch.zeros_like(distinct)
        # An ID that hashes to a cell twice counts once there.
        first_NC = torch.ones_like(cells_NC, dtype=torch.bool)
        for c in range(1, _CELLS):
            first_NC[:, c] = (cells_NC[:, :c] != cells_NC[:, c : c + 1]).all(1)
        sums.index_add_(0, inverse[first_NC], counts[:, None].expand_as(cells_NC)[first_NC])
        return cells_NC, sums[inverse]


def admission_counts_for(keys: Hashed, max_rows: int, span: Span, name: str) -> AdmissionCounts:
    """Create the counters for an admission policy, for the keys in ``span``.

    Args:
        keys: table policies.
        max_rows: whole-table row limit.
        span: key interval.
        name: table name in messages.
    """
    admit: Admission | None = keys.admit
    if isinstance(admit, MinCount):
        return ExactCounts(admit.k, keys.seed, name)
    if isinstance(admit, MinCountSketch):
        rows = _rows_of(span, max_rows)
        num_cells = admit.bytes // max_rows // _WORD * _WORD
        return CountMinSketch(admit.k, keys.seed, rows=rows, max_rows=max_rows, num_cells=num_cells)
    assert admit is None or isinstance(admit, Probability)
    return AdmissionCounts(admit, keys.seed)


def in_span(keys: Tensor, span: Span | None) -> Tensor:
    """Return which keys lie in an interval, bool [N]. Without an interval, all do."""
    inside = torch.ones_like(keys, dtype=torch.bool)
    if span is not None:
        inside &= keys >= span[0]
        if span[1] < -FIRST_KEY:  # the key space's end does not fit int64
            inside &= keys < span[1]
    return inside


def _rows_of(span: Span, max_rows: int) -> Span:
    """Return the key buckets (plan rows) overlapping a key interval."""
    first, end = ((key - FIRST_KEY) * max_rows for key in span)
    return first >> 64, -(-end >> 64)


def waiting_counts(waiting: AdmissionCounts) -> dict[str, Tensor]:
    """Return waiting ID counts as in a state dict: ascending keys, and counts."""
    blocks = list(waiting.stream())
    empty = torch.empty(0, dtype=torch.int64)
    keys, counts = blocks[0] if blocks else (empty, empty)
    return {"waiting_ids": keys, "waiting": counts}
