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
    """Return the arguments with which FBGEMM's operators regroup the slices of KeyedTensors.

    Args:
        value: tensor on the target device.
        keys: slice names per input.
        key_lengths: slice widths per input.
        groups: keys per group.

    Returns:
        A tuple of four.

        - int32 [P, 6] with a row per slice: input index, output index, start column in the input, start
          column in the output, width, and a link.
        - Input widths, int32.
        - Output widths, int32.
        - Output widths as a list.

        The link is 0 if only this slice reads the input columns. Otherwise, it leads to the next slice that
        reads the same columns: the first link in such a chain is the index of that slice, further links are
        the negative index, and the last link is -P.
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
                # The first use of a key points to the next use by its index. Later uses point by a negative
                # index.
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
