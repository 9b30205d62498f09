"""TorchRec's planner interface over MeshRec's planner. Plans have TorchRec's form."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import nn

from meshrec.compat.bridge.adapted import Adapted
from meshrec.compat.bridge.constraints import ParameterConstraints
from meshrec.compat.bridge.plans import ShardingPlan, from_core
from meshrec.compat.bridge.sharders import TorchRecSharder
from meshrec.compat.bridge.sharding_plan import get_default_sharders
from meshrec.optim.in_backward import in_backward_spec
from meshrec.plan.sharding_plan import EmbeddingComputeKernel, ShardingType
from meshrec.planner import planners, types
from meshrec.planner.module_tables import embedding_modules
from meshrec.planner.optimize import DEFAULT_EFFORT

# TorchRec's default per rank.
_BATCH_SIZE = 512


def _topology(
    world_size: int,
    compute_device: str,
    hbm_cap: int | None = None,
    ddr_cap: int | None = None,
    ssd_cap: int | None = None,
    local_world_size: int | None = None,
    pod_size: int | None = None,
    *,
    intra_host_bw: float | None = None,
    inter_host_bw: float | None = None,
    **more: Any,
) -> types.Topology:
    """Construct TorchRec's ``Topology(world_size, compute_device, ...)``; bandwidths in bytes/ms."""
    more = {"ssd_cap": ssd_cap, "pod_size": pod_size, **more}
    if given := sorted(name for name, value in more.items() if value is not None):
        raise ValueError(
            f"MeshRec's topology has no {given[0]}. What a machine can do is in a hardware profile: "
            "measure one with `meshrec calibrate`, and pass it to meshrec.planner.Topology(hardware=...)."
        )
    return types.Topology(
        world_size=world_size,
        compute_device=compute_device,
        local_world_size=local_world_size or world_size,
        hbm_cap=hbm_cap,
        ddr_cap=ddr_cap,
        # Bytes per millisecond to bytes per second.
        intra_host_bandwidth=None if intra_host_bw is None else intra_host_bw * 1000,
        inter_host_bandwidth=None if inter_host_bw is None else inter_host_bw * 1000,
    )


Topology = Adapted(types.Topology, _topology)


class FixedPercentageStorageReservation:
    """Memory fraction that is reserved for other uses than tables."""

    def __init__(self, percentage: float) -> None:
        self.percentage = percentage
        self.dense_bytes = 0


class HeuristicalStorageReservation(FixedPercentageStorageReservation):
    """Memory reserved for other uses than tables: a fraction, and bytes for the dense model.

    Args:
        percentage: fraction of the memory, in [0, 1].
        parameter_multiplier: ignored.
        dense_tensor_estimate: bytes of the dense model; None: 0.
    """

    def __init__(
        self, percentage: float, parameter_multiplier: float = 6.0, dense_tensor_estimate: int | None = None
    ) -> None:
        super().__init__(percentage)
        self.dense_bytes = dense_tensor_estimate or 0


