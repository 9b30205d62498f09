"""ShardingEnv with TorchRec's attribute names."""

import torch
import torch.distributed as dist

from meshrec.comms import mesh


class ShardingEnv(mesh.ShardingEnv):
    """MeshRec's ``ShardingEnv`` with the attributes ``world_size``, ``rank`` and ``process_group``."""

    @property
    def world_size(self) -> int:
        """Number of ranks; for a single process, number of devices."""
        return len(self.devices) or self.world.size

    @property
    def rank(self) -> int:
        """Global rank."""
        return self.world.rank

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """Process group with all ranks; None for a single process."""
        return self.world.group

    @classmethod
    def from_local(cls, world_size: int, rank: int) -> "ShardingEnv":  # type: ignore[override]
        """Return the environment of a single process without a process group.

        For inference, the environment has ``world_size`` devices: GPUs if there are enough, else the CPU.

        Raises:
            ValueError: ``rank`` is not 0, or ``world_size`` is below 1.
        """
        if world_size < 1 or rank != 0:
            raise ValueError(
                f"one process is rank 0 of at least one device, got rank {rank} of {world_size}. For "
                "several processes use ShardingEnv.from_process_group."
            )
        if world_size == 1:
            return cls()
        # With too few GPUs, all shards are on the CPU: this builds an inference model on a host without GPUs.
        there = torch.cuda.device_count() >= world_size
        devices = local_devices(world_size, "cuda" if there else "cpu")
        return cls(shard=mesh.Axis(size=world_size), devices=tuple(devices))


def local_devices(number: int, kind: str) -> list[torch.device]:
    """Return ``number`` devices on this host: GPUs, or the CPU repeatedly.

    Raises:
        ValueError: the host has fewer GPUs.
    """
    if kind == "cpu":
        return [torch.device("cpu")] * number
    if torch.cuda.device_count() < number:
        raise ValueError(
            f"{number} devices of type {kind!r} are asked for, and {torch.cuda.device_count()} are here. "
            "Pass compute_device='cpu', or fewer devices."
        )
    return [torch.device(kind, index) for index in range(number)]
