"""Division of the samples in a training step among ranks, so their histories take about equal time."""

import functools
import heapq
import logging

import numpy as np

from meshrec.data.dataset import Dataset, Reader
from meshrec.data.in_memory import IndexedSamples
from meshrec.data.order import rank_slice
from meshrec.data.samples import Ints

_logger = logging.getLogger("meshrec.data")

EVEN_LENGTH = 11
"""History length, divided by attention width, at which attention costs as much as all other layers.

Fitted to HSTU steps with histories of 32 to 4,096 items: 705 items at width 64, and 2,308 at width 256.
"""


def balanced_shares(lengths_B: Ints, world_size: int, attention_width: int = 0) -> list[Ints]:
    """Divide the samples in a step among ranks, so the ranks have about equal computing costs.

    The estimated cost of a history with L items is L for layers that work item by item, plus ``L**2 /
    (EVEN_LENGTH * attention_width)`` for attention, if any. Samples are assigned by descending cost to the
    rank with the lowest cost so far. A rank gets as many samples as its `rank_slice` has, so batch sizes do
    not change.

    Args:
        lengths_B: history length per sample in the step, [B].
        world_size: rank count.
        attention_width: width of the attention over histories; 0: no attention.

    Returns:
        Indices into ``lengths_B`` per rank, ascending, int64.
    """
    costs = lengths_B.astype(np.float64)
    if attention_width:
        costs = costs + costs**2 / (EVEN_LENGTH * attention_width)
    slices = [rank_slice(len(costs), rank, world_size) for rank in range(world_size)]
    room = [stop - start for start, stop in slices]
    shares: list[list[int]] = [[] for _ in range(world_size)]
    heap = [(0.0, rank) for rank in range(world_size) if room[rank]]  # (cost so far, rank) of ranks with room
    # Longest first: greedy assignment in descending order is within 4/3 of the optimum (Graham, 1969).
    for sample in np.argsort(-costs, kind="stable").tolist():
        cost, rank = heapq.heappop(heap)
        shares[rank].append(sample)
        # A full rank leaves the heap.
        if len(shares[rank]) < room[rank]:
            heapq.heappush(heap, (cost + float(costs[sample]), rank))
    return [np.array(sorted(share), dtype=np.int64) for share in shares]


def balanced_reader(dataset: Dataset, attention_width: int) -> Reader:
    """Return the dataset's training reader, with steps divided among ranks by `balanced_shares` if possible.

    Balancing needs an `IndexedSamples` reader, which knows the history lengths of all samples in a step. A
    reader that streams files is returned unchanged, with a log line, because a rank reads only part of them.

    Args:
        dataset: dataset; features with ``sequence`` are histories.
        attention_width: width of the attention over histories; 0: no attention.
    """
    histories = [feature.name for feature in dataset.features if feature.sequence]
    if not histories:
        return dataset.train
    # Only an indexed reader knows the history lengths of a step before it reads the step.
    if isinstance(dataset.train, IndexedSamples):
        share = functools.partial(balanced_shares, attention_width=attention_width)
        return dataset.train.balanced(histories, share)
    _logger.info(
        "the histories of dataset %r are not balanced between ranks: they are streamed from files",
        dataset.name,
    )
    return dataset.train
