"""Gives every replica of a table the ids and gradients of all replicas, so that all make the same update.

What travels is what the backward pass works from: packed ids and the gradient of the looked-up rows. For
pooled tables that is one row per bag, fewer bytes than one gradient row per id; the update then runs as if
one rank had seen it all.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from meshrec.distributed.collectives import InFlight, all_gather
from meshrec.distributed.input_dist import Message
from meshrec.distributed.mesh import Axis


class Gathering(NamedTuple):
    """Sizes are under way."""

    message: Message
    grad: Tensor
    axis: Axis
    sizes: InFlight


class Sizes(NamedTuple):
    """What every rank of the axis has: its header [n, 4] and the elements of its gradient."""

    headers: Tensor
    num_grads: list[int]
    words: list[int]

    def bytes_sent(self) -> int:
        """What a gather makes each rank send to the others, in bytes."""
        per_rank = [4 * (words + grads) for words, grads in zip(self.words, self.num_grads, strict=True)]
        return max(per_rank) * (len(per_rank) - 1)


def start_gather(message: Message, grad: Tensor, axis: Axis) -> Gathering:
    """Starts to exchange sizes. ``grad``: fp32, in the order of the message's blocks."""
    sizes = torch.cat([message.header.reshape(-1), torch.tensor([grad.numel()])])
    sizes = sizes.to(message.words.device)
    return Gathering(message, grad, axis, all_gather(sizes, axis, "sizes of gradients"))


def gathered_sizes(gathering: Gathering) -> Sizes:
    """Waits for the sizes."""
    rows = gathering.sizes.wait().cpu()
    headers = rows[:, :-1].reshape(rows.shape[0], *gathering.message.header.shape)
    return Sizes(headers, rows[:, -1].tolist(), headers[:, :, 1].sum(1).tolist())


def finish_gather(gathering: Gathering, sizes: Sizes) -> tuple[Message, Tensor]:
    """The messages of all ranks, one rank after the other, and their gradients, flat, in the same order."""
    lengths = [words + grads for words, grads in zip(sizes.words, sizes.num_grads, strict=True)]
    mine = torch.cat([gathering.message.words, gathering.grad.reshape(-1).view(torch.int32)])
    padded = torch.nn.functional.pad(mine, (0, max(lengths) - mine.numel()))
    rows = all_gather(padded, gathering.axis, "ids and gradients of replicas").wait()
    words = torch.cat([row[:count] for row, count in zip(rows, sizes.words, strict=True)])
    grads = torch.cat(
        [row[count:length] for row, count, length in zip(rows, sizes.words, lengths, strict=True)]
    )
    return Message(words, sizes.headers.flatten(0, 1)), grads.view(torch.float32)
