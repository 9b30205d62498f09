"""The ranks that share a model, as axes of a DeviceMesh: ``shard``, ``replicate``, ``node`` and ``local``.

Tables are split over ``shard``; ``replicate`` holds copies of the whole split model. ``node`` x ``local`` in
place of ``shard`` says which ranks share a node, so that partial rows are summed there before they cross the
network.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

_AXES = (
    ("shard",),
    ("replicate",),
    ("replicate", "shard"),
    ("node", "local"),
    ("replicate", "node", "local"),
)


@dataclass(frozen=True, kw_only=True)
class Axis:
    """One axis of ranks: how many, which one this is, and the process group (None when there is only one
    rank).
    """

    size: int = 1
    rank: int = 0
    group: dist.ProcessGroup | None = None


@dataclass(frozen=True, kw_only=True)
class ShardingEnv:
    """The axes that sharded modules work on.

    ``world``: all ranks. ``shard``: the ranks that one copy of the tables is split over (plans speak of
    these). ``replicate``: the ranks that hold the same rectangles. ``node``, ``local``: the factors of
    ``shard``, where the mesh has them; shard rank = node * local.size + local rank. ``devices``: where one
    process plays all ranks of ``shard``, the device of each.
    """

    world: Axis = Axis()
    shard: Axis = Axis()
    replicate: Axis = Axis()
    node: Axis | None = None
    local: Axis | None = None
    mesh: DeviceMesh | None = None
    devices: tuple[torch.device, ...] = ()

    @classmethod
    def from_local(cls, devices: Sequence[torch.device | str]) -> "ShardingEnv":
        """Make the environment of one process whose tables are split over several devices, for inference.

        Device r takes the place of rank r in plans. The first device takes the input and has the result. A
        device may occur twice.
        """
        if not devices:
            raise ValueError("devices is empty. Name at least one, such as 'cpu' or 'cuda:0'.")
        return cls(shard=Axis(size=len(devices)), devices=tuple(map(torch.device, devices)))

    @classmethod
    def single_process(cls) -> "ShardingEnv":
        """Make the environment of world size 1, which needs no process group."""
        return cls()

    @classmethod
    def from_process_group(cls, pg: dist.ProcessGroup, *, device_type: str | None = None) -> "ShardingEnv":
        """Make the environment whose tables are split over all ranks of ``pg``."""
        kind = device_type or ("cuda" if "nccl" in dist.get_backend(pg) else "cpu")
        mesh = DeviceMesh.from_group(pg, kind, mesh_dim_names=("shard",))
        axis = Axis(size=pg.size(), rank=pg.rank(), group=pg)
        return cls(world=axis, shard=axis, mesh=mesh)

    @classmethod
    def from_mesh(cls, mesh: DeviceMesh) -> "ShardingEnv":
        """Make the environment of a mesh, whose axes are found by name.

        The axes are one of: shard; replicate; replicate, shard; node, local; replicate, node, local. With
        ``replicate`` alone every rank holds all tables whole.

        Raises:
            ValueError: the mesh has other axes.
        """
        names = mesh.mesh_dim_names
        if names not in _AXES:
            raise ValueError(_wrong_axes(mesh))
        replicate, node, local = (_axis(mesh, name) if name in names else None for name in _AXES[-1])
        if names == ("replicate",):
            assert replicate is not None
            return cls(world=replicate, replicate=replicate, mesh=mesh)
        shard = _axis(mesh, "shard") if node is None else _flat_axis(mesh, ("node", "local"), "shard")
        world = shard if replicate is None else _flat_axis(mesh, names, "world")
        return cls(world=world, shard=shard, replicate=replicate or Axis(), node=node, local=local, mesh=mesh)

    @property
    def local_size(self) -> int:
        """Ranks per node of the ``shard`` axis; all of them if the mesh has no node axis."""
        return self.local.size if self.local is not None else self.shard.size

    @property
    def shard_mesh(self) -> DeviceMesh | None:
        """The mesh of the ``shard`` axis alone; None with one process."""
        if self.mesh is None or self.mesh.mesh_dim_names == ("shard",):
            return self.mesh
        if self.shard.group is None:
            return None
        return _flat_mesh(self.mesh, ("node", "local"), "shard") if self.node else self.mesh["shard"]

    @property
    def dense_mesh(self) -> DeviceMesh | None:
        """The mesh that FSDP2 takes: (replicate, shard) for HSDP, else all ranks on one axis.

        Raises:
            ValueError: the only axis of the mesh is ``replicate``.
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
            mesh=self.mesh.mesh.flatten(1),
            mesh_dim_names=("replicate", "shard"),
        )


def _wrong_axes(mesh: DeviceMesh) -> str:
    names, shape = mesh.mesh_dim_names, tuple(mesh.mesh.shape)
    what = "whose axes have no names" if names is None else f"with axes {names}"
    if names is not None and "stage" in names:
        return (
            f"a mesh {what} is for stages: pass it to meshrec.pipeline.stages.StagedOverRanks, which shards "
            "the tables of each stage over the axes beside 'stage'."
        )
    fitting = [axes for axes in _AXES if len(axes) == len(shape)]
    better = " or ".join(f"mesh_dim_names={axes}" for axes in fitting or _AXES)
    return (
        f"a mesh {what} and shape {shape} cannot carry sharded tables. Make it with "
        f"init_device_mesh({mesh.device_type!r}, {shape if fitting else '(...)'}, ...) and {better}."
    )


def default_env() -> ShardingEnv:
    """Return the environment of the default process group, or of a single process if there is none."""
    if dist.is_available() and dist.is_initialized():
        assert dist.group.WORLD is not None
        return ShardingEnv.from_process_group(dist.group.WORLD)
    return ShardingEnv.single_process()


def group_device(group: dist.ProcessGroup | None) -> torch.device:
    """Return the device whose tensors the collectives of ``group`` take."""
    if group is not None and "nccl" in dist.get_backend(group):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _axis(mesh: DeviceMesh, name: str) -> Axis:
    group = mesh.get_group(name)
    return Axis(size=group.size(), rank=group.rank(), group=group)


def _flat_mesh(mesh: DeviceMesh, names: tuple[str, ...], flat_name: str) -> DeviceMesh:
    return mesh[names]._flatten(flat_name) if mesh.mesh_dim_names != names else mesh._flatten(flat_name)


def _flat_axis(mesh: DeviceMesh, names: tuple[str, ...], flat_name: str) -> Axis:
    return _axis(_flat_mesh(mesh, names, flat_name), flat_name)
