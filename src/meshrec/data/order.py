"""Order of samples in an epoch, and their assignment to ranks, as pure functions of (seed, epoch).

The blocks of the data, in shuffled order, form a sequence of samples. The sequence is cut into L contiguous
*lanes* whose lengths differ by at most one sample. The global order, in which training consumes samples,
takes a sample from every lane in turn: position p in the global order is sample p // L of lane p % L. In a
step, a rank reads some of the lanes, and reads every lane sequentially. L does not depend on the rank count,
so neither does the order.
"""

from collections.abc import Iterator
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from meshrec.data.dataset import Position


class Stream(IntEnum):
    """Purposes of random numbers. Generators with different purposes are independent for equal seeds, too."""

    BLOCKS = 1  # shuffle the blocks, or all samples, of an epoch
    WINDOW = 2  # shuffle the rows in a window
    SAMPLES = 3  # draw synthetic samples
    TEACHER = 4  # draw the model behind synthetic data


class Step(NamedTuple):
    """Samples of a step on all ranks: positions ``start`` to ``stop``, exclusive, in the global order."""

    start: int
    stop: int


class LanePart(NamedTuple):
    """Samples ``first`` to ``last``, exclusive, of the lane with number ``lane``."""

    lane: int
    first: int
    last: int


def generator(seed: int, stream: Stream, *counters: int) -> np.random.Generator:
    """Return a random number generator whose state depends only on the arguments.

    Args:
        seed: random seed, not negative.
        stream: purpose of the random numbers.
        counters: further integers that distinguish generators, such as epoch and block; not negative.
    """
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, int(stream), *counters])))


def check_seed(seed: int) -> None:
    """Raise ValueError unless ``seed`` is an integer >= 0."""
    if not isinstance(seed, int) or seed < 0:
        raise ValueError(f"seed must be an integer >= 0, got {seed!r}.")


def steps(
    num_samples: int, batch_size: int, position: Position, rank: int, world_size: int, *, drop_last: bool
) -> Iterator[Step]:
    """Return an iterator over the steps of an epoch from ``position`` on.

    The arguments are validated at once, not at the first step.

    Args:
        num_samples: samples per epoch, over all ranks.
        batch_size: samples per batch and rank.
        position: start position, such as that of a checkpoint.
        rank: this rank; only validated.
        world_size: rank count.
        drop_last: whether to omit a last step with fewer than ``batch_size * world_size`` samples.

    Raises:
        ValueError: a size, rank or position is out of range.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be >= 1, got {batch_size}.")
    if not 0 <= rank < world_size:
        raise ValueError(f"rank must lie in [0, world_size), got rank {rank} of world_size {world_size}.")
    if position.epoch < 0 or not 0 <= position.sample <= num_samples:
        raise ValueError(
            f"{position} is outside this data, which has {num_samples} samples per epoch. "
            "It belongs to other data, or to another configuration of it."
        )
    size = batch_size * world_size
    stop = num_samples
    if drop_last:
        # Steps are counted from the start position.
        stop -= (num_samples - position.sample) % size
    return (Step(start, min(start + size, stop)) for start in range(position.sample, stop, size))


def rank_slice(num: int, rank: int, world_size: int) -> tuple[int, int]:
    """Return the start and the end of this rank's slice when ``num`` samples are divided among ranks.

    Args:
        num: sample count.
        rank: this rank.
        world_size: rank count.
    """
    # Integer arithmetic: slices differ by at most one sample, and cover all.
    return rank * num // world_size, (rank + 1) * num // world_size


def lane_sizes(num_samples: int, lanes: int) -> npt.NDArray[np.int64]:
    """Return the sample count per lane, int64 [lanes]. Counts differ by at most 1."""
    return (num_samples - np.arange(lanes, dtype=np.int64) + lanes - 1) // lanes


def lane_parts(step: Step, lanes: int, rank: int, world_size: int) -> list[LanePart]:
    """Return the samples that a rank reads in a step, as a range of samples per lane.

    The step's samples are sorted by lane, and every rank takes its `rank_slice` of them. So a rank reads
    consecutive lanes, and shares at most the first and the last of them with other ranks.

    Args:
        step: the step.
        lanes: lane count.
        rank: this rank.
        world_size: rank count.
    """
    start, end = rank_slice(step.stop - step.start, rank, world_size)
    parts, num_before = [], 0
    for lane in range(lanes):
        # Sample i is in lane i mod lanes, so this counts the lane's samples below both edges.
        first, last = (step.start - lane + lanes - 1) // lanes, (step.stop - lane + lanes - 1) // lanes
        part_first, part_last = first + max(0, start - num_before), min(last, first + end - num_before)
        if part_first < part_last:
            parts.append(LanePart(lane, part_first, part_last))
        num_before += last - first
    return parts
