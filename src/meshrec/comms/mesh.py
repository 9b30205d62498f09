"""``ShardingEnv``: the ranks which share a model, as the axes of a DeviceMesh.

Tables are sharded over the axis ``shard``. Ranks on the axis ``replicate`` have copies of the whole sharded
model. The axes ``node`` and ``local`` together replace ``shard``, and declare which ranks are on the same
node. Partial sums are then reduced within a node before they cross the network.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

# Allowed mesh axis names; the last entry has all but ``shard``.
_AXES = (
    ("shard",),
    ("replicate",),
    ("replicate", "shard"),
    ("node", "local"),
    ("replicate", "node", "local"),
)


@dataclass(frozen=True, kw_only=True)
class Axis:
    """A mesh axis, as seen by this process.

    Attributes:
        size: number of ranks on the axis.
        rank: position of this process on the axis.
        group: process group with these ranks; None for a single rank.
    """

    size: int = 1
    rank: int = 0
    group: dist.ProcessGroup | None = None


@dataclass(frozen=True, kw_only=True)
class ShardingEnv:
    """The ranks which share a model, seen from this process, by mesh axis.

    Attributes:
        world: all ranks.
        shard: ranks which together have one copy of the tables. Rank numbers in plans refer to this axis.
        replicate: ranks which have copies of the same shards.
        node: ranks with the same local position on all nodes; None if the mesh has no such axis.
        local: ranks on this node; None if the mesh has no such axis. The position on ``shard`` is ``node.rank
            * local.size + local.rank``.
        mesh: the DeviceMesh; None for a single process.
        devices: a device per rank on ``shard`` if a single process acts for all these ranks, else empty.

    Example::

        env = ShardingEnv.single_process()
        assert env.world.size == env.shard.size == 1
    """

    # Defaults: a single process.
    world: Axis = Axis()
    shard: Axis = Axis()
    replicate: Axis = Axis()
    node: Axis | None = None
    local: Axis | None = None
    mesh: DeviceMesh | None = None
    devices: tuple[torch.device, ...] = ()

    @classmethod
    def from_local(cls, devices: Sequence[torch.device | str]) -> "ShardingEnv":
        """Create the environment for inference in a single process, with tables sharded over several devices.

        Args:
            devices: device r has the shards of rank r in the plan. Inputs and results are on the first
                device. Devices may repeat.
        """
        if not devices:
            raise ValueError("devices is empty. Name at least one, such as 'cpu' or 'cuda:0'.")
        return cls(shard=Axis(size=len(devices)), devices=tuple(map(torch.device, devices)))

    @classmethod
    def single_process(cls) -> "ShardingEnv":
        """Create the environment for a single process without a process group."""
        return cls()

    @classmethod
    def from_process_group(cls, pg: dist.ProcessGroup, *, device_type: str | None = None) -> "ShardingEnv":
        """Create the environment in which tables are sharded over all ranks of a process group.

        Args:
            pg: process group.
            device_type: "cpu" or "cuda"; by default "cuda" if the group's backend is NCCL.
        """
        kind = device_type or ("cuda" if "nccl" in dist.get_backend(pg) else "cpu")
        mesh = DeviceMesh.from_group(pg, kind, mesh_dim_names=("shard",))
        axis = Axis(size=pg.size(), rank=pg.rank(), group=pg)
        return cls(world=axis, shard=axis, mesh=mesh)

    @classmethod
    def from_mesh(cls, mesh: DeviceMesh) -> "ShardingEnv":
        """Create the environment for a mesh with named axes.

        Allowed axes: shard; replicate; replicate, shard; node, local; replicate, node, local. With
        ``replicate`` alone, every rank has all tables.

        Raises:
            ValueError: the mesh has other axes.
        """
        names = mesh.mesh_dim_names
        if names not in _AXES:
            raise ValueError(_wrong_axes(mesh))
        replicate, node, local = (_axis(mesh, name) if name in names else None for name in _AXES[-1])
        # Without a shard axis, every rank has all tables.
        if names == ("replicate",):
            assert replicate is not None
            return cls(world=replicate, replicate=replicate, mesh=mesh)
        # Plans number ranks along a single axis, so flatten node x local.
        shard = _axis(mesh, "shard") if node is None else _flat_axis(mesh, ("node", "local"), "shard")
        world = shard if replicate is None else _flat_axis(mesh, names, "world")
        return cls(world=world, shard=shard, replicate=replicate or Axis(), node=node, local=local, mesh=mesh)

    @property
    def local_size(self) -> int:
        """Number of ranks per node on the ``shard`` axis. Without a node axis, all ranks on ``shard``."""
        return self.local.size if self.local is not None else self.shard.size

    @property
    def shard_mesh(self) -> DeviceMesh | None:
        """Mesh with only the ``shard`` axis; None for a single process."""
        if self.mesh is None or self.mesh.mesh_dim_names == ("shard",):
            return self.mesh
        if self.shard.group is None:
            return None
        return _flat_mesh(self.mesh, ("node", "local"), "shard") if self.node else self.mesh["shard"]

    @property
    def dense_mesh(self) -> DeviceMesh | None:
        """Mesh over which FSDP2 shards dense parameters.

        It has the axes (replicate, shard) for hybrid sharding (HSDP), or else a single axis.

        Raises:
            ValueError: the mesh has only a ``replicate`` axis.
        """
        if self.mesh is not None and self.mesh.mesh_dim_names == ("replicate",):
            raise ValueError(
                "dense='fsdp2' splits parameters over an axis 'shard', and the mesh has only 'replicate', "
                "which copies them. Name the axis 'shard', or use dense='ddp'."
            )
        if self.mesh is None or self.node is None:
            return self.mesh
        if self.replicate.group is None:
            return self.shard_mesh
        assert self.shard.group is not None
        return DeviceMesh.from_group(
            [self.replicate.group, self.shard.group],
            self.mesh.device_type,
            # The axes node and local together are the shard axis.
            mesh=self.mesh.mesh.flatten(1),
            mesh_dim_names=("replicate", "shard"),
        )


def _wrong_axes(mesh: DeviceMesh) -> str:
    """Return the error message for a mesh whose axes cannot be used for sharded tables."""
    names, shape = mesh.mesh_dim_names, tuple(mesh.mesh.shape)
    description = "whose axes have no names" if names is None else f"with axes {names}"
    if names is not None and "stage" in names:
        return (
            f"a mesh {description} is for stages: pass it to meshrec.stages.StagedOverRanks, which "
            "shards the tables of every stage over the axes next to 'stage'."
        )
    # Suggest names for the number of axes in the mesh.
    fitting = [axes for axes in _AXES if len(axes) == len(shape)]
    better = " or ".join(f"mesh_dim_names={axes}" for axes in fitting or _AXES)
    return (
        f"a mesh {description} and shape {shape} cannot carry sharded tables. Make it with "
        f"init_device_mesh({mesh.device_type!r}, {shape if fitting else '(...)'}, ...) and {better}."
    )


def default_env() -> ShardingEnv:
    """Return the environment for the default process group, or for a single process without one."""
    if dist.is_available() and dist.is_initialized():
        assert dist.group.WORLD is not None
        return ShardingEnv.from_process_group(dist.group.WORLD)
    return ShardingEnv.single_process()


def group_device(group: dist.ProcessGroup | None) -> torch.device:
    """Return the device on which tensors for collectives in ``group`` must be."""
    if group is not None and "nccl" in dist.get_backend(group):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _axis(mesh: DeviceMesh, name: str) -> Axis:
    group = mesh.get_group(name)
    return Axis(size=group.size(), rank=group.rank(), group=group)


def _flat_mesh(mesh: DeviceMesh, names: tuple[str, ...], flat_name: str) -> DeviceMesh:
    """Return a mesh with a single axis ``flat_name``, into which the axes ``names`` are flattened."""
    return mesh[names]._flatten(flat_name) if mesh.mesh_dim_names != names else mesh._flatten(flat_name)


def _flat_axis(mesh: DeviceMesh, names: tuple[str, ...], flat_name: str) -> Axis:
    """Return the axes ``names``, flattened into a single axis, as an `Axis`. See `_flat_mesh`."""
    return _axis(_flat_mesh(mesh, names, flat_name), flat_name)
