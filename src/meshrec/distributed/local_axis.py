"""Inference with a single process that has several devices, and tables sharded over these devices.

The process acts for all ranks on the shard axis: every device has the shards of one rank. Only the first rank
has a batch. Instead of running collectives, the process copies IDs from the first device to the other
devices, and copies the rows back.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from meshrec.distributed.lookup import LookupTables
from meshrec.distributed.lookup_batch import LookupBatch, LookupIds, PackedIds


def split_message(batch: LookupBatch) -> list[PackedIds]:
    """Split the packed IDs of a batch into a message per rank.

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
        # Column 1 of a header: int32 words in the message.
        for rank, rank_words in enumerate(words.split(header[:, 1].tolist()))
    ]


def copy_ids(part: LookupTables, ids: LookupIds) -> LookupIds:
    """Return the IDs on the device of ``part``, where they are looked up."""
    # A rank without tables has no parameter from which to read the device.
    if part.is_empty:
        return ids
    device = part.shards.parameters[0].device
    weights = None if ids.weights is None else ids.weights.to(device)
    return ids._replace(values=ids.values.to(device), offsets=ids.offsets.to(device), weights=weights)


def look_up_other_ranks(rows: Tensor, played: Sequence[LookupTables], ids: Sequence[LookupIds]) -> Tensor:
    """Look up rows on the devices of all other ranks, and append them to the first rank's rows.

    Args:
        rows: rows already looked up for the first rank.
        played: for every rank for which this process acts, its tables, in rank order.
        ids: IDs to look up for every rank.

    Returns:
        Rows from all ranks, flat, in rank order, on the first rank's device.
    """
    gathered_rows = [rows.view(-1)]
    for part, rank_ids in zip(played[1:], ids[1:], strict=True):
        gathered_rows.append(part.forward(rank_ids, sum(part.block_sizes(rank_ids))).view(-1).to(rows.device))
    return torch.cat(gathered_rows)
