"""Sample order and assignment to ranks, as pure functions of (seed, epoch).

An epoch's samples form a sequence (blocks in shuffled order), which is cut into L equal *lanes*. The global
order takes a sample from every lane in turn: sample p is number p // L in lane p % L. Ranks share a step by
lanes, so every rank reads contiguous parts of the sequence. L does not depend on the rank count.
"""

from collections.abc import Iterator
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from meshrec.data.dataset import Position


class Stream(IntEnum):
    """Random number purposes, with independent streams."""

    BLOCKS = 1
    WINDOW = 2
    SAMPLES = 3
    TEACHER = 4


class Step(NamedTuple):
    """A step's samples on all ranks: ``[start, stop)`` in the global order."""

    start: int
    stop: int


class LanePart(NamedTuple):
    """Samples ``[first, last)`` in a lane."""

    lane: int
    first: int
    last: int


def generator(seed: int, stream: Stream, *counters: int) -> np.random.Generator:
    """Return a random number generator that depends only on the arguments, which must not be negative.

    Args:
        seed: random seed.
        stream: purpose.
        counters: further seeds, such as epoch and block.
    """
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, int(stream), *counters])))


def check_seed(seed: int) -> None:
    """Raise ValueError unless ``seed`` is an integer >= 0."""
    if not isinstance(seed, int) or seed < 0:
        raise ValueError(f"seed must be an integer >= 0, got {seed!r}.")


def steps(
    num_samples: int, batch_size: int, position: Position, rank: int, world_size: int, *, drop_last: bool
) -> Iterator[Step]:
    """Validate the arguments, and return an epoch's remaining steps.

    Args:
        num_samples: samples per epoch.
        batch_size: samples per batch and rank.
        position: start position.
        rank: this rank.
        world_size: rank count.
        drop_last: whether to omit an incomplete last step.

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
        stop -= (num_samples - position.sample) % size
    return (Step(start, min(start + size, stop)) for start in range(position.sample, stop, size))


def rank_slice(num: int, rank: int, world_size: int) -> tuple[int, int]:
    """Return the slice for ``rank`` when ``num`` samples are divided equally among ``world_size`` ranks.

    Args:
        num: sample count.
        rank: this rank.
        world_size: rank count.
    """
    # Integer arithmetic: slices differ by at most one sample, and cover all.
    return rank * num // world_size, (rank + 1) * num // world_size


def lane_sizes(num_samples: int, lanes: int) -> npt.NDArray[np.int64]:
    """Return the samples per lane."""
    return (num_samples - np.arange(lanes, dtype=np.int64) + lanes - 1) // lanes


def lane_parts(step: Step, lanes: int, rank: int, world_size: int) -> list[LanePart]:
    """Return the lane parts a rank reads for a step: the rank's sample slice, sorted by lane.

    Args:
        step: step samples.
        lanes: lane count.
        rank: this rank.
        world_size: rank count.
    """
    start, end = rank_slice(step.stop - step.start, rank, world_size)
    parts, num_before = [], 0
    for lane in range(lanes):
        # Sample i is in lane i mod lanes, so this counts the lane's samples below both edges.
        first, last = ((edge - lane + lanes - 1) // lanes for edge in step)
        part = LanePart(lane, first + max(0, start - num_before), min(last, first + end - num_before))
        if part.first < part.last:
            parts.append(part)
        num_before += last - first
    return parts
