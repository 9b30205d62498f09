"""TorchRec 1.9's interface for plan requests, on top of `EmbeddingShardingPlanner`.

A request asks for plans for several kinds of machines, each given by a name (SKU). MeshRec has no catalog of
machines: the topology comes from the request, and the SKU is only the key of the result.
"""

import hashlib
import logging
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum, unique
from typing import Any, Protocol, runtime_checkable

import torch.distributed as dist
from torch import nn
from typing_extensions import override

from meshrec.compat.bridge.planner import (
    EmbeddingShardingPlanner,
    FixedPercentageStorageReservation,
    HeuristicalStorageReservation,
    Topology,
)
from meshrec.compat.bridge.plans import ShardingPlan
from meshrec.planner import types

# Requests give capacities in GB, as powers of two.
_BYTES_PER_GB = 1024**3
_RESERVED = 0.15  # TorchRec's default
_logger = logging.getLogger("meshrec")


@unique
class PlannerVariant(str, Enum):
    """Planners that a request can name. MeshRec has a single planner, for UNSET and OSS."""

    UNSET = ""
    OSS = "oss"
    LINEAR_PROGRAMMING = "linear_programming"
    MANIFOLD = "manifold"


@unique
class StorageReservationPolicy(str, Enum):
    """Policies to reserve memory for other uses than tables. UNSET means HEURISTICAL."""

    UNSET = ""
    HEURISTICAL = "heuristical"
    FIXED_PERCENTAGE = "fixed_percentage"
    INFERENCE = "inference"
    SKU_AWARE = "sku_aware"


@dataclass(frozen=True)
class PlannerConfig:
    """Planner options of a request. ``debug`` has no effect.

    Raises:
        ValueError: a part of TorchRec's search is chosen, or another planner or memory policy than MeshRec's.
    """

    planner_variant: PlannerVariant = PlannerVariant.UNSET
    storage_reservation_policy: StorageReservationPolicy = StorageReservationPolicy.UNSET
    storage_reservation_percentage: float | None = None
    proposer_type: str | None = None
    partitioner_type: str | None = None
    debug: bool = False
    timeout_seconds: int | None = None
    dense_tensor_estimate: int | None = None
    performance_model: str | None = None
    proposer_config: object | None = None
    parameter_multiplier: float | None = None

    def __post_init__(self) -> None:
        for name in (
            "proposer_type",
            "partitioner_type",
            "performance_model",
            "proposer_config",
            "parameter_multiplier",
        ):
            if (value := getattr(self, name)) is not None:
                raise ValueError(
                    f"{name} must be None, got {value!r}: MeshRec's planner searches all plans by itself. "
                    "Leave it out, and say what you want in constraints."
                )
        if self.planner_variant not in (PlannerVariant.UNSET, PlannerVariant.OSS):
            raise ValueError(
                f"planner_variant must be {PlannerVariant.OSS}, got {self.planner_variant!r}: there is one "
                "planner. Leave it out."
            )
        if self.storage_reservation_policy in ("inference", "sku_aware"):
            raise ValueError(
                "storage_reservation_policy must be heuristical or fixed_percentage, got "
                f"{self.storage_reservation_policy!r}. Choose one of these."
            )