class EmbeddingShardingPlanner:
    """MeshRec's planner with TorchRec's arguments.

    Args:
        topology, batch_size, constraints: as for TorchRec's planner. Constraints may also be MeshRec's.
        storage_reservation: reservation object (default: 15 % stays free).
        timeout_seconds: search time limit in seconds.
        stats, debug: ignored, so nothing is printed. ``print(plan.planned)`` shows the plan, and a lower
            bound on the step time of any plan.
        enumerator, proposer, partitioner, performance_model, callbacks, plan_loader: must be None.

    Raises:
        ValueError: an argument that must be None is given.
    """

    def __init__(
        self,
        topology: types.Topology | None = None,
        batch_size: int | None = None,
        enumerator: object | None = None,
        storage_reservation: FixedPercentageStorageReservation | None = None,
        proposer: object | None = None,
        partitioner: object | None = None,
        performance_model: object | None = None,
        stats: object | None = None,
        constraints: Mapping[str, Any] | None = None,
        debug: bool = True,
        callbacks: object | None = None,
        timeout_seconds: int | None = None,
        plan_loader: object | None = None,
    ) -> None:
        # Exchangeable parts of TorchRec's planner, which MeshRec's search does not have.
        parts = {
            "enumerator": enumerator,
            "proposer": proposer,
            "partitioner": partitioner,
            "performance_model": performance_model,
            "callbacks": callbacks,
            "plan_loader": plan_loader,
        }
        if given := [name for name, part in parts.items() if part is not None]:
            raise ValueError(
                f"MeshRec's planner has no {given[0]} to exchange: it searches all plans and proves how good "
                "its own is. Leave it out, and say what you want in constraints."
            )
        topology = _default_topology() if topology is None else topology
        if storage_reservation is not None:
            topology = replace(
                topology, reserve=storage_reservation.percentage, dense_bytes=storage_reservation.dense_bytes
            )
        self._topology = topology
        self._batch_size = _BATCH_SIZE if batch_size is None else batch_size
        self._constraints = dict(constraints or {})
        self._time_limit = DEFAULT_EFFORT.time_limit if timeout_seconds is None else float(timeout_seconds)

    def plan(self, module: nn.Module, sharders: Sequence[Any]) -> ShardingPlan:
        """Plan all tables in ``module`` that the sharders handle. Without tables, the plan is empty."""
        tables = list(_tables(module, sharders))
        if not tables:
            return ShardingPlan({})
        plan = self._planner(tables).plan(module, sharders)
        return self._torchrec_plan(plan, tables)

    def collective_plan(
        self, module: nn.Module, sharders: Sequence[Any] | None = None, pg: dist.ProcessGroup | None = None
    ) -> ShardingPlan:
        """Plan on rank 0, and return the same plan on all ranks. Collective.

        Args:
            module: model to plan.
            sharders: sharders (default: all kinds).
            pg: process group (default: all ranks).
        """
        sharders = get_default_sharders() if sharders is None else sharders
        tables = list(_tables(module, sharders))
        if not tables:
            return ShardingPlan({})
        plan = self._planner(tables).collective_plan(module, sharders, pg)
        return self._torchrec_plan(plan, tables)

    def _planner(self, tables: "Sequence[_Table]") -> planners.EmbeddingShardingPlanner:
        """Return MeshRec's planner with the constraints for these tables."""
        names = [table.name for table in tables]
        if unknown := [name for name in self._constraints if name not in names]:
            raise ValueError(
                f"constraints name {unknown[0]!r}, which is not a table of the model; it has {names}."
            )
        return planners.EmbeddingShardingPlanner(
            topology=self._topology,
            # As in TorchRec, a constraint holds for all tables with its name, in every module.
            constraints={table.full_name: self._core_constraints(table) for table in tables},
            batch_size=self._batch_size,
            time_limit=self._time_limit,
        )

    def _core_constraints(self, table: "_Table") -> types.ParameterConstraints:
        """Return a table's constraints in MeshRec's form, without sharding types the sharder excludes."""
        given = self._constraints.get(table.name)
        if isinstance(given, ParameterConstraints):
            given = given.to_core(
                table.name,
                device=self._topology.compute_device,
                features=table.features,
                is_weighted=table.is_weighted,
            )
        present = types.ParameterConstraints() if given is None else given
        allowed = present.allowed_types
        answer = type(table.sharder).sharding_types
        if isinstance(table.sharder, TorchRecSharder) and answer is not TorchRecSharder.sharding_types:
            answers = table.sharder.sharding_types(self._topology.compute_device)
            # Only overridden methods restrict the plan: the inherited answer allows all types.
            allowed &= {ShardingType(kind) for kind in answers}
        both = [kind for kind in ShardingType if kind in allowed and self._kernel(table, kind) is not None]
        if not both:
            kinds = [kind.value for kind in ShardingType if kind in present.allowed_types]
            kernels = getattr(self._constraints.get(table.name), "compute_kernels", None) or "all"
            raise ValueError(
                f"table {table.name!r}: its constraints (sharding types {kinds}, compute kernels {kernels}) "
                f"and what {type(table.sharder).__name__} offers have nothing in common. Allow another type "
                "or kernel."
            )
        # As in TorchRec, row-wise tables span all ranks, even if fewer would be faster.
        return replace(present, sharding_types=both, all_ranks=present.ranks is None)

    def _kernel(self, table: "_Table", kind: ShardingType) -> str | None:
        """Return the compute kernel for a table with a sharding type.

        The kernel follows from the kernels that the sharder offers and the constraints allow. None if there
        is none: the table must not get this sharding type.
        """
        offered = _kernels_of(table.sharder, kind, self._topology.compute_device)
        given = self._constraints.get(table.name)
        requested = given.kernels if isinstance(given, ParameterConstraints) else None
        kernels = [kernel for kernel in offered if requested is None or kernel in requested]
        if EmbeddingComputeKernel.FUSED.value in kernels:
            return EmbeddingComputeKernel.FUSED.value
        if not kernels and requested is not None and EmbeddingComputeKernel.DENSE.value in requested:
            kernels = [EmbeddingComputeKernel.DENSE.value]  # every table can have ordinary gradients
        if kernels and table.has_optimizer:
            return EmbeddingComputeKernel.FUSED.value  # also of a data-parallel table
        return kernels[0] if kernels else None

    def _torchrec_plan(self, planned: Any, tables: "Sequence[_Table]") -> ShardingPlan:
        """Convert MeshRec's plan to TorchRec's form, and set the compute kernel of every table."""
        plan = from_core(planned, world_size=self._topology.world_size, local_size=self._topology.local_size)
        for table in tables:
            placed = plan.plan[table.path][table.name]
            kernel = self._kernel(table, ShardingType(placed.sharding_type))
            assert kernel is not None
            # The search does not choose kernels. The sharder and the constraints determine them by sharding
            # type.
            placed.compute_kernel = kernel
        plan.planned = planned  # type: ignore[attr-defined]
        return plan


