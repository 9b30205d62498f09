"""Local rank, local size and node index, read from the launcher's environment."""

import os

import torch
import torch.distributed as dist

# Set by torchrun and by several MPI launchers. The first that is set wins.
_SIZES = ("LOCAL_WORLD_SIZE", "MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE")
_RANKS = ("LOCAL_RANK", "MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK")
# TorchRec's assumption for launchers that set none of these: eight GPUs per node.
_DEFAULT_LOCAL_SIZE = 8


def get_local_size(world_size: int | None = None) -> int:
    """Return the number of processes on this node.

    Uses the launcher's value, or 8 without one. If this does not divide ``world_size``, returns
    ``world_size``.
    """
    world_size = dist.get_world_size() if world_size is None else world_size
    local_size = _first(_SIZES)
    local_size = _DEFAULT_LOCAL_SIZE if local_size is None else local_size
    return world_size if local_size < 1 or world_size % local_size else local_size


def get_local_rank(world_size: int | None = None, rank: int | None = None) -> int:
    """Return the launcher's local rank, or the rank modulo ``get_local_size`` without one."""
    local_size, local_rank = get_local_size(world_size), _first(_RANKS)
    if local_rank is not None and local_rank < local_size:
        return local_rank
    return (dist.get_rank() if rank is None else rank) % local_size


def get_group_rank(world_size: int | None = None, rank: int | None = None) -> int:
    """Return this process's node index."""
    return (dist.get_rank() if rank is None else rank) // get_local_size(world_size)


def get_num_groups(world_size: int | None = None) -> int:
    """Return the number of nodes."""
    world_size = dist.get_world_size() if world_size is None else world_size
    return world_size // get_local_size(world_size)


def get_device_type() -> str:
    """Return ``"cuda"`` if a GPU is available, else ``"cpu"``."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def _first(names: tuple[str, ...]) -> int | None:
    # Unset and negative values both mean that this launcher is not in use.
    numbers = (int(os.environ.get(name, -1)) for name in names)
    return next((number for number in numbers if number >= 0), None)
