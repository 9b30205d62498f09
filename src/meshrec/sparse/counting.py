"""Numbers of values that Python needs on the host: those of each key of a KeyedJaggedTensor."""

from collections.abc import Iterable
from functools import reduce
from itertools import pairwise
from operator import add

import torch

from meshrec.sparse.keyed_bags import KeyedBags


def count_per_key(kjt: KeyedBags) -> list[int]:
    """Return the number of values of each key; waits for the device.

    Raises:
        ValueError: The lengths do not sum to the number of values.
    """
    if not kjt.keys():
        return []
    if torch.compiler.is_compiling():
        return _traced_count_per_key(kjt)
    if kjt.variable_stride_per_key() or kjt.stride() == 0:
        bags = torch.tensor(kjt.lengths_offset_per_key(), device=kjt.device())
        ends: list[int] = kjt.offsets()[bags].tolist()
    else:
        ends = kjt.offsets()[:: kjt.stride()].tolist()
    num_values = kjt.values().size(0)
    if ends[-1] != num_values:
        raise ValueError(
            f"KeyedJaggedTensor: the lengths sum to {ends[-1]}, but there are {num_values} values; "
            "validate() finds the key and sample"
        )
    return [end - start for start, end in pairwise(ends)]


def _traced_count_per_key(kjt: KeyedBags) -> list[int]:
    """Return the counts as symbols of the traced program, marked as sizes."""
    if kjt.variable_stride_per_key():
        bags = torch.tensor(kjt.lengths_offset_per_key(), device=kjt.device())
        counts = kjt.offsets()[bags].diff()
    else:
        counts = kjt.lengths().view(len(kjt.keys()), kjt.stride()).sum(1)
    count_per_key: list[int] = counts.tolist()
    for count in count_per_key:
        torch._check(count >= 0)
    return count_per_key


def total(counts: Iterable[int]) -> int:
    """Add up counts, which may be symbols. An exported program with ``sum`` of symbols cannot be saved."""
    return reduce(add, counts, 0)
