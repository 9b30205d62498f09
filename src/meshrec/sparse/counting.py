"""Value counts per key in a KeyedJaggedTensor, read from the device to the host."""

from collections.abc import Iterable
from functools import reduce
from itertools import pairwise
from operator import add

import torch

from meshrec.sparse.keyed_bags import KeyedBags


def count_per_key(kjt: KeyedBags) -> list[int]:
    """Return the value count per key. This waits for the device.

    Raises:
        ValueError: The lengths do not sum to the value count.
    """
    # Without keys, the offsets have nothing to read.
    if not kjt.keys():
        return []
    if torch.compiler.is_compiling():
        return _traced_count_per_key(kjt)
    # With equal strides, key boundaries are a strided view of the offsets, without an index tensor.
    if kjt.variable_stride_per_key() or kjt.stride() == 0:
        bags = torch.tensor(kjt.lengths_offset_per_key(), device=kjt.device())
        # A single copy to the host: indexing per key would synchronize K times.
        ends: list[int] = kjt.offsets()[bags].tolist()
    else:
        ends = kjt.offsets()[:: kjt.stride()].tolist()
    num_values = kjt.values().size(0)
    # Without this check, split() would fail later with a torch error that names no key.
    if ends[-1] != num_values:
        raise ValueError(
            f"KeyedJaggedTensor: the lengths sum to {ends[-1]}, but there are {num_values} values; "
            "validate() finds the key and sample"
        )
    return [end - start for start, end in pairwise(ends)]


def _traced_count_per_key(kjt: KeyedBags) -> list[int]:
    """Return the value count per key while torch traces, as symbolic integers whose values are unknown.

    The symbols are marked as non-negative, so that torch.export accepts them as sizes.
    """
    if kjt.variable_stride_per_key():
        bags = torch.tensor(kjt.lengths_offset_per_key(), device=kjt.device())
        counts = kjt.offsets()[bags].diff()
    else:
        # Sums, not differences of offsets: the key count and the stride are known shapes in tracing.
        counts = kjt.lengths().view(len(kjt.keys()), kjt.stride()).sum(1)
    count_per_key: list[int] = counts.tolist()
    for count in count_per_key:
        # Without this check, export refuses the symbol as a size.
        torch._check(count >= 0)
    return count_per_key


def sum_counts(counts: Iterable[int]) -> int:
    """Return the sum of some counts, which may be symbolic integers."""
    # Not sum(): under tracing it builds an expression that torch cannot save in an exported program.
    return reduce(add, counts, 0)
