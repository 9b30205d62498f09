"""Sharded models' state dicts: gather on a rank, move to a device, pickle rank by rank."""

import copyreg
import logging
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshrec.distributed.split_tensor import LocalRectangles, SplitTensor
from meshrec.tables.table import Rectangle

_logger = logging.getLogger("meshrec")


def state_dict_gather(src: Mapping[str, Tensor], dst: Mapping[str, Tensor]) -> None:
    """Copy ``src`` into the tensors of ``dst``, by name. Collective.

    Args:
        src: sharded model's state dict, on every rank.
        dst: unsharded model's state dict. Split tables are copied on rank 0 only, which needs memory for
            them.

    Raises:
        ValueError: ``src`` lacks a name in ``dst``.
    """
    if missing := [name for name in dst if name not in src]:
        raise ValueError(
            f"the source has no {missing[0]!r}; it has {list(src)}. Gather the state of a model with the "
            "same names."
        )
    for name, target in dst.items():
        source = src[name]
        if isinstance(source, SplitTensor):
            # Collective, so every rank calls it, although only rank 0 keeps the result.
            whole = source.full_tensor()
            if dist.get_rank() == 0:
                target.copy_(whole)
        else:
            target.copy_(source)


def state_dict_all_gather_keys(state_dict: Mapping[str, Tensor], pg: dist.ProcessGroup) -> list[str]:
    """Return the union of all ranks' names, sorted. Collective."""
    names: list[Any] = [None] * dist.get_world_size(pg)
    dist.all_gather_object(names, list(state_dict), pg)
    return sorted({name for of_rank in names for name in of_rank})


def state_dict_to_device(
    state_dict: Mapping[str, Tensor], pg: dist.ProcessGroup, device: torch.device
) -> dict[str, Tensor]:
    """Return the state dict with all values on ``device``. Collective.

    Args:
        state_dict: sharded model's state dict. Every rank has an entry for every table.
        pg: process group.
        device: target device.
    """
    return {name: state_dict[name].to(device) for name in state_dict_all_gather_keys(state_dict, pg)}


def pickle_by_rank() -> None:
    """Register with pickle how to write a table that is split over ranks: only this rank's shards.

    TorchRec programs pickle every rank's state dict, and load it on the same rank under the same plan.
    """
    copyreg.pickle(SplitTensor, _reduced)
    # torch.load with weights_only=True must accept these pickles.
    torch.serialization.add_safe_globals([_rectangles_of])


def _reduced(table: SplitTensor) -> Any:
    """Return the tuple from which pickle writes a split table, as ``__reduce__`` does.

    If this rank has the whole table, pickle writes a plain tensor. Otherwise it writes this rank's
    rectangles, which are blocks of rows and columns, and a warning is logged.
    """
    local = table.local
    if len(local._parts) == 1 and local._parts[0].shape == table.shape:
        return local._parts[0].detach().__reduce_ex__(2)  # all of it is here
    # Carries only the dtype.
    like = torch.empty(0, dtype=local.dtype)
    rectangles = [tuple(rectangle) for rectangle in local._rectangles]
    _logger.warning(
        "a table of shape %s is split over ranks: the pickle holds this rank's rectangles %s. Pickle on "
        "every rank, or save the whole, full_tensor().",
        list(table.shape),
        rectangles,
    )
    return _rectangles_of, (local._parts, rectangles, like, tuple(table.shape))


def _rectangles_of(
    parts: list[Tensor], rectangles: list[tuple[int, ...]], like: Tensor, size: tuple[int, ...]
) -> LocalRectangles:
    """Return one rank's shards of a split table, from the pickled values.

    Args:
        like: empty tensor with the dtype of the table.
    """
    return LocalRectangles(parts, [Rectangle(*bounds) for bounds in rectangles], like, size)
