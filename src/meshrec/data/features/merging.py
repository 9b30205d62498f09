"""Exact merging of fitting statistics: of many tables on one rank, and of all ranks."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import torch

from meshrec.comms.agreement import together
from meshrec.comms.collectives import Splits, all_to_all, gather_objects
from meshrec.comms.mesh import Axis
from meshrec.data.features.features import FitState
from meshrec.data.features.sketches import SAMPLE_ROWS, Counts, RowSample
from meshrec.data.hashing import UInt64s

_SAMPLED = 1024
"""Values per rank from which ranges of values are derived; the largest range is a few percent too large."""
_MAX_DISTINCT_SHARE = 0.8
"""States are merged on a rank if that leaves a smaller share of their values."""
_FAN_IN = 8
"""States to merge at a time. A value's counts are merged log8(tables) times, and not with every table."""


class StateMerger:
    """Merger of the statistics of many tables, which are added one by one.

    States of about equal size are merged, so the time is nearly proportional to the rows even if most values
    differ.
    """

    def __init__(self) -> None:
        # States of _FAN_IN**k tables in entry k; fewer than _FAN_IN of them.
        self._levels: list[list[FitState]] = []
        # Values after the last merge, as a share of the values before it.
        self._distinct_share = 1.0

    def add(self, state: FitState) -> None:
        """Add the state of further rows."""
        for level in self._levels:
            level.append(state)
            if len(level) < _FAN_IN:
                return
            state = level[0].merged(*level[1:])
            self._distinct_share = _num_values([state]) / max(_num_values(level), 1)
            level.clear()
        self._levels.append([state])

    def state(self) -> FitState | None:
        """Return the state of all rows; None if no state was added."""
        return _merged([state for level in reversed(self._levels) for state in level])

    def states(self) -> list[FitState]:
        """Return states of all added rows, as the argument for `merge_ranks`.

        The states are merged first, unless most values occur in a single state. Merging would then only copy
        the values.
        """
        states = [state for level in reversed(self._levels) for state in level]
        merged = _merged(states) if self._distinct_share < _MAX_DISTINCT_SHARE else None
        return states if merged is None else [merged]


def _num_values(states: list[FitState]) -> int:
    return sum(len(counts.values) for state in states for counts in state.counts.values())


def _merged(states: list[FitState]) -> FitState | None:
    return states[0].merged(*states[1:]) if len(states) > 1 else states[0] if states else None


def merge_ranks(states: list[FitState], axis: Axis) -> FitState | None:
    """Merge the states of all ranks. Collective.

    Every rank merges and sorts the counts of a range of values. The ranks thus divide this work, which takes
    long for many distinct values.

    Returns:
        On rank 0, the state of all rows, or None if there are none. Its counts are in the order of
        `Counts.by_count`. On other ranks, None.

    Raises:
        ArrowInvalid: values of different ranks have no common type; raised on every rank.
    """
    name = "merging fitted statistics"
    if axis.size == 1:
        return _merged(states)
    with together(axis, name):
        # Without counts, which may be large: the types of their values decide about the common types.
        small = _merged([state._replace(counts=_types(state.counts)) for state in states])
    hashes = gather_objects(None if small is None else small.sample.hashes, axis, name)
    if small is not None:
        sample = _common_sample(small.sample, [of_rank for of_rank in hashes if of_rank is not None])
        small = small._replace(sample=sample)
    gathered = [state for state in gather_objects(small, axis, name) if state is not None]
    if not gathered:
        return None
    with together(axis, name):
        merged = gathered[0].merged(*gathered[1:])
        counts = {
            key: _concatenated([types, *(_converted(state.counts[key], types) for state in states)])
            for key, types in merged.counts.items()
        }
    samples = gather_objects({key: _sampled(of_feature) for key, of_feature in counts.items()}, axis, name)
    with together(axis, name):
        bounds = {key: _bounds([of_rank[key] for of_rank in samples], axis.size) for key in counts}
        shares = _shares(counts, bounds, axis.size)
    shares = _exchange(shares, axis)
    with together(axis, name):
        counts = {
            key: first.merged(*(share[key] for share in shares[1:])).by_count()
            for key, first in shares[0].items()
        }
    # The ranks' values differ now, and are sorted, so rank 0 only puts them together.
    shares = _exchange([counts, *([_types(counts)] * (axis.size - 1))], axis)
    if axis.rank:
        return None
    all_counts = {key: _joined([share[key] for share in shares]) for key in counts}
    return FitState(merged.num_rows, merged.sample, all_counts, merged.fractional)