@dataclass(frozen=True)
class ShardingPlanRequest:
    """Model and machine to plan for.

    Attributes:
        model: model, or a function that makes it.
        sharders: sharders.
        world_size, local_world_size: ranks, and ranks per node.
        batch_size: samples per rank.
        pod_size: must be None.
        storage_reservation: reservation object, instead of the policy in ``planner_config``.
        constraints: constraints by table name.
        training_framework, launcher_hardware, capture_search_space: stored, but not used.
        hbm_gb, ddr_gb: memory per rank and per node, in units of 1024**3 bytes.
        compute_device: ``"cuda"`` (default) or ``"cpu"``.
        planner_config: planner options.
        request_id: ID of this request.
    """

    model: nn.Module | Callable[[], nn.Module]
    sharders: list[Any]
    world_size: int
    local_world_size: int
    batch_size: int
    pod_size: int | None = None
    storage_reservation: FixedPercentageStorageReservation | None = None
    constraints: dict[str, Any] | None = None
    training_framework: str = ""
    hbm_gb: float | None = None
    ddr_gb: float | None = None
    launcher_hardware: str | None = None
    compute_device: str | None = None
    planner_config: PlannerConfig = field(default_factory=PlannerConfig)
    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    capture_search_space: bool = False

    @property
    def request_hash(self) -> str:
        """Hash of everything but the model, the sharders, the reservation object and the ID."""
        # Objects without a stable repr, and fields that do not change the plan.
        excluded = ("model", "sharders", "storage_reservation", "request_id", "capture_search_space")
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in excluded}
        # The order of the constraints does not matter.
        values["constraints"] = sorted((self.constraints or {}).items(), key=lambda item: item[0])
        return hashlib.sha256(repr(values).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class ShardingPlanResult:
    """Plan for a kind of machine, or the reason for having none.

    Attributes:
        sku: kind of machine.
        success: whether there is a plan.
        sharding_plan: the plan, or None. ``print(sharding_plan.planned)`` shows tables, ranks and the bound.
        planner_failure_reason: error message without a plan.
        estimated_max_hbm_bytes, estimated_max_ddr_bytes: bytes on the fullest rank; 0 for memory that the
            device does not use.
        critical_path_ms: predicted step time without the dense part.
        max_rank_perf, mean_rank_perf, perf_imbalance_ratio: predicted milliseconds per rank: maximum, mean,
            and maximum divided by mean.
        request_hash, request_id: from the request.
        solve_time_ms: duration of the search.
        is_planning_rank: whether this rank has searched. All ranks have the estimates.
    """

    sku: str
    success: bool
    sharding_plan: ShardingPlan | None
    planner_failure_reason: str | None
    estimated_max_hbm_bytes: int
    estimated_max_ddr_bytes: int
    critical_path_ms: float | None = None
    max_rank_perf: float | None = None
    mean_rank_perf: float | None = None
    perf_imbalance_ratio: float | None = None
    request_hash: str = ""
    request_id: str = ""
    solve_time_ms: float | None = None
    is_planning_rank: bool = True


@dataclass
class PlannerSessionContext:
    """State of one request while plans are made for it.

    Attributes:
        request: the request.
        results: result per SKU, added by `ShardingPlannerAPI.plan`.
        session_id: ID of this session.
        topology_cache: topology by SKU, world size, and ranks per node.
        timing: milliseconds by phase.
        storage_reservations_used: reservation by SKU.
        client_metadata, external_trace_id, report_metadata: not used here; for the program.
        stats: objects from the reporter that receive statistics. MeshRec's planner does not call them.
        warnings: not used here; for the program.
    """

    request: ShardingPlanRequest
    results: dict[str, ShardingPlanResult]
    session_id: str = field(default_factory=lambda: str(uuid.uuid4()))
    topology_cache: dict[tuple[str, int, int], types.Topology] = field(default_factory=dict)
    timing: dict[str, float] = field(default_factory=dict)
    storage_reservations_used: dict[str, FixedPercentageStorageReservation] = field(default_factory=dict)
    client_metadata: dict[str, str] = field(default_factory=dict)
    external_trace_id: str | None = None
    report_metadata: object | None = None
    stats: Sequence[Any] | None = None
    warnings: list[str] = field(default_factory=list)


@runtime_checkable
class PlannerProvider(Protocol):
    """Builder of the topology, the memory reservation and the planner for a kind of machine."""

    def build_topology(
        self, sku: str, request: ShardingPlanRequest, ctx: PlannerSessionContext
    ) -> types.Topology:
        """Build the topology to plan for.

        Args:
            sku: kind of machine.
            request: model and machine.
            ctx: session of this request.
        """
        ...

    def build_storage_reservation(
        self, sku: str, request: ShardingPlanRequest
    ) -> FixedPercentageStorageReservation:
        """Build the object that reserves memory for other uses than tables."""
        ...

    def build_planner(
        self,
        sku: str,
        *,
        topology: types.Topology,
        storage_reservation: FixedPercentageStorageReservation,
        ctx: PlannerSessionContext,
    ) -> EmbeddingShardingPlanner:
        """Build the planner.

        Args:
            sku: kind of machine.
            topology: result of `build_topology`.
            storage_reservation: result of `build_storage_reservation`.
            ctx: session of the request.
        """
        ...


class DefaultPlannerProvider(PlannerProvider):
    """Provider that builds everything from the request alone. The SKU has no effect."""

    @override
    def build_topology(
        self, sku: str, request: ShardingPlanRequest, ctx: PlannerSessionContext
    ) -> types.Topology:
        """Return the topology with the request's ranks and memory."""
        topology: types.Topology = Topology(
            world_size=request.world_size,
            compute_device=request.compute_device or "cuda",
            hbm_cap=None if request.hbm_gb is None else int(request.hbm_gb * _BYTES_PER_GB),
            ddr_cap=None if request.ddr_gb is None else int(request.ddr_gb * _BYTES_PER_GB),
            local_world_size=request.local_world_size,
            pod_size=request.pod_size,
        )
        return topology

    def build_storage_reservation(
        self, sku: str, request: ShardingPlanRequest
    ) -> FixedPercentageStorageReservation:
        """Return the request's reservation object, or else build the kind that its policy names."""
        if request.storage_reservation is not None:
            return request.storage_reservation
        config = request.planner_config
        given = config.storage_reservation_percentage
        percentage = _RESERVED if given is None else given
        if config.storage_reservation_policy == StorageReservationPolicy.FIXED_PERCENTAGE:
            return FixedPercentageStorageReservation(percentage)
        return HeuristicalStorageReservation(percentage, dense_tensor_estimate=config.dense_tensor_estimate)

    @override
    def build_planner(
        self,
        sku: str,
        *,
        topology: types.Topology,
        storage_reservation: FixedPercentageStorageReservation,
        ctx: PlannerSessionContext,
    ) -> EmbeddingShardingPlanner:
        """Return MeshRec's planner with the request's options."""
        request = ctx.request
        return EmbeddingShardingPlanner(
            topology=topology,
            batch_size=request.batch_size,
            storage_reservation=storage_reservation,
            constraints=request.constraints,
            stats=ctx.stats,
            timeout_seconds=request.planner_config.timeout_seconds,
        )


@runtime_checkable
class PlannerExecutor(Protocol):
    """Planner for a kind of machine."""

    def run(
        self, sku: str, ctx: PlannerSessionContext, pg: dist.ProcessGroup | None = None
    ) -> ShardingPlanResult:
        """Plan the model in ``ctx.request``.

        Args:
            sku: kind of machine.
            ctx: session with the request.
            pg: process group in which all ranks get the same plan; None: plan on this rank.
        """
        ...


class DefaultPlannerExecutor(PlannerExecutor):
    """Executor that plans with the topology, reservation and planner from a provider.

    Args:
        provider: provider (default: `DefaultPlannerProvider`).
    """

    def __init__(self, provider: PlannerProvider | None = None) -> None:
        self._provider = DefaultPlannerProvider() if provider is None else provider

    @override
    def run(
        self, sku: str, ctx: PlannerSessionContext, pg: dist.ProcessGroup | None = None
    ) -> ShardingPlanResult:
        """Plan the model in ``ctx.request``. Collective if a group is given."""
        request = ctx.request
        # A function builds the model only now.
        model = request.model if isinstance(request.model, nn.Module) else request.model()
        topology = self._provider.build_topology(sku, request, ctx)
        reservation = self._provider.build_storage_reservation(sku, request)
        ctx.topology_cache[sku, topology.world_size, topology.local_size] = topology
        ctx.storage_reservations_used[sku] = reservation
        planner = self._provider.build_planner(
            sku, topology=topology, storage_reservation=reservation, ctx=ctx
        )
        started = time.perf_counter()
        plan: ShardingPlan | None = None
        reason: str | None = None
        # A failed search is a result: `success` is False, and the reason is in the result.
        try:
            if pg is None:
                plan = planner.plan(model, request.sharders)
            else:
                plan = planner.collective_plan(model, request.sharders, pg)
        except ValueError as error:
            reason = str(error)
            _logger.warning("no plan for %r: %s", sku, reason)
        estimates = _estimates(plan)
        milliseconds = (time.perf_counter() - started) * 1e3
        ctx.timing[f"plan_call:{sku}"] = milliseconds
        num_bytes = estimates.pop("num_bytes", 0)
        # Tables use either GPU memory or host memory.
        on_cpu = topology.compute_device == "cpu"
        return ShardingPlanResult(
            sku=sku,
            success=plan is not None,
            sharding_plan=plan,
            planner_failure_reason=reason,
            estimated_max_hbm_bytes=0 if on_cpu else num_bytes,
            estimated_max_ddr_bytes=num_bytes if on_cpu else 0,
            request_hash=request.request_hash,
            request_id=request.request_id,
            solve_time_ms=milliseconds,
            is_planning_rank=pg is None or pg.rank() == 0,
            **estimates,
        )


def _estimates(plan: ShardingPlan | None) -> dict[str, Any]:
    """Return the predicted figures of a plan, as arguments of `ShardingPlanResult`.

    Empty without a plan, or for a model without tables.
    """
    planned = getattr(plan, "planned", None)
    if planned is None:
        return {}
    estimate = planned.estimate()
    # Ranks work at the same time, so the slowest rank determines the time of a step.
    rank_ms = estimate.load_RF.sum(1) * 1e3
    return {
        "num_bytes": int(max(estimate.bytes_R)),
        "critical_path_ms": planned.seconds * 1e3,
        "max_rank_perf": float(rank_ms.max()),
        "mean_rank_perf": float(rank_ms.mean()),
        "perf_imbalance_ratio": float(rank_ms.max() / rank_ms.mean()) if rank_ms.any() else None,
    }


@runtime_checkable
class PlanReporter(Protocol):
    """Builder of the objects that receive the statistics of a plan."""

    def build_stats(self, ctx: PlannerSessionContext, sku: str) -> Sequence[Any]:
        """Return the objects that receive statistics."""
        ...


class DefaultPlanReporter(PlanReporter):
    """Reporter that builds nothing. ``print(plan.planned)`` shows a plan and its bound."""

    def build_stats(self, ctx: PlannerSessionContext, sku: str) -> Sequence[Any]:
        return []


class ShardingPlannerAPI(ABC):
    """Planning of a request for every kind of machine that a subclass returns from ``_targets``.

    Args:
        executor: makes the plan for a kind of machine.
        reporter: reporter (default: `DefaultPlanReporter`).
        broadcast_pg: process group in which all ranks get the same plan (default: all ranks, if there are
            several).
    """

    def __init__(
        self,
        executor: PlannerExecutor,
        reporter: PlanReporter | None = None,
        broadcast_pg: dist.ProcessGroup | None = None,
    ) -> None:
        self._executor = executor
        self._reporter = DefaultPlanReporter() if reporter is None else reporter
        self._broadcast_pg = broadcast_pg

    def plan(
        self, request: ShardingPlanRequest, ctx: PlannerSessionContext
    ) -> Mapping[str, ShardingPlanResult]:
        """Return the results by SKU, and store them in ``ctx.results``. Collective in a process group.

        Raises:
            ValueError: ``request`` is not ``ctx.request``.
        """
        if request is not ctx.request:
            raise ValueError(
                f"request {request.request_id} is not that of the context, {ctx.request.request_id}. Pass "
                "ctx.request."
            )
        group = self._broadcast_pg
        if group is None and dist.is_available() and dist.is_initialized():
            # Without an explicit group, all ranks get the same plan.
            group = dist.group.WORLD
        started = time.perf_counter()
        # Without repetitions, in the order of the subclass.
        skus = list(dict.fromkeys(self._targets(request)))
        for sku in skus:
            ctx.stats = self._reporter.build_stats(ctx, sku)
            if ctx.stats:
                _logger.warning(
                    "%s has stats for %r, which MeshRec's planner does not call. print(plan.planned) shows "
                    "the plan.",
                    type(self._reporter).__name__,
                    sku,
                )
            ctx.results[sku] = self._executor.run(sku=sku, ctx=ctx, pg=group)
        ctx.timing["total_planner_time"] = (time.perf_counter() - started) * 1e3
        return {sku: ctx.results[sku] for sku in skus}

    @abstractmethod
    def _targets(self, request: ShardingPlanRequest) -> Sequence[str]: ...


class ProductionPlannerOrchestrator(ShardingPlannerAPI):
    """Planner for the kind of machine on which the program runs.

    Args:
        executor, reporter, broadcast_pg: as for `ShardingPlannerAPI`.
        sku: name of the machine, under which ``plan`` returns the result.
    """

    def __init__(
        self,
        executor: PlannerExecutor,
        sku: str,
        reporter: PlanReporter | None = None,
        broadcast_pg: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(executor, reporter, broadcast_pg)
        self._sku = sku

    def _targets(self, request: ShardingPlanRequest) -> Sequence[str]:
        return [self._sku]
