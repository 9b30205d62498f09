"""TorchRec's helpers for node sizes and local ranks from the launcher, and for modules on devices."""

import copy
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn

# Set by torchrun and by several MPI launchers. The first that is set wins.
_SIZES = ("LOCAL_WORLD_SIZE", "MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE")
# In the same order as the sizes.
_RANKS = ("LOCAL_RANK", "MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK")
# TorchRec's assumption for launchers that set none of these: eight GPUs per node.
_DEFAULT_LOCAL_SIZE = 8


def get_local_size(world_size: int | None = None) -> int:
    """Return the number of processes on this node, as set by the launcher in the environment.

    The default without a launcher is 8. If the size does not divide ``world_size``, return ``world_size``.
    """
    world_size = dist.get_world_size() if world_size is None else world_size
    local_size = _first(_SIZES)
    local_size = _DEFAULT_LOCAL_SIZE if local_size is None else local_size
    return world_size if local_size < 1 or world_size % local_size else local_size


def get_local_rank(world_size: int | None = None, rank: int | None = None) -> int:
    """Return the rank within this node, as set by the launcher, otherwise ``rank`` modulo the local size."""
    local_size, local_rank = get_local_size(world_size), _first(_RANKS)
    if local_rank is not None and local_rank < local_size:
        return local_rank
    return (dist.get_rank() if rank is None else rank) % local_size


def get_group_rank(world_size: int | None = None, rank: int | None = None) -> int:
    """Return the index of this rank's node: the rank divided by ``get_local_size``, rounded down.

    Args:
        world_size: number of ranks; None: the size of the default process group.
        rank: rank; None: this process's rank.
    """
    return (dist.get_rank() if rank is None else rank) // get_local_size(world_size)


def get_num_groups(world_size: int | None = None) -> int:
    """Return the number of nodes: ``world_size`` divided by ``get_local_size``."""
    world_size = dist.get_world_size() if world_size is None else world_size
    return world_size // get_local_size(world_size)


def get_device_type() -> str:
    """Return ``"cuda"`` if a GPU is available, else ``"cpu"``."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def copy_to_device(module: nn.Module, current_device: torch.device, to_device: torch.device) -> nn.Module:
    """Return a deep copy with tensors moved from ``current_device`` to ``to_device``.

    Args:
        module: module to copy. It is not changed.
        current_device: device of the tensors to move. Copies of other tensors stay on their device.
        to_device: target device.
    """

    def moved(tensor: Tensor) -> Tensor:
        return tensor.to(to_device) if tensor.device == current_device else tensor

    copied = copy.deepcopy(module)
    copied._apply(moved)
    return copied


class CopyableMixin(nn.Module):
    """Base class for modules with a method ``copy``, which copies them from the CPU to a device."""

    def copy(self, device: torch.device) -> nn.Module:
        """Return a copy on ``device``."""
        return copy_to_device(self, torch.device("cpu"), device)


def init_parameters(module: nn.Module, device: torch.device) -> None:
    """Move a module to a device in place. If any parameter was on another device, reinitialize all
    parameters.
    """
    if all(parameter.device == device for parameter in module.parameters()):
        return
    with torch.no_grad():
        is_meta = any(parameter.is_meta for parameter in module.parameters())
        # ``to`` cannot copy out of meta tensors. Their values are drawn below in either case.
        module.to_empty(device=device) if is_meta else module.to(device)
        for child in module.modules():
            reset = getattr(child, "reset_parameters", None)
            if reset is not None:
                reset()


def _first(names: tuple[str, ...]) -> int | None:
    """Return the first non-negative integer among these environment variables, or None."""
    # Unset and negative values both mean that this launcher is not in use.
    values = (int(os.environ.get(name, -1)) for name in names)
    return next((value for value in values if value >= 0), None)