def _common_sample(sample: RowSample, hashes: list[UInt64s]) -> RowSample:
    """Return the rows of this rank's sample that are in the sample of all ranks."""
    selected = np.sort(np.concatenate(hashes))[:SAMPLE_ROWS]
    num = int(np.searchsorted(sample.hashes, selected[-1], side="right")) if len(selected) else 0
    # Copied, because a pickled slice has all values of the arrays.
    return RowSample(sample.table.take(np.arange(num)), sample.hashes[:num])


def _types(counts: Mapping[str, Counts]) -> dict[str, Counts]:
    """Return counts without values, with the same value types."""
    no_counts = pa.array([], pa.int64())
    return {
        name: Counts(pa.array([], of_feature.values.type), no_counts) for name, of_feature in counts.items()
    }


def _converted(counts: Counts, types: Counts) -> Counts:
    """Convert the values in counts to the value type of ``types``."""
    return counts if counts.values.type == types.values.type else counts.merged(types)


def _concatenated(counts: list[Counts]) -> Counts:
    return Counts(
        pa.concat_arrays([part.values for part in counts]), pa.concat_arrays([part.counts for part in counts])
    )


def _sampled(counts: Counts) -> Any:
    """Return at most `_SAMPLED` values, at equal distances."""
    num = min(len(counts.values), _SAMPLED)
    return counts.values.take(pa.array(np.arange(num) * len(counts.values) // max(num, 1)))


def _bounds(samples: list[Any], num_ranks: int) -> Any:
    """Return values that divide the values of all ranks into ranges of about equal size, ascending."""
    values = pa.concat_arrays(samples)
    order = pc.array_sort_indices(values).to_numpy()
    return (
        values.take(pa.array(order[len(order) * np.arange(1, num_ranks) // num_ranks]))
        if len(order)
        else values
    )


def _shares(
    counts: Mapping[str, Counts], bounds: Mapping[str, Any], num_ranks: int
) -> list[dict[str, Counts]]:
    """Divide counts, by feature name, at the values in ``bounds``. Return the counts for every rank."""
    shares: list[dict[str, Counts]] = [{} for _ in range(num_ranks)]
    for name, of_feature in counts.items():
        ranks = np.zeros(len(of_feature.values), np.uint16)
        for bound in bounds[name]:
            ranks += pc.greater_equal(of_feature.values, bound).to_numpy(zero_copy_only=False)
        order = pa.array(np.argsort(ranks, kind="stable"))
        ends = np.cumsum(np.bincount(ranks, minlength=num_ranks)).tolist()
        ordered = of_feature.take(order)
        for share, start, stop in zip(shares, [0, *ends], ends, strict=False):
            share[name] = Counts(
                ordered.values.slice(start, stop - start), ordered.counts.slice(start, stop - start)
            )
    return shares


def _joined(counts: list[Counts]) -> Counts:
    """Join counts of ascending ranges of values, all in the order of `Counts.by_count`, into this order."""
    joined = _concatenated(counts)
    # Stable: among equally frequent values, those of earlier ranks are smaller.
    return joined.take(pa.array(np.argsort(-joined.counts.to_numpy(), kind="stable")))


def _exchange(sent: list[dict[str, Counts]], axis: Axis) -> list[dict[str, Counts]]:
    """Send counts to every rank, and return the counts received from every rank. Collective."""
    # A rank's own share is large, and not copied.
    messages = [
        np.zeros(0, np.uint8) if rank == axis.rank else _to_ipc(of_rank) for rank, of_rank in enumerate(sent)
    ]
    sizes = [len(message) for message in messages]
    name = "exchanging counts of values"
    received = [sizes_of_rank[axis.rank] for sizes_of_rank in gather_objects(sizes, axis, name)]
    joined = torch.from_numpy(np.concatenate(messages))
    result = all_to_all(joined, Splits(sizes, received), axis, name).wait()
    parts = torch.split(result, received)
    return [
        sent[rank] if rank == axis.rank else _from_ipc(part.numpy(), sent[rank].keys())
        for rank, part in enumerate(parts)
    ]


def _to_ipc(counts: Mapping[str, Counts]) -> npt.NDArray[np.uint8]:
    """Serialize counts. Unlike a pickle, the result has only the values of a slice."""
    sink = pa.BufferOutputStream()
    for of_feature in counts.values():
        table = pa.table({"value": of_feature.values, "count": of_feature.counts})
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
    return np.frombuffer(sink.getvalue(), np.uint8)


def _from_ipc(message: npt.NDArray[np.uint8], names: Iterable[str]) -> dict[str, Counts]:
    """Return the counts from `_to_ipc`, which share the memory of the message."""
    reader, counts = pa.BufferReader(message), {}
    for name in names:
        table = pa.ipc.open_stream(reader).read_all()
        counts[name] = Counts(table["value"].combine_chunks(), table["count"].combine_chunks())
    return counts
