"""Split tables as checkpoints see them: one DTensor per table that knows which rectangles are here.

The local value is torch's LocalShardsWrapper, which tells DCP (torch.distributed.checkpoint) the place and
size of every local rectangle, so that DCP reads and writes them in place, whatever plan the other side had.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from meshrec.distributed.routing import Rectangle


def split_tensor(
    shards: Sequence[Tensor],
    rectangles: Sequence[Rectangle],
    size: tuple[int, ...],
    mesh: DeviceMesh | None,
) -> Tensor:
    """A tensor of ``size`` of which this rank holds ``shards``, without a copy; 1-D: state with a number per
    row.

    ``mesh``: with an axis ``shard``, and perhaps ``replicate`` before it; None with one process, where the
    whole is put together if it is in several pieces.
    """
    parts = [shard.detach() for shard in shards]
    if mesh is None:
        return parts[0] if len(parts) == 1 else _joined(parts, rectangles, size)
    # Imported here: they cost much, and are needed by checkpoints only.
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

    offsets = [(r.r0, r.c0)[: len(size)] for r in rectangles]
    if len(size) == 1:
        parts, offsets = _distinct_rows(parts, offsets)
        if not parts:
            # Torch takes a wrapper of nothing for a matrix; no rows behind the last one is a vector.
            parts, offsets = [torch.empty(0)], [size]
    stride = (size[1], 1) if len(size) == 2 else (1,)
    return DTensor.from_local(
        LocalShardsWrapper(parts, offsets),
        mesh,
        [*[Replicate()] * (mesh.ndim - 1), Shard(0)],
        run_check=False,
        shape=torch.Size(size),
        stride=stride,
    )


def copy_into(
    shards: Sequence[Tensor], rectangles: Sequence[Rectangle], value: Tensor, name: str, size: tuple[int, ...]
) -> None:
    """Loads what belongs here from a DTensor of the same plan, or from a whole tensor.

    Raises:
        ValueError: when the size differs, or the value holds other rectangles.
    """
    if tuple(value.shape) != tuple(size):
        raise ValueError(
            f"{name}: the state dict has shape {list(value.shape)}, the table {list(size)}. "
            "Load it into a model with the same tables."
        )
    sources = _local_shards(value)
    for shard, rectangle in zip(shards, rectangles, strict=True):
        if sources is None:
            rows = value[rectangle.r0 : rectangle.r1]
            part = rows if len(size) == 1 else rows[:, rectangle.c0 : rectangle.c1]
        else:
            offsets = (rectangle.r0, rectangle.c0)[: len(size)]
            found = sources.get(offsets)
            if found is None or found.shape != shard.shape:
                raise ValueError(
                    f"{name}: the state dict holds other rectangles of the table than this plan has on "
                    "this rank. "
                    "Let torch.distributed.checkpoint load it: it reshards."
                )
            part = found
        if part.data_ptr() != shard.data_ptr():
            shard.detach().copy_(part)


def _local_shards(value: Tensor) -> dict[tuple[int, ...], Tensor] | None:
    local = getattr(value, "_local_tensor", None)
    if local is None:
        return None
    # A wrapper of nothing speaks of one chunk without elements: the shards decide.
    return {
        tuple(offset): shard
        for shard, offset in zip(local.local_shards(), local.local_offsets(), strict=False)
    }


def _joined(parts: Sequence[Tensor], rectangles: Sequence[Rectangle], size: tuple[int, ...]) -> Tensor:
    whole = parts[0].new_empty(size)
    for part, r in zip(parts, rectangles, strict=True):
        target = whole[r.r0 : r.r1]
        (target if len(size) == 1 else target[:, r.c0 : r.c1]).copy_(part)
    return whole


def _distinct_rows(
    parts: list[Tensor], offsets: list[tuple[int, ...]]
) -> tuple[list[Tensor], list[tuple[int, ...]]]:
    """Rectangles side by side hold the same numbers per row: one of them speaks for all."""
    first = dict(reversed(list(zip(offsets, parts, strict=True))))
    return list(first.values()), list(first)
