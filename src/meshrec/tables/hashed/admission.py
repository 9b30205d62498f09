"""Counters of the IDs that wait for admission to a table, on one rank: exact, or in a count-min sketch."""

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
_MOST = 255  # greatest count of a cell


class AdmissionCounts:
    """Occurrences of the IDs in a rectangle that have no row yet.

    This base class counts nothing. It serves policies that admit IDs at once or with a probability.

    Args:
        admission: policy; None: all IDs are admitted.
        seed: seed of the table.
    """

    def __init__(self, admission: Probability | None, seed: int) -> None:
        self._admission, self._seed = admission, seed

    def admits(self, keys: Tensor, counts: Tensor, step: int) -> Tensor | None:
        """Return which new IDs to admit, bool [N]. None: all of them.

        Args:
            keys: keys of the IDs, ascending, int64 [N].
            counts: occurrences of each ID in this update, int64 [N].
            step: update number.
        """
        if self._admission is None:
            return None
        return self._admission.admits(keys, counts, step, self._seed)

    def count(self, keys: Tensor, counts: Tensor, admitted: Tensor) -> None:
        """Add the occurrences of an update, and forget admitted IDs.

        Args:
            keys: keys of the IDs, ascending, int64 [N].
            counts: occurrences of each ID in this update, int64 [N].
            admitted: which IDs are admitted, bool [N].
        """

    def stream(self, keys: Span | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the keys of waiting IDs, ascending, and their counts: both int64 [N].

        Args:
            keys: key interval; None: all keys.
        """
        yield from ()

    def load(self, keys: Tensor, counts: Tensor) -> None:
        """Add counts that ``stream`` has yielded, perhaps on another rank or under another policy."""

    def early(self) -> float:
        """Return the estimated fraction of new IDs that are admitted too early. 0 for exact counts."""
        return 0.0


class ExactCounts(AdmissionCounts):
    """Exact counts of waiting IDs, for ``MinCount``."""

    def __init__(self, k: int, seed: int, name: str) -> None:
        self._k = k
        most = (1 << 32) - 1
        self._slots = HashIndex(most, seed=seed, name=f"the waiting IDs of {name}")
        self._memory = GrowingRows([torch.zeros(1, dtype=torch.int64)], max_rows=most, name=name)

    def admits(self, keys: Tensor, counts: Tensor, step: int) -> Tensor:
        """Return which IDs reach ``k`` occurrences with this update, bool [N].

        Args:
            keys: keys of the IDs, ascending, int64 [N].
            counts: occurrences of each ID in this update, int64 [N].
            step: update number.
        """
        return self._so_far(keys) + counts >= self._k

    def count(self, keys: Tensor, counts: Tensor, admitted: Tensor) -> None:
        """Add the occurrences of waiting IDs. An admitted ID restarts from 0 if it is evicted later.

        Args:
            keys: keys of the IDs, ascending, int64 [N].
            counts: occurrences of each ID in this update, int64 [N].
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
        """Return the present count of each ID, int64 [N]."""
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
    """Count-min sketch, for ``MinCountSketch``: one-byte cells, of which an ID increments up to four.

    Each key bucket (a "row" of the plan) has ``num_cells`` cells, which count only its IDs.
    """

    def __init__(self, k: int, seed: int, *, rows: Span, max_rows: int, num_cells: int) -> None:
        self._k, self._seed, self._max_rows, self._num_cells = k, seed, max_rows, num_cells
        self._first = rows[0]
        self._cells = torch.zeros((rows[1] - rows[0]) * num_cells, dtype=torch.uint8)

    def admits(self, keys: Tensor, counts: Tensor, step: int) -> Tensor:
        """Return which IDs reach ``k`` with this update in all of their cells, bool [N].

        Args:
            keys: keys of the IDs, ascending, int64 [N].
            counts: occurrences of each ID in this update, int64 [N].
            step: update number.
        """
        cells_NC, new_NC = self._cells_and_counts(keys, counts)
        return (self._cells[cells_NC].long() + new_NC).amin(1) >= self._k

    def count(self, keys: Tensor, counts: Tensor, admitted: Tensor) -> None:
        """Add the occurrences of an update. A cell stops at 255.

        Args:
            keys: keys of the IDs, ascending, int64 [N].
            counts: occurrences of each ID in this update, int64 [N].
            admitted: unused: a sketch cannot remove an ID.
        """
        cells_NC, new_NC = self._cells_and_counts(keys, counts)
        self._cells[cells_NC] = (self._cells[cells_NC].long() + new_NC).clamp_(max=_MOST).byte()

    def stream(self, keys: Span | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield nonzero words of eight cells. Word i of a bucket has the i-th key of the bucket."""
        words = self._cells.view(torch.int64)
        used = words.nonzero()[:, 0]
        per_row = self._num_cells // _WORD
        all_keys = first_keys(used // per_row + self._first, self._max_rows) + used % per_row
        inside = in_span(all_keys, keys)
        yield all_keys[inside], words[used[inside]]

    def load(self, keys: Tensor, counts: Tensor) -> None:
        """Copy words from ``stream`` to the cells. Words that only a larger sketch has are left out."""
        buckets = bucket_of(keys, self._max_rows)
        within = keys - first_keys(buckets, self._max_rows)
        fits = (within >= 0) & (within < self._num_cells // _WORD)
        words = self._cells.view(torch.int64)
        words[((buckets - self._first) * (self._num_cells // _WORD) + within)[fits]] = counts[fits]

    def early(self) -> float:
        """Return the probability that all cells of a new ID are at ``k - 1`` or more already."""
        if self._cells.numel() == 0:
            return 0.0
        full = (self._cells >= self._k - 1).view(-1, self._num_cells).double().mean(1)
        return float((full ** min(_CELLS, self._num_cells)).mean())

    def _cells_and_counts(self, keys: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        """Return the cells of each ID, [N, C], and the occurrences that the update adds to each cell."""
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
    """Create the counters that an admission policy needs, for the keys in ``span``.

    Args:
        keys: policies of the table.
        max_rows: maximum number of rows of the whole table.
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
    """Return the key buckets (plan rows) that a key interval overlaps."""
    first, end = ((key - FIRST_KEY) * max_rows for key in span)
    return first >> 64, -(-end >> 64)


def waiting_counts(waiting: AdmissionCounts) -> dict[str, Tensor]:
    """Return the counts of waiting IDs as a state dict has them: ascending keys, and counts."""
    blocks = list(waiting.stream())
    empty = torch.empty(0, dtype=torch.int64)
    keys, counts = blocks[0] if blocks else (empty, empty)
    return {"waiting_ids": keys, "waiting": counts}
