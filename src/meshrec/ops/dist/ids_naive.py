"""Distinct IDs, and a compressed encoding in which ranks exchange them, in plain torch.

The reference for the kernels, and the fallback without them.

A message consists of runs, end to end. A run is a list of distinct IDs in ascending order, from 0 on, which
is split into groups of ``GROUP`` IDs. A group starts with a byte that holds a bit width w. Then follows, for
each ID, the gap to the previous ID minus 1, in w bits. (The first ID of a run has the predecessor -1.) Bits
fill the bytes from the lowest bit up, and zeros pad the last byte of a group.
"""

import torch
from torch import Tensor

from meshrec.ops.library import implement

# Shape legend: N IDs, W bits.

# One large gap widens only the codes in the same group.
GROUP = 128
"""Number of IDs that share a bit width."""


def distinct_ids(ids: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Return the distinct IDs in ascending order, and for each ID its index among them: int64 [N].

    Time and memory are proportional to ``num_rows``: the kernel uses a bit per row, this version an integer.

    Args:
        ids: int64 [N], in [0, ``num_rows``).
    """
    marks = ids.new_zeros(num_rows, dtype=torch.int32)
    marks[ids] = 1
    # The number of marked rows before a row is its index among the distinct IDs.
    position = marks.cumsum(0) - 1
    return marks.nonzero()[:, 0], position[ids]


def pack_ids(ids: Tensor, counts: list[int]) -> tuple[Tensor, Tensor]:
    """Encode runs of ascending IDs as a compressed message; see the module docstring for the format.

    Args:
        ids: int32 or int64 [N], run by run.

    Returns:
        The message, uint8, and the byte count per run, int64.

    Raises:
        ValueError: a run is not ascending.
    """
    if ids.numel() != sum(counts):
        raise ValueError(f"runs have {sum(counts)} ids, got {ids.numel()}")
    parts, sizes = [], []
    for run in ids.long().split(counts):
        groups = _pack_run(run)
        parts += groups
        sizes.append(sum(map(len, groups)))
    # torch.cat needs at least one tensor.
    empty = ids.new_empty(0, dtype=torch.uint8)
    return torch.cat([*parts, empty]), torch.tensor(sizes, dtype=torch.int64, device=ids.device)


def unpack_sorted_ids(message: Tensor, counts: list[int], wide: bool) -> Tensor:
    """Decode a message from ``pack_ids``, and return the IDs run by run.

    Args:
        message: uint8.
        counts: ID count per run.
        wide: return int64 instead of int32.

    Raises:
        ValueError: the message is too short or too long for the ID counts, or a bit width is above 63.
    """
    parts, position = [], 0
    for count in counts:
        last_id = -1
        for first in range(0, count, GROUP):
            n = min(GROUP, count - first)
            # 64 is an invalid width, which reports a message that ends early.
            width = int(message[position]) if position < len(message) else 64
            size = (n * width + 7) // 8
            if width > 63 or position + 1 + size > len(message):
                raise _corrupt_message(message, counts)
            bits = (
                message[position + 1 : position + 1 + size, None].long()
                >> torch.arange(8, device=message.device)
                & 1
            )
            # One row of bits per gap; padding bits at the end are dropped.
            bits = bits.view(-1)[: n * width].view(n, width)
            gaps = (bits << torch.arange(width, device=message.device)).sum(1)
            # Continue from the last ID of the previous group.
            part = last_id + (gaps + 1).cumsum(0)
            parts.append(part)
            last_id, position = int(part[-1]), position + 1 + size
    if position != len(message):
        raise _corrupt_message(message, counts)
    # torch.cat needs at least one tensor.
    empty = message.new_empty(0, dtype=torch.int64)
    return torch.cat([*parts, empty]).to(torch.int64 if wide else torch.int32)


def _pack_run(run: Tensor) -> list[Tensor]:
    """Encode a run of ascending IDs as a list of uint8 tensors, for the caller to concatenate."""
    # Gaps between sorted distinct IDs are small, so they need few bits.
    gaps = run.diff(prepend=run.new_full((1,), -1)) - 1
    if bool((gaps < 0).any()):
        bad = int((gaps < 0).nonzero()[0])
        previous = int(run[bad - 1]) if bad else -1
        raise ValueError(
            f"ids of a run must be at least 0 and ascend, each once; got {int(run[bad])} after {previous}"
        )
    parts = []
    for group in gaps.split(GROUP) if len(gaps) else ():
        width = int(group.max()).bit_length()
        bits = (group[:, None] >> torch.arange(width, device=run.device) & 1).view(-1)
        # Fill up the last byte with zeros.
        bits = torch.nn.functional.pad(bits, (0, -len(bits) % 8)).view(-1, 8)
        parts.append(run.new_full((1,), width, dtype=torch.uint8))
        parts.append((bits << torch.arange(8, device=run.device)).sum(1).to(torch.uint8))
    return parts


def _corrupt_message(message: Tensor, counts: list[int]) -> ValueError:
    """Return the exception for a message that does not decode."""
    return ValueError(f"a message of {len(message)} bytes does not hold {sum(counts)} packed ids")


implement([distinct_ids, pack_ids, unpack_sorted_ids])
