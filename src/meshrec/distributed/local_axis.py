"""Shard axis played by a single process, with a device per rank and no communication.

Only the first rank has a batch. The ID exchange is a scatter from the first rank, and the row exchange is a
gather to the first rank.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from meshrec.distributed.lookup import LookupTables
from meshrec.distributed.lookup_batch import LookupBatch, LookupIds, PackedIds


def as_played(batch: LookupBatch) -> list[PackedIds]:
    """Return the message to every rank on the axis.

    Raises:
        ValueError: a backward pass is requested, but tables over several devices are for inference.
    """
    if batch.trains:
        raise ValueError(
            "tables over several devices of one process are for inference: a lookup in them has no "
            "gradient. Call the model under torch.no_grad(), or detach the per-sample weights."
        )
    words, header, elements = batch.message
    return [
        PackedIds(rank_words, header[rank : rank + 1], elements[rank : rank + 1])
        for rank, rank_words in enumerate(words.split(header[:, 1].tolist()))
    ]


def moved_to(part: LookupTables, ids: LookupIds) -> LookupIds:
    """Move IDs to the device that holds the tables."""
    if part.is_empty:
        return ids
    device = part.held.parameters[0].device
    weights = None if ids.weights is None else ids.weights.to(device)
    return ids._replace(values=ids.values.to(device), offsets=ids.offsets.to(device), weights=weights)


def gathered(rows: Tensor, played: Sequence[LookupTables], ids: Sequence[LookupIds]) -> Tensor:
    """Look up on all ranks after the first and gather the rows on the first rank's device.

    Args:
        rows: the first rank's rows.
        played: tables by rank.
        ids: IDs by rank.

    Returns:
        Rows from all ranks, flat, in rank order.
    """
    gathered_rows = [rows.view(-1)]
    for part, rank_ids in zip(played[1:], ids[1:], strict=True):
        gathered_rows.append(part.forward(rank_ids, sum(part.block_sizes(rank_ids))).view(-1).to(rows.device))
    return torch.cat(gathered_rows)
