"""The ranks that share a model, with TorchRec's names for their numbers."""

import torch.distributed as dist

from meshrec.plan import mesh


class ShardingEnv(mesh.ShardingEnv):
    """MeshRec's ``ShardingEnv``, which also tells ``world_size``, ``rank`` and ``process_group``."""

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return self.world.size

    @property
    def rank(self) -> int:
        """This rank."""
        return self.world.rank

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The group of all ranks."""
        return self.world.group

    @classmethod
    def from_local(cls, world_size: int, rank: int) -> "ShardingEnv":
        """One process without a group.

        Raises:
            ValueError: for more than one rank: MeshRec's ranks are processes.
        """
        if world_size != 1 or rank != 0:
            raise ValueError(
                f"world_size {world_size} needs as many processes in a group. Use "
                "ShardingEnv.from_process_group."
            )
        return cls()
