"""FBGEMM's regroup arguments, and a check of regroup's keys."""

import torch
from torch import Tensor

from meshrec.compat.bridge.sparse.keyed import KeyedTensor
from meshrec.compat.bridge.sparse.segments import running_sum

_WIDTH = 6  # columns per slice: see kt_regroup_arguments


def _all_keys_used_once(keyed_tensors: list[KeyedTensor], groups: list[list[str]]) -> bool:
    """Return whether the groups use every key of the inputs exactly once."""
    keys = [key for kt in keyed_tensors for key in kt.keys()]  # noqa: SIM118 - not a dict
    used = [key for group in groups for key in group]
    return len(set(keys)) == len(set(used)) == len(keys) == len(used)


def kt_regroup_arguments(
    value: Tensor, keys: list[list[str]], key_lengths: list[list[int]], groups: list[list[str]]
) -> tuple[Tensor, Tensor, Tensor, list[int]]:
    """Return FBGEMM's regroup arguments.

    Args:
        value: tensor on the target device.
        keys: slice names per input.
        key_lengths: slice widths per input.
        groups: keys per group.

    Returns:
        int32 [P, 6], a row per slice: input, output, start in the input, start in the output, width, and a
            link to the next slice that reads the same columns. Links are 0 for a single use; the first in a
            chain is positive, the next ones are negative, and the last is -P. Then input and output widths as
            tensors, and output widths as a list.
    """
    slices: dict[str, tuple[int, int, int]] = {}
    for i in range(len(keys)):
        starts = running_sum(key_lengths[i])
        for j in range(len(keys[i])):
            slices[keys[i][j]] = (i, starts[j], key_lengths[i][j])
    pieces: list[list[int]] = []
    widths: list[int] = []
    last: dict[str, int] = {}
    num_pieces = sum([len(group) for group in groups])
    for output in range(len(groups)):
        start = 0
        for key in groups[output]:
            source, first, width = slices[key]
            link = 0
            if key in last:
                before = last[key]
                is_head = pieces[before][5] == 0
                pieces[before][5] = len(pieces) if is_head else -len(pieces)
                # The current end of the chain. A later use of the key overwrites it.
                link = -num_pieces
            last[key] = len(pieces)
            pieces.append([source, output, first, start, width, link])
            start += width
        widths.append(start)
    device = value.device
    return (
        torch.tensor(pieces, dtype=torch.int32, device=device).view(-1, _WIDTH),
        torch.tensor([sum(lengths) for lengths in key_lengths], dtype=torch.int32, device=device),
        torch.tensor(widths, dtype=torch.int32, device=device),
        widths,
    )