class _Table(NamedTuple):
    """Table of the model to plan, with its path, its features and the sharder of its module."""

    path: str
    name: str
    features: Sequence[str]
    is_weighted: bool
    has_optimizer: bool
    """Whether the table has an in-backward optimizer."""
    sharder: Any

    @property
    def full_name(self) -> str:
        """``path.name``, which is unique in the model."""
        return f"{self.path}.{self.name}" if self.path else self.name


def _tables(model: nn.Module, sharders: Sequence[Any]) -> Iterator[_Table]:
    """Yield all tables in a model that the sharders support."""
    for path, module, sharder in embedding_modules(model, sharders):
        # Parameter names end in ``TABLE.weight``.
        weights = {name.split(".")[-2]: weight for name, weight in module.named_parameters() if "." in name}
        configs = getattr(module, "embedding_bag_configs", None) or module.embedding_configs
        weighted = bool(getattr(module, "is_weighted", lambda: False)())
        for config in configs():
            weight = weights.get(config.name)
            has_optimizer = weight is not None and in_backward_spec(weight) is not None
            yield _Table(path, config.name, config.feature_names, weighted, has_optimizer, sharder)


def _kernels_of(sharder: Any, kind: ShardingType, device: str) -> list[str]:
    """Return the sharder's compute kernels for a sharding type, without kernels which MeshRec lacks."""
    if not hasattr(sharder, "compute_kernels"):
        is_dense = kind is ShardingType.DATA_PARALLEL or getattr(sharder, "optimizer", None) is None
        return [(EmbeddingComputeKernel.DENSE if is_dense else EmbeddingComputeKernel.FUSED).value]
    supported = [kernel.value for kernel in EmbeddingComputeKernel]
    return [kernel for kernel in sharder.compute_kernels(kind.value, device) if kernel in supported]


def bytes_to_gb(num_bytes: int) -> float:
    """Convert bytes to units of 1024**3 bytes."""
    return num_bytes / 1024**3


def sharder_name(t: type[Any]) -> str:
    """Return the qualified name of a module type."""
    return f"{t.__module__}.{t.__name__}"


def _default_topology() -> types.Topology:
    """Return a topology of CPUs with the ranks of the default process group, or a single rank without a
    group.
    """
    world_size = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    return types.Topology(world_size=world_size, compute_device="cpu")
