"""The shard axis of a process that plays all of its ranks, each on one device, without communication.

Only the first rank has a batch. So the exchange of IDs is a scatter from the first rank, and the return of
rows is a gather to it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from meshrec.distributed.input_dist import Arrived, LookupIds, PackedIds
from meshrec.distributed.lookup import LookupTables


def as_played(arrived: Arrived) -> list[PackedIds]:
    """Return the message to each rank of the axis.

    Raises:
        ValueError: a backward pass is wanted, but tables over several devices of a process are for inference.
    """
    if arrived.wishes.backward:
        raise ValueError(
            "tables over several devices of one process are for inference: a lookup in them has no "
            "gradient. Call the model under torch.no_grad(), or detach the per-sample weights."
        )
    words, header, elements = arrived.message
    return [
        PackedIds(own, header[rank : rank + 1], elements[rank : rank + 1])
        for rank, own in enumerate(words.split(header[:, 1].tolist()))
    ]


def moved_to(part: LookupTables, ids: LookupIds) -> LookupIds:
    """Move IDs to the device of the tables that they are looked up in."""
    if part.is_empty:
        return ids
    device = part.held.parameters[0].device
    weights = None if ids.weights is None else ids.weights.to(device)
    return ids._replace(values=ids.values.to(device), offsets=ids.offsets.to(device), weights=weights)


def gathered(rows: Tensor, played: Sequence[LookupTables], ids: Sequence[LookupIds]) -> Tensor:
    """Look up on all ranks after the first, which has ``rows``. Return the rows of all ranks, flat."""
    found = [rows.view(-1)]
    for part, own in zip(played[1:], ids[1:], strict=True):
        found.append(part.forward(own, sum(part.block_sizes(own))).view(-1).to(rows.device))
    return torch.cat(found)
