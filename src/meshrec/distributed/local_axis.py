"""Inference with tables over several devices of one process, which plays all ranks of the shard axis.

Every device has the tables of one rank. Only the first rank has a batch. Instead of collectives, the process
copies the IDs from the first device to the others, and the rows back.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from meshrec.distributed.lookup import LookupTables
from meshrec.distributed.lookup_batch import LookupBatch, LookupIds, PackedIds


def split_message(batch: LookupBatch) -> list[PackedIds]:
    """Split a batch's message into the messages to the ranks.

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


def copy_ids(part: LookupTables, ids: LookupIds) -> LookupIds:
    """Copy IDs to the device of the tables that they are looked up in."""
    if part.is_empty:
        return ids
    device = part.held.parameters[0].device
    weights = None if ids.weights is None else ids.weights.to(device)
    return ids._replace(values=ids.values.to(device), offsets=ids.offsets.to(device), weights=weights)


def look_up_other_ranks(rows: Tensor, played: Sequence[LookupTables], ids: Sequence[LookupIds]) -> Tensor:
    """Look up the rows of all ranks except the first, and copy them to the first rank's device.

    Args:
        rows: rows that the first rank has looked up.
        played: tables by rank.
        ids: IDs by rank.

    Returns:
        Rows of all ranks, flat, in rank order.
    """
    gathered_rows = [rows.view(-1)]
    for part, rank_ids in zip(played[1:], ids[1:], strict=True):
        gathered_rows.append(part.forward(rank_ids, sum(part.block_sizes(rank_ids))).view(-1).to(rows.device))
    return torch.cat(gathered_rows)
