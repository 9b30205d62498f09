"""Counters for IDs that wait for admission to a table, on a single rank: exact, or in a count-min sketch.

A waiting ID was seen in training but has no row yet, because the admission policy wants more occurrences.
"""

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

_CELLS = 4  # sketch cells per ID: a cell is a counter that several IDs share
_WORD = 8  # cells per int64 word; checkpoints store sketches as words
_MAX_CELL = 255  # greatest count in a cell, which is a byte


class AdmissionCounts:
    """Occurrence counts of IDs without a row in a table rectangle, for the admission policy.

    The methods take *keys*, which are hashes of IDs. This base class counts nothing. It serves policies
    without counts: admission at the first occurrence, and ``Probability``.

    Args:
        admission: admission policy; None: all IDs are admitted.
        seed: table seed (``Hashed.seed``).
    """

    def __init__(self, admission: Probability | None, seed: int) -> None:
        self._admission, self._seed = admission, seed

    def admits(self, keys: Tensor, counts: Tensor, step: int) -> Tensor | None:
        """Return, for every new ID in an update, whether it gets a row, bool [N]. None: all of them do.

        A new ID is an ID without a row. Does not change the counts.

        Args:
            keys: new IDs' keys, ascending, int64 [N].
            counts: occurrences per ID in this update, int64 [N].
            step: update number.
        """
        if self._admission is None:
            return None
        return self._admission.admits(keys, counts, step, self._seed)

    def count(self, keys: Tensor, counts: Tensor, admitted: Tensor) -> None:
        """Add the occurrences in an update to the counts, and drop the counts of admitted IDs.

        Args:
            keys: new IDs' keys, ascending, int64 [N].
            counts: occurrences per ID in this update, int64 [N].
            admitted: whether each ID is admitted, bool [N].
        """

    def stream(self, keys: Span | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield pairs (keys, counts) for a checkpoint, both int64 [N], keys ascending.

        Exact counts have one pair per waiting ID. A sketch packs cells; see ``CountMinSketch.stream``.

        Args:
            keys: key interval; None: all keys.
        """
        yield from ()

    def load(self, keys: Tensor, counts: Tensor) -> None:
        """Load a pair which ``stream`` has yielded, here or on another rank.

        Args:
            keys: int64 [N].
            counts: int64 [N].
        """

    def early(self) -> float:
        """Estimate the fraction of new IDs that are admitted too early. 0 unless counts are approximate."""
        return 0.0


class ExactCounts(AdmissionCounts):
    """Exact counts per waiting ID, for the policy ``MinCount``.

    Args:
        k: occurrences at which an ID is admitted.
        seed: seed of the hash index from keys to counters.
        name: table name in messages.
    """

    def __init__(self, k: int, seed: int, name: str) -> None:
        self._k = k
        # The hash index stores slots in 32 bits. Both memories grow with the number of waiting IDs.
        max_slots = (1 << 32) - 1
        # ``_slots`` maps keys to counters, and ``_memory`` holds the counters. A slot is freed on admission.
        self._slots = HashIndex(max_slots, seed=seed, name=f"the waiting IDs of {name}")
        self._memory = GrowingRows([torch.zeros(1, dtype=torch.int64)], max_rows=max_slots, name=name)

    @override
    def admits(self, keys: Tensor, counts: Tensor, step: int) -> Tensor:
        """Return, for every new ID, whether the ID reaches ``k`` occurrences with this update, bool [N]."""
        return self._present_counts(keys) + counts >= self._k

    @override
    def count(self, keys: Tensor, counts: Tensor, admitted: Tensor) -> None:
        """Add the occurrences in an update to the waiting IDs' counts, and remove the admitted IDs' counters.

        So an admitted ID that is evicted later starts again from 0.
        """
        # Admitted IDs had a counter only if they occurred in an earlier update.
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
        """Counter per slot, int64."""
        return self._memory.tensors[0]

    def _present_counts(self, keys: Tensor) -> Tensor:
        """Return the present count per ID, int64 [N]; 0 for IDs without a counter."""
        # Lookups only: ``admits`` must not change anything, because the update may still fail.
        slots = self._slots.find(keys)
        counts = torch.zeros_like(keys)
        counts[slots >= 0] = self._counts[slots[slots >= 0]]
        return counts

    def _add(self, keys: Tensor, counts: Tensor) -> None:
        """Add occurrences to the counts. IDs without a counter get one."""
        slots = self._slots.find(keys)
        new = slots < 0
        if bool(new.any()):
            slots[new] = self._slots.insert(keys[new])
            self._memory.grow(int(slots.max()) + 1)
            # A slot may be reused from an ID admitted earlier.
            self._counts[slots[new]] = 0
        self._counts[slots] += counts


class CountMinSketch(AdmissionCounts):
    """Count-min sketch, for the policy ``MinCountSketch``: the count of an ID is the minimum of its cells.

    A cell is a one-byte counter. An ID has four cells (or fewer, if two of them coincide), which it shares
    with other IDs. The keys are divided into ``max_rows`` buckets; see [Note: the keys of hashed tables].
    Every bucket has separate cells, so the counts do not depend on how a plan cuts the table.

    Args:
        k: estimated occurrences at which an ID is admitted.
        seed: seed of the hash from keys to cells.
        rows: first and end bucket on this rank.
        max_rows: number of buckets in the whole table.
        num_cells: cells per bucket, a multiple of 8.
    """

    def __init__(self, k: int, seed: int, *, rows: Span, max_rows: int, num_cells: int) -> None:
        self._k, self._seed, self._max_rows, self._num_cells = k, seed, max_rows, num_cells
        # First local bucket, and the cells of all local buckets one after another.
        self._first = rows[0]
        self._cells = torch.zeros((rows[1] - rows[0]) * num_cells, dtype=torch.uint8)

    @override
    def admits(self, keys: Tensor, counts: Tensor, step: int) -> Tensor:
        """Return, for every new ID, whether all cells of the ID reach ``k`` with this update, bool [N]."""
        cells_NC, new_NC = self._cells_and_counts(keys, counts)
        # The minimum over the cells is the estimate with the least contribution from other IDs.
        return (self._cells[cells_NC].long() + new_NC).amin(1) >= self._k

    @override
    def count(self, keys: Tensor, counts: Tensor, admitted: Tensor) -> None:
        """Add the occurrences in an update to the IDs' cells. A cell stops at 255."""
        cells_NC, new_NC = self._cells_and_counts(keys, counts)
        # Several IDs may write the same cell: all write the same sum, because ``new_NC`` has totals per cell.
        self._cells[cells_NC] = (self._cells[cells_NC].long() + new_NC).clamp_(max=_MAX_CELL).byte()

    def stream(self, keys: Span | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the nonzero words (eight cells as an int64) as counts, with a key that tells the position.

        Word i in a bucket gets the i-th key in the bucket's key interval. So resharding by key moves the
        words with their buckets.
        """
        # Only nonzero words: most of a large sketch may be empty.
        words = self._cells.view(torch.int64)
        used = words.nonzero()[:, 0]
        per_row = self._num_cells // _WORD
        all_keys = first_keys(used // per_row + self._first, self._max_rows) + used % per_row
        inside = in_span(all_keys, keys)
        yield all_keys[inside], words[used[inside]]

    def load(self, keys: Tensor, counts: Tensor) -> None:
        """Copy words from ``stream`` to the cells.

        The words may come from a sketch with more cells per bucket. Words without cells here are ignored.

        Args:
            keys: keys that tell the positions, int64 [N].
            counts: words, int64 [N].
        """
        buckets = bucket_of(keys, self._max_rows)
        within = keys - first_keys(buckets, self._max_rows)
        # The sketch that wrote the words may have had more cells per bucket.
        fits = (within >= 0) & (within < self._num_cells // _WORD)
        words = self._cells.view(torch.int64)
        words[((buckets - self._first) * (self._num_cells // _WORD) + within)[fits]] = counts[fits]

    def early(self) -> float:
        """Estimate the probability that a new ID is admitted at the first occurrence.

        This happens if all cells of the ID are at ``k - 1`` or more already. Averaged over the buckets.
        """
        if self._cells.numel() == 0:
            return 0.0
        full = (self._cells >= self._k - 1).view(-1, self._num_cells).double().mean(1)
        return float((full ** min(_CELLS, self._num_cells)).mean())

    def _cells_and_counts(self, keys: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        """Return the C cells of every ID, and the number of occurrences to add to every cell in an update.

        Returns:
            Cell indices, int64 [N, C], and the occurrences to add to these cells, int64 [N, C]. If several
                IDs share a cell, the sum of their occurrences is listed for all of them.
        """
        # Four cells from the four 16-bit groups in the key's hash.
        bits = mix(keys, self._seed)
        first_cells = (bucket_of(keys, self._max_rows) - self._first) * self._num_cells
        offsets = [((bits >> (16 * c)) & 0xFFFF) % self._num_cells for c in range(_CELLS)]
        # An offset modulo the cell count is slightly uneven, which only affects how often IDs share cells.
        cells_NC = first_cells[:, None] + torch.stack(offsets, 1)
        distinct, inverse = torch.unique(cells_NC, return_inverse=True)
        sums = torch.zeros_like(distinct)
        # If two hashes of an ID give the same cell, the ID counts there only once.
        first_NC = torch.ones_like(cells_NC, dtype=torch.bool)
        for c in range(1, _CELLS):
            first_NC[:, c] = (cells_NC[:, :c] != cells_NC[:, c : c + 1]).all(1)
        sums.index_add_(0, inverse[first_NC], counts[:, None].expand_as(cells_NC)[first_NC])
        return cells_NC, sums[inverse]


def admission_counts_for(keys: Hashed, max_rows: int, span: Span, name: str) -> AdmissionCounts:
    """Create the counters that a table's admission policy needs, for a rectangle.

    Args:
        keys: table option with the admission policy and the seed.
        max_rows: row limit of the whole table.
        span: key interval of the rectangle.
        name: table name in messages.
    """
    admit: Admission | None = keys.admit
    if isinstance(admit, MinCount):
        return ExactCounts(admit.k, keys.seed, name)
    if isinstance(admit, MinCountSketch):
        rows = _rows_of(span, max_rows)
        # Whole words, so the cells can be viewed as int64.
        num_cells = admit.bytes // max_rows // _WORD * _WORD
        return CountMinSketch(admit.k, keys.seed, rows=rows, max_rows=max_rows, num_cells=num_cells)
    assert admit is None or isinstance(admit, Probability)
    return AdmissionCounts(admit, keys.seed)


def in_span(keys: Tensor, span: Span | None) -> Tensor:
    """Return whether each key lies in an interval, bool [N]. Without an interval, all do."""
    inside = torch.ones_like(keys, dtype=torch.bool)
    if span is not None:
        inside &= keys >= span[0]
        if span[1] < -FIRST_KEY:  # the key space's end does not fit int64
            inside &= keys < span[1]
    return inside


def _rows_of(span: Span, max_rows: int) -> Span:
    """Return the interval [first, end) of the key buckets which overlap a key interval."""
    # Bucket b starts at key b * 2^64 / max_rows - 2^63, rounded up. Python integers do not overflow.
    first, end = ((key - FIRST_KEY) * max_rows for key in span)
    return first >> 64, -(-end >> 64)


def waiting_counts(waiting: AdmissionCounts) -> dict[str, Tensor]:
    """Return the counts for waiting IDs under their state dict names, empty if the policy has no counts.

    Args:
        waiting: counters on this rank.

    Returns:
        ``waiting_ids``: keys, ascending, int64 [N]. ``waiting``: counts (packed for a sketch), int64 [N].
    """
    # A counter yields a single block, the base class none.
    blocks = list(waiting.stream())
    empty = torch.empty(0, dtype=torch.int64)
    keys, counts = blocks[0] if blocks else (empty, empty)
    return {"waiting_ids": keys, "waiting": counts}
