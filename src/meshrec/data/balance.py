"""The samples of a step divided among ranks so that long histories do not keep one rank busy while others
wait.
"""

import functools
import heapq
import logging

import numpy as np

from meshrec.data.dataset import Dataset, Reader
from meshrec.data.in_memory import InMemoryReader
from meshrec.data.order import rank_slice
from meshrec.data.samples import Ints

_logger = logging.getLogger("meshrec.data")

EVEN_LENGTH = 11
"""Length of a history whose attention costs as much as its other layers, over the width of the attention.

Fitted to steps of HSTU on histories of 32 to 4,096 items: 705 items at width 64, and 2,308 at 256.
"""


def balanced_shares(lengths_B: Ints, world_size: int, attention_width: int = 0) -> list[Ints]:
    """Divide the samples of a step among ranks by the cost of their histories.

    The cost of a sample is the length of its history, for layers that work on tokens, plus a share of the
    squared length, for attention. The costliest sample left goes to the rank with the smallest cost so far
    that has room for one more.

    Args:
        lengths_B: lengths of the histories of the step's samples.
        world_size: number of ranks.
        attention_width: width of the attention over histories; 0: there is none.

    Returns:
        For each rank the positions of its samples, ascending. Ranks have as many samples as without
        balancing.
    """
    costs = lengths_B.astype(np.float64)
    if attention_width:
        costs = costs + costs**2 / (EVEN_LENGTH * attention_width)
    slices = [rank_slice(len(costs), rank, world_size) for rank in range(world_size)]
    room = [stop - start for start, stop in slices]
    shares: list[list[int]] = [[] for _ in range(world_size)]
    heap = [(0.0, rank) for rank in range(world_size) if room[rank]]
    for sample in np.argsort(-costs, kind="stable").tolist():
        cost, rank = heapq.heappop(heap)
        shares[rank].append(sample)
        if len(shares[rank]) < room[rank]:
            heapq.heappush(heap, (cost + float(costs[sample]), rank))
    return [np.array(sorted(each), dtype=np.int64) for each in shares]


def balanced_reader(dataset: Dataset, attention_width: int) -> Reader:
    """Return the reader of the training samples, balanced by the cost of their histories, see
    `balanced_shares`.

    This needs samples in memory, where the lengths of all histories of a step are known. Samples that
    are streamed from files keep their ranks, because a rank reads its own part of the files only; a log line
    says so.
    """
    histories = [each.name for each in dataset.features if each.sequence]
    if not histories:
        return dataset.train
    if isinstance(dataset.train, InMemoryReader):
        share = functools.partial(balanced_shares, attention_width=attention_width)
        return dataset.train.balanced(histories, share)
    _logger.info(
        "the histories of dataset %r are not balanced between ranks: they are streamed from files",
        dataset.name,
    )
    return dataset.train
