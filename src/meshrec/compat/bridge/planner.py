"""The planner with TorchRec's arguments; its plans have TorchRec's form and MeshRec's proof."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import nn

from meshrec.compat.bridge.adapted import Adapted
from meshrec.compat.bridge.plans import ShardingPlan, from_own
from meshrec.compat.bridge.sharders import SharderAnswers
from meshrec.compat.bridge.sharding_plan import get_default_sharders
from meshrec.plan.builders import tables_of
from meshrec.plan.sharding_plan import EmbeddingComputeKernel, ShardingType
from meshrec.planner import planners, types
from meshrec.planner.module_tables import embedding_modules
from meshrec.planner.optimize import DEFAULT_EFFORT

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
    """TorchRec's ``Topology(world_size, compute_device, hbm_cap=None, ...)``; bandwidths in bytes/ms.

    Raises:
        ValueError: for figures that MeshRec's hardware profiles hold otherwise.
    """
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
        intra_host_bandwidth=None if intra_host_bw is None else intra_host_bw * 1000,
        inter_host_bandwidth=None if inter_host_bw is None else inter_host_bw * 1000,
    )


def _constraints(
    sharding_types: Sequence[str] | None = None,
    compute_kernels: Sequence[str] | None = None,
    min_partition: int | None = None,
    pooling_factors: Sequence[float] = (1.0,),
    num_poolings: Sequence[float] | None = None,
    batch_sizes: Sequence[int] | None = None,
    is_weighted: bool = False,
    feature_names: Sequence[str] | None = None,
    use_virtual_table: bool = False,
    **more: Any,
) -> types.ParameterConstraints:
    """TorchRec's ``ParameterConstraints``. ``is_weighted`` and ``feature_names`` the module itself tells.

    Raises:
        ValueError: for kernels and options that MeshRec has not.
    """
    allowed = [kernel.value for kernel in EmbeddingComputeKernel]
    values = [getattr(kernel, "value", kernel) for kernel in compute_kernels or allowed]
    if not set(values) & set(allowed):
        raise ValueError(
            f"MeshRec has the compute kernels {allowed}, got {values}. Leave compute_kernels out."
        )
    if given := sorted(name for name, value in more.items() if value is not None):
        raise ValueError(f"MeshRec's planner has no constraint {given[0]}. Leave it out.")
    if use_virtual_table:
        raise ValueError("MeshRec has no virtual tables. Leave use_virtual_table out.")
    return types.ParameterConstraints(
        sharding_types=sharding_types,
        min_partition=min_partition,
        pooling_factors=None if list(pooling_factors) == [1.0] else list(pooling_factors),
        num_poolings=num_poolings,
        batch_sizes=batch_sizes,
    )


Topology = Adapted(types.Topology, _topology)
ParameterConstraints = Adapted(types.ParameterConstraints, _constraints)


class FixedPercentageStorageReservation:
    """A fraction of the memory that tables may not take."""

    def __init__(self, percentage: float) -> None:
        self.percentage = percentage
        self.dense_bytes = 0


class HeuristicalStorageReservation(FixedPercentageStorageReservation):
    """The same, and the dense model's memory if ``dense_tensor_estimate`` tells it in bytes."""

    def __init__(
        self,
        percentage: float,
        parameter_multiplier: float = 6.0,
        dense_tensor_estimate: int | None = None,
    ) -> None:
        super().__init__(percentage)
        self.dense_bytes = dense_tensor_estimate or 0


class EmbeddingShardingPlanner:
    """MeshRec's planner with TorchRec's arguments.

    Args:
        topology, batch_size, constraints: as TorchRec's.
        storage_reservation: one of the two above; default: 15% of the memory are kept free.
        timeout_seconds: for how long it searches at most.
        stats, debug: nothing is printed; ``print(plan.planned)`` shows the plan and how good it is.
        enumerator, proposer, partitioner, performance_model, callbacks, plan_loader: must be None.

    Raises:
        ValueError: for one of the last.
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
        constraints: Mapping[str, types.ParameterConstraints] | None = None,
        debug: bool = True,
        callbacks: object | None = None,
        timeout_seconds: int | None = None,
        plan_loader: object | None = None,
    ) -> None:
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
        topology = _present_topology() if topology is None else topology
        if storage_reservation is not None:
            topology = replace(
                topology,
                reserve=storage_reservation.percentage,
                dense_bytes=storage_reservation.dense_bytes,
            )
        self._topology = topology
        self._batch_size = _BATCH_SIZE if batch_size is None else batch_size
        self._constraints = dict(constraints or {})
        self._time_limit = DEFAULT_EFFORT.time_limit if timeout_seconds is None else float(timeout_seconds)

    def plan(self, module: nn.Module, sharders: Sequence[Any]) -> ShardingPlan:
        """The plan of all tables of ``module`` that the sharders shard."""
        return self._in_their_form(self._planner(module, sharders).plan(module, sharders))

    def collective_plan(
        self,
        module: nn.Module,
        sharders: Sequence[Any] | None = None,
        pg: dist.ProcessGroup | None = None,
    ) -> ShardingPlan:
        """``plan`` on rank 0, the same on all ranks of ``pg``."""
        sharders = get_default_sharders() if sharders is None else sharders
        found = self._planner(module, sharders).collective_plan(module, sharders, pg)
        return self._in_their_form(found)

    def _planner(self, module: nn.Module, sharders: Sequence[Any]) -> planners.EmbeddingShardingPlanner:
        return planners.EmbeddingShardingPlanner(
            topology=self._topology,
            constraints=self._with_answers(module, sharders),
            batch_size=self._batch_size,
            time_limit=self._time_limit,
        )

    def _with_answers(
        self, module: nn.Module, sharders: Sequence[Any]
    ) -> dict[str, types.ParameterConstraints]:
        """The constraints, and what sharders that the user wrote allow."""
        constraints = dict(self._constraints)
        for _, found, sharder in embedding_modules(module, sharders):
            answer = type(sharder).sharding_types
            if not isinstance(sharder, SharderAnswers) or answer is SharderAnswers.sharding_types:
                continue
            allowed = {ShardingType(kind) for kind in sharder.sharding_types(self._topology.compute_device)}
            for table in tables_of(found):
                present = constraints.get(table, types.ParameterConstraints())
                both = [kind for kind in ShardingType if kind in allowed & present.allowed_types]
                constraints[table] = replace(present, sharding_types=both)
        return constraints

    def _in_their_form(self, found: Any) -> ShardingPlan:
        plan = from_own(found, world_size=self._topology.world_size, local_size=self._topology.local_size)
        for tables in plan.plan.values():
            for placed in tables.values():
                # MeshRec's says whether an optimizer is attached, TorchRec's that one could be.
                if placed.sharding_spec is not None:
                    placed.compute_kernel = EmbeddingComputeKernel.FUSED.value
        plan.planned = found  # type: ignore[attr-defined]
        return plan


def bytes_to_gb(num_bytes: int) -> float:
    """Bytes in units of 1024^3."""
    return num_bytes / 1024**3


def sharder_name(t: type[Any]) -> str:
    """A name for the type that a sharder is for."""
    return f"{t.__module__}.{t.__name__}"


def _present_topology() -> types.Topology:
    world_size = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    return types.Topology(world_size=world_size, compute_device="cpu")
