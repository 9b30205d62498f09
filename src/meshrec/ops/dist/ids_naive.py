"""The distinct IDs of a node, and how they are packed for their way to others, in plain torch.

It is the reference for the kernels, and the fallback.

A message is a sequence of runs. The IDs of a run ascend, each once, from 0 on. A run is cut into groups of
``GROUP`` IDs. A group is one byte with a width w, then for each of its IDs the gap to the ID before, less one,
in w bits (the ID before the first one is -1). Bits fill bytes from the lowest on, and the last byte of a
group is filled up with zeros.
"""

import torch
from torch import Tensor

from meshrec.ops.library import implement

# N IDs, W bits

GROUP = 128


def distinct_ids(ids: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Return the distinct IDs, ascending, and the place of each ID among them.

    Time and memory grow with ``num_rows``: a bit for each row in the kernel, a number for each one here.

    Args:
        ids: int64 [N], each in [0, ``num_rows``).
        num_rows: the number of IDs that there can be.
    """
    marks = ids.new_zeros(num_rows, dtype=torch.int32)
    marks[ids] = 1
    place = marks.cumsum(0) - 1
    return marks.nonzero()[:, 0], place[ids]


def pack_ids(ids: Tensor, counts: list[int]) -> tuple[Tensor, Tensor]:
    """Pack runs of ascending IDs.

    Args:
        ids: int32 or int64 [N], run by run.
        counts: the number of IDs of each run.

    Returns:
        The message, uint8, and the number of bytes of each run, int64.

    Raises:
        ValueError: the IDs of a run do not ascend.
    """
    if ids.numel() != sum(counts):
        raise ValueError(f"runs have {sum(counts)} ids, got {ids.numel()}")
    parts, sizes = [], []
    for run in ids.long().split(counts):
        groups = _packed(run)
        parts += groups
        sizes.append(sum(map(len, groups)))
    empty = ids.new_empty(0, dtype=torch.uint8)
    return torch.cat([*parts, empty]), torch.tensor(sizes, dtype=torch.int64, device=ids.device)


def unpack_sorted_ids(message: Tensor, counts: list[int], wide: bool) -> Tensor:
    """Return the IDs that ``pack_ids`` packed, int64 if ``wide``, else int32.

    Raises:
        ValueError: the message does not contain this number of IDs.
    """
    parts, at = [], 0
    for count in counts:
        before = -1
        for first in range(0, count, GROUP):
            n = min(GROUP, count - first)
            width = int(message[at]) if at < len(message) else 64
            size = (n * width + 7) // 8
            if width > 63 or at + 1 + size > len(message):
                raise _broken(message, counts)
            bits = message[at + 1 : at + 1 + size, None].long() >> torch.arange(8, device=message.device) & 1
            bits = bits.view(-1)[: n * width].view(n, width)
            gaps = (bits << torch.arange(width, device=message.device)).sum(1)
            part = before + (gaps + 1).cumsum(0)
            parts.append(part)
            before, at = int(part[-1]), at + 1 + size
    if at != len(message):
        raise _broken(message, counts)
    empty = message.new_empty(0, dtype=torch.int64)
    return torch.cat([*parts, empty]).to(torch.int64 if wide else torch.int32)


def _packed(run: Tensor) -> list[Tensor]:
    gaps = run.diff(prepend=run.new_full((1,), -1)) - 1
    if bool((gaps < 0).any()):
        bad = int((gaps < 0).nonzero()[0])
        before = int(run[bad - 1]) if bad else -1
        raise ValueError(
            f"ids of a run must be at least 0 and ascend, each once; got {int(run[bad])} after {before}"
        )
    parts = []
    for group in gaps.split(GROUP) if len(gaps) else ():
        width = int(group.max()).bit_length()
        bits = (group[:, None] >> torch.arange(width, device=run.device) & 1).view(-1)
        bits = torch.nn.functional.pad(bits, (0, -len(bits) % 8)).view(-1, 8)
        parts.append(run.new_full((1,), width, dtype=torch.uint8))
        parts.append((bits << torch.arange(8, device=run.device)).sum(1).to(torch.uint8))
    return parts


def _broken(message: Tensor, counts: list[int]) -> ValueError:
    return ValueError(f"a message of {len(message)} bytes does not hold {sum(counts)} packed ids")


implement([distinct_ids, pack_ids, unpack_sorted_ids])
