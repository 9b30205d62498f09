"""Gives every replica of a table the ids and gradients of all replicas, so that all make the same update.

What travels is what the backward pass works from: packed ids and the gradient of the looked-up rows. For
pooled tables that is one row per bag, fewer bytes than one gradient row per id; the update then runs as if
one rank had seen it all.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from meshrec.distributed.collectives import InFlight, all_gather, all_reduce
from meshrec.distributed.holdings import RowGradients
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

    def gather_bytes(self) -> int:
        """What a gather makes each rank send to the others, in bytes."""
        per_rank = [4 * (words + grads) for words, grads in zip(self.words, self.num_grads, strict=True)]
        return max(per_rank) * (len(per_rank) - 1)


def reduce_bytes(shapes: Sequence[tuple[int, int]], num_ranks: int) -> int:
    """What summing whole gradients of tables of these shapes makes each rank send, in bytes."""
    elements = sum(rows * (dim + 1) for rows, dim in shapes)
    return 2 * (num_ranks - 1) * 4 * elements // num_ranks


def reduce_gradients(
    own: Sequence[RowGradients], shapes: Sequence[tuple[int, int]], axis: Axis
) -> list[RowGradients]:
    """The gradients of all ranks, summed as whole tables; a column more counts who touched each row."""
    sizes = [rows * (dim + 1) for rows, dim in shapes]
    flat = torch.zeros(sum(sizes), device=own[0].grads.device)
    tables = [part.view(rows, dim + 1) for part, (rows, dim) in zip(flat.split(sizes), shapes, strict=True)]
    for table, part in zip(tables, own, strict=True):
        table[part.rows, :-1] = part.grads
        table[part.rows, -1] = 1
    all_reduce(flat, axis, "gradients of replicas")
    rows = [table[:, -1].nonzero()[:, 0] for table in tables]
    return [RowGradients(at, table[at, :-1]) for at, table in zip(rows, tables, strict=True)]


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
