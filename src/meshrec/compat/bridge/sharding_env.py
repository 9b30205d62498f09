"""The ranks that share a model, with TorchRec's attribute names."""

import torch
import torch.distributed as dist

from meshrec.comms import mesh


class ShardingEnv(mesh.ShardingEnv):
    """MeshRec's ``ShardingEnv`` with the attributes ``world_size``, ``rank`` and ``process_group``."""

    @property
    def world_size(self) -> int:
        """The number of ranks; in one process, of devices."""
        return len(self.devices) or self.world.size

    @property
    def rank(self) -> int:
        """The number of this rank."""
        return self.world.rank

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The group of all ranks."""
        return self.world.group

    @classmethod
    def from_local(cls, world_size: int, rank: int) -> "ShardingEnv":  # type: ignore[override]
        """Return one process without a group. For inference it has ``world_size`` devices, GPUs if there are
        enough.

        Raises:
            ValueError: the rank is not 0, so it would be another process.
        """
        if world_size < 1 or rank != 0:
            raise ValueError(
                f"one process is rank 0 of at least one device, got rank {rank} of {world_size}. For "
                "several processes use ShardingEnv.from_process_group."
            )
        if world_size == 1:
            return cls()
        there = torch.cuda.device_count() >= world_size
        devices = local_devices(world_size, "cuda" if there else "cpu")
        return cls(shard=mesh.Axis(size=world_size), devices=tuple(devices))


def local_devices(number: int, kind: str) -> list[torch.device]:
    """Return ``number`` devices of this host: GPUs, or the CPU several times.

    Raises:
        ValueError: there are fewer GPUs.
    """
    if kind == "cpu":
        return [torch.device("cpu")] * number
    if torch.cuda.device_count() < number:
        raise ValueError(
            f"{number} devices of type {kind!r} are asked for, and {torch.cuda.device_count()} are here. "
            "Pass compute_device='cpu', or fewer devices."
        )
    return [torch.device(kind, index) for index in range(number)]
