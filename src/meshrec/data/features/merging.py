"""Exact merging of fitting statistics: of many tables on one rank, and of all ranks."""

import pickle
from collections.abc import Mapping

import numpy as np
import pyarrow as pa
import torch

from meshrec.comms.agreement import together
from meshrec.comms.collectives import Splits, all_to_all, gather_objects
from meshrec.comms.mesh import Axis
from meshrec.data.features.features import FitState
from meshrec.data.features.sketches import SAMPLE_ROWS, Counts, RowSample
from meshrec.data.features.values import hashes_of
from meshrec.data.hashing import UInt64s, to_range

_FAN_IN = 8
"""States to merge at a time. A value's counts are merged log8(tables) times, and not with every table."""


class StateMerger:
    """Merges the statistics of many tables, which are added one by one.

    States of about equal size are merged, so the time is nearly proportional to the rows even if most values
    differ.
    """

    def __init__(self) -> None:
        # States of _FAN_IN**k tables in entry k; fewer than _FAN_IN of them.
        self._levels: list[list[FitState]] = []

    def add(self, state: FitState) -> None:
        """Add the state of further rows."""
        for level in self._levels:
            level.append(state)
            if len(level) < _FAN_IN:
                return
            state = level[0].merged(*level[1:])
            level.clear()
        self._levels.append([state])

    @property
    def max_hash(self) -> np.uint64 | None:
        """Row hash above which no further row is sampled; None if any row may be. See `RowSample.of`."""
        samples = (state.sample for level in self._levels for state in level)
        full = [sample.hashes[-1] for sample in samples if len(sample.hashes) >= SAMPLE_ROWS]
        return min(full, default=None)

    def state(self) -> FitState | None:
        """Return the state of all rows; None if no state was added."""
        states = [state for level in reversed(self._levels) for state in level]
        return states[0].merged(*states[1:]) if len(states) > 1 else states[0] if states else None


def merge_ranks(state: FitState | None, axis: Axis) -> FitState | None:
    """Merge the states of all ranks. Collective.

    Every rank merges the counts of the values whose hash falls into its share. The ranks thus divide this
    work, which takes long for many distinct values.

    Args:
        state: state of this rank's rows; None if it has no rows.
        axis: the ranks.

    Returns:
        On rank 0, the state of all rows, or None if there are none. On other ranks, None.

    Raises:
        ArrowInvalid: values of different ranks have no common type; raised on every rank.
    """
    if axis.size == 1:
        return state
    name = "merging fitted statistics"
    hashes = gather_objects(None if state is None else state.sample.hashes, axis, name)
    small = None
    if state is not None:
        sample = _common_sample(state.sample, [of_rank for of_rank in hashes if of_rank is not None])
        # Without counts, which may be large: the types of their values decide about the common types.
        small = state._replace(sample=sample, counts=_types(state.counts))
    states = [other for other in gather_objects(small, axis, name) if other is not None]
    if not states:
        return None
    merged = states[0].merged(*states[1:])
    with together(axis, name):
        shares = _shares(merged.counts if state is None else state.counts, merged.counts, axis.size)
    shares = _exchange(shares, axis)
    with together(axis, name):
        counts = {
            key: first.merged(*(share[key] for share in shares[1:])) for key, first in shares[0].items()
        }
    # The ranks' values differ now, so rank 0 only concatenates.
    shares = _exchange([counts, *([_types(counts)] * (axis.size - 1))], axis)
    if axis.rank:
        return None
    all_counts = {key: _concatenated([share[key] for share in shares]) for key in counts}
    return FitState(merged.num_rows, merged.sample, all_counts, merged.fractional)


def _common_sample(sample: RowSample, hashes: list[UInt64s]) -> RowSample:
    """Return the rows of this rank's sample that are in the sample of all ranks.

    Args:
        sample: this rank's sample.
        hashes: row hashes of the samples of all ranks.
    """
    selected = np.sort(np.concatenate(hashes))[:SAMPLE_ROWS]
    num = int(np.searchsorted(sample.hashes, selected[-1], side="right")) if len(selected) else 0
    return RowSample(sample.table.slice(0, num), sample.hashes[:num])


def _types(counts: Mapping[str, Counts]) -> dict[str, Counts]:
    """Return counts of no values, with the same types."""
    return {name: _slice(of_feature, 0, 0) for name, of_feature in counts.items()}


def _slice(counts: Counts, start: int, stop: int) -> Counts:
    return Counts(counts.values.slice(start, stop - start), counts.counts.slice(start, stop - start))


def _concatenated(counts: list[Counts]) -> Counts:
    return Counts(
        pa.concat_arrays([part.values for part in counts]), pa.concat_arrays([part.counts for part in counts])
    )


def _shares(
    counts: Mapping[str, Counts], types: Mapping[str, Counts], num_ranks: int
) -> list[dict[str, Counts]]:
    """Divide counts by the hashes of the values.

    Args:
        counts: counts by feature name.
        types: counts of no values, with the common type of all ranks.
        num_ranks: number of ranks.

    Returns:
        The counts for every rank.
    """
    shares: list[dict[str, Counts]] = [{} for _ in range(num_ranks)]
    for name, of_feature in counts.items():
        if of_feature.values.type != types[name].values.type:
            of_feature = of_feature.merged(types[name])
        # Equal values have equal hashes only if they have the same type.
        ranks = to_range(hashes_of(of_feature.values), num_ranks)
        order = pa.array(np.argsort(ranks, kind="stable"))
        ends = np.cumsum(np.bincount(ranks, minlength=num_ranks)).tolist()
        ordered = Counts(of_feature.values.take(order), of_feature.counts.take(order))
        for share, start, stop in zip(shares, [0, *ends], ends, strict=False):
            share[name] = _slice(ordered, start, stop)
    return shares


def _exchange(sent: list[dict[str, Counts]], axis: Axis) -> list[dict[str, Counts]]:
    """Send counts to every rank, and return the counts received from every rank. Collective."""
    messages = [pickle.dumps({name: _to_ipc(counts) for name, counts in of_rank.items()}) for of_rank in sent]
    sizes = [len(message) for message in messages]
    name = "exchanging counts of values"
    received = [sizes_of_rank[axis.rank] for sizes_of_rank in gather_objects(sizes, axis, name)]
    joined = torch.frombuffer(bytearray(b"".join(messages)), dtype=torch.uint8)
    result = all_to_all(joined, Splits(sizes, received), axis, name).wait()
    parts = torch.split(result, received)
    return [
        {name: _from_ipc(buffer) for name, buffer in pickle.loads(part.numpy().tobytes()).items()}
        for part in parts
    ]


def _to_ipc(counts: Counts) -> bytes:
    """Serialize counts. Unlike a pickle, the result has only the values of a slice."""
    sink = pa.BufferOutputStream()
    table = pa.table({"value": counts.values, "count": counts.counts})
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())


def _from_ipc(buffer: bytes) -> Counts:
    table = pa.ipc.open_stream(buffer).read_all()
    return Counts(table["value"].combine_chunks(), table["count"].combine_chunks())
