"""Predicted step time and memory of a plan, and conversion between plans and arrays of rectangles."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from meshrec.plan.sharding_plan import (
    EmbeddingComputeKernel,
    EmbeddingModuleShardingPlan,
    EnumerableShardingSpec,
    ParameterSharding,
    RemoteDevice,
    ShardingPlan,
    ShardingType,
    ShardMetadata,
)
from meshrec.planner.estimators import NUM_PHASES, PHASES, CostModel, Rectangles, UsedCollectives
from meshrec.planner.problem import Layout, Problem, Scope
from meshrec.planner.state import TablePlacement
from meshrec.planner.travel import Sent
from meshrec.planner.types import (
    Bools,
    Floats,
    Ints,
    OptimizerKind,
    ParameterConstraints,
    Placements,
    Table,
    Topology,
)


@dataclass(frozen=True, kw_only=True, eq=False)
class StepEstimate:
    """Predicted time and memory of a training step under a plan.

    Attributes:
        seconds: step time without the dense part of the model: the `phase_seconds_F` total.
        phase_seconds_F: latency plus the slowest rank's load, for each phase in `PHASES`.
        load_RF: seconds per rank and phase, without latencies.
        bytes_R: bytes per rank: tables, optimizer state, buffers.
        memory_cap: maximum bytes per rank.
        sent_bytes: encoded bytes sent per step, summed over all ranks: ``"ids"``, embeddings (``"output"``)
            and gradients (``"gradient"``).
        id_travel_seconds: part of the phase ``ids`` in which IDs are in transit. A train pipeline can hide
            this part behind the previous batch, but not the phase's computation.
    """

    seconds: float
    phase_seconds_F: Floats
    load_RF: Floats
    bytes_R: Floats
    memory_cap: float
    sent_bytes: dict[str, float]
    id_travel_seconds: float

    def pipelined_seconds(self, dense_seconds: float = 0.0) -> float:
        """Return the step time in seconds of a pipelined training loop, without the dense part.

        The pipeline sends the next batch's IDs while the current batch is looked up and updated, and while
        the dense part runs.

        Args:
            dense_seconds: duration of the dense part, which hides sending time but is not included.
        """
        phases = self.phases
        computes = phases["lookup"] + phases["update"] + dense_seconds
        return self.seconds - min(self.id_travel_seconds, computes)

    @property
    def fits(self) -> bool:
        """Whether the plan fits into the memory on every rank, up to rounding."""
        return bool(self.bytes_R.max() <= self.memory_cap * (1 + 1e-9))

    @property
    def phases(self) -> dict[str, float]:
        """Seconds by phase name, as in `PHASES`."""
        return dict(zip(PHASES, map(float, self.phase_seconds_F), strict=True))


def evaluate(
    plan: ShardingPlan | Mapping[str, EmbeddingModuleShardingPlan],
    tables: Sequence[Table],
    topology: Topology,
    *,
    batch_size: int,
    replicas: int = 1,
) -> StepEstimate:
    """Predict the step time and memory of a plan, which may be written by hand.

    Args:
        plan: plan of a model, or plans of its embedding modules by module path.
        tables: all tables in the model.
        topology: machine on which the plan would run.
        batch_size: samples per rank.
        replicas: ``replicate`` axis size.

    Raises:
        ValueError: the plan lacks a table, or uses a rank outside the topology.
    """
    model = CostModel(tables, topology, batch_size=batch_size, replicas=replicas)
    return evaluate_placements(from_plan(plan, tables), model)


def evaluate_placements(placements: Placements, model: CostModel) -> StepEstimate:
    """Predict the step time and memory of a plan given as rectangles.

    A rectangle is a row range and column range of a table, held by a rank.

    Raises:
        ValueError: a rectangle is on a rank outside the topology.
    """
    table_N, rank_N = placements.table_N, placements.rank_N
    if len(rank_N) and not (rank_N.min() >= 0 and rank_N.max() < model.num_ranks):
        raise ValueError(
            f"the plan uses ranks {rank_N.min()}..{rank_N.max()}; the topology has [0, {model.num_ranks}) "
            "per replica group. Call evaluate() with the topology of the plan."
        )
    # Costs depend only on the size of a rectangle.
    rectangles = Rectangles(
        table_N,
        (placements.row_end_N - placements.row_start_N).astype(np.float64),
        (placements.column_end_N - placements.column_start_N).astype(np.float64),
        _summed_in_node(placements, model),
    )
    part_NF = model.rectangle_loads(rectangles)
    load_RF = np.zeros((model.num_ranks, NUM_PHASES))
    # A rank may hold several rectangles, of which `load_RF[rank_N] += part_NF` would count only one.
    np.add.at(load_RF, rank_N, part_NF)
    # Must precede the loads of data-parallel tables: these exchange no IDs or embeddings, so half duplex does
    # not slow them down.
    load_RF += model.shared_loads(load_RF.mean(axis=0))
    bytes_R = np.zeros(model.num_ranks)
    np.add.at(bytes_R, rank_N, model.rectangle_bytes(rectangles))
    # Receive buffers are the same on every rank.
    bytes_R += model.received_bytes(rectangles).sum()
    # Data-parallel tables have no rectangles, but cost every rank the same.
    whole = np.flatnonzero(placements.replicated_T)
    if len(whole):
        load_RF += model.replicated_loads(whole).sum(axis=0)
        bytes_R += model.replicated_bytes(whole).sum()
    usage = UsedCollectives(
        sharded=len(table_N) > 0,
        row_stats=bool(part_NF[:, PHASES.index("row_stats")].any()),
        data_parallel=len(whole) > 0,
    )
    phase_F = model.fixed_seconds(usage) + load_RF.max(axis=0)
    sent = model.sent_bytes(rectangles)
    # A rank that holds several column shards with the same rows receives their IDs once. With
    # ``across_nodes="rows"``, IDs go to a representative in the sender's node: the rank with the owner's
    # local rank, which receives the IDs for all owners behind it once.
    stands_N = rank_N % model.node_size if model.rows_across else rank_N
    inside_N, across_N = sent["ids"]
    sent["ids"] = Sent(
        inside_N / _count_same_ids(placements, stands_N), across_N / _count_same_ids(placements, rank_N)
    )
    # The part of the ID phase that a pipeline can hide: transit, without packing and routing.
    travel_R = np.zeros(model.num_ranks)
    shares_N = rectangles.rows_N / model.arrays.rows_T[table_N]
    np.add.at(travel_R, rank_N, model.id_travel_seconds(table_N, shares_N))
    return StepEstimate(
        seconds=float(phase_F.sum()),
        phase_seconds_F=phase_F,
        load_RF=load_RF,
        bytes_R=bytes_R,
        memory_cap=model.memory_cap,
        sent_bytes={
            name: model.replicas * float(inside.sum() + across.sum())
            for name, (inside, across) in sent.items()
        },
        id_travel_seconds=model.id_latency_seconds + float(travel_R.max()),
    )


def _count_same_ids(placements: Placements, receiver_N: Ints) -> Ints:
    """Return for every rectangle how many rectangles share an ID message with it, itself included.

    Rectangles with the same table, rows and receiver share an ID message. So a rectangle accounts for the
    message's bytes divided by the result.
    """
    key_N4 = np.stack((placements.table_N, placements.row_start_N, placements.row_end_N, receiver_N), axis=1)
    _, group_N, count_G = np.unique(key_N4, axis=0, return_inverse=True, return_counts=True)
    result: Ints = count_G[group_N.ravel()]
    return result


def _summed_in_node(placements: Placements, model: CostModel) -> Bools:
    """Return for every rectangle whether its partial sums are added within the node before they leave it.

    Sums are added if all ranks in the rectangle's node hold rows of the same table and columns. The result
    is False everywhere if the machine does not sum in nodes.
    """
    if not model.sum_in_node or not len(placements.table_N):
        return np.zeros(len(placements.table_N), bool)
    node_N = placements.rank_N // model.node_size
    key_N4 = np.stack(
        (placements.table_N, placements.column_start_N, placements.column_end_N, node_N), axis=1
    )
    _, group_N = np.unique(key_N4, axis=0, return_inverse=True)
    group_N = group_N.ravel()
    # Distinct pairs of group and rank, as single integers.
    pairs = np.unique(group_N * model.num_ranks + placements.rank_N)
    ranks_G = np.bincount(pairs // model.num_ranks)
    complete: Bools = ranks_G[group_N] == model.node_size
    return complete


def whole_row_placements(
    problem: Problem, placements_T: Sequence[TablePlacement], tables: Sequence[Table]
) -> Placements:
    """Convert the solver's placements to rectangles with whole numbers of rows and columns.

    The solver works with fractional piece sizes. A table's rows and columns are divided in proportion to
    these sizes, and rounded.

    Args:
        problem: planning problem, for the layouts of candidates.
        placements_T: placement per table.
        tables: tables, in the same order as `placements_T`.
    """
    rectangles: list[tuple[int, int, int, int, int, int]] = []
    replicated = []
    for index, (placement, table) in enumerate(zip(placements_T, tables, strict=True)):
        layout = problem.layouts_C[placement.candidate]
        replicated.append(layout.scope is Scope.EVERYWHERE)
        # Number of row parts per column part, on ranks.
        length = layout.row_parts * (problem.node_size if layout.scope is Scope.NODES else 1)
        column = 0
        # `length` consecutive entries are the row parts of one column part.
        for first in range(0, len(placement.rank_N), length):
            chunk = slice(first, first + length)
            group = int(placement.group_N[first])
            width = int(problem.width_P[group])
            # Without a row split, an uneven piece has more or fewer columns.
            if length == 1:
                width = round(width * float(placement.amount_N[first]))
            order = np.argsort(placement.rank_N[chunk], kind="stable")
            cuts = _row_cuts(table.num_embeddings, placement.amount_N[chunk][order])
            for rank, start, end in zip(placement.rank_N[chunk][order], cuts[:-1], cuts[1:], strict=True):
                # Only a table with fewer rows than parts has empty parts.
                if end > start:
                    rectangles.append((index, int(start), int(end), column, column + width, int(rank)))
            column += width
        # Rounded widths must still sum to the table's columns.
        assert replicated[-1] or column == table.embedding_dim
    columns = np.array(rectangles, np.int64).reshape(-1, 6).T
    return _placements(columns, replicated)


def sharding_type(layout: Layout, constraints: ParameterConstraints | None) -> ShardingType:
    """Return the sharding type that describes a layout, which is a split into column and row parts.

    Several types may fit. For example, a table on a single rank may be called table-wise or row-wise. A type
    that the constraints allow is then preferred.
    """
    split_columns = len(layout.widths) > 1
    allowed = constraints.allowed_types if constraints else frozenset(ShardingType)
    if layout.scope is Scope.EVERYWHERE:
        return ShardingType.DATA_PARALLEL
    if layout.scope is Scope.ONE_NODE:
        return ShardingType.TABLE_COLUMN_WISE
    if layout.scope is Scope.NODES and layout.row_parts == 1 and not split_columns:
        return ShardingType.TABLE_ROW_WISE
    if layout.scope is Scope.NODES or layout.row_parts > 1:
        names = (
            [ShardingType.GRID_SHARD]
            if split_columns
            else [ShardingType.ROW_WISE, ShardingType.TABLE_ROW_WISE]
        )
        return next((name for name in names if name in allowed), names[0])
    if split_columns:
        return ShardingType.COLUMN_WISE
    # A single rectangle fits every type.
    return next((name for name in _OF_ONE_RECTANGLE if name in allowed), ShardingType.TABLE_WISE)


_OF_ONE_RECTANGLE = [kind for kind in ShardingType if kind is not ShardingType.DATA_PARALLEL]
# Table-wise comes first: it is the name for a single rectangle unless the constraints forbid it.
_OF_ONE_RECTANGLE.sort(key=lambda kind: kind is not ShardingType.TABLE_WISE)


def to_plan(
    placements: Placements, tables: Sequence[Table], types_T: Sequence[ShardingType], device: str
) -> dict[str, EmbeddingModuleShardingPlan]:
    """Convert rectangles to a sharding plan.

    Args:
        placements: rectangles for all tables.
        tables: tables, by the indices in `placements`.
        types_T: sharding type per table.
        device: device type for all shards, ``cpu`` or ``cuda``.

    Returns:
        Plan per embedding module, by module path.
    """
    shards: list[list[ShardMetadata]] = [[] for _ in tables]
    for table, row, row_end, column, column_end, rank in zip(*placements[:6], strict=True):
        shards[table].append(
            ShardMetadata(
                shard_offsets=(int(row), int(column)),
                shard_sizes=(int(row_end - row), int(column_end - column)),
                placement=RemoteDevice(rank=int(rank), device=device),
            )
        )
    plan: dict[str, EmbeddingModuleShardingPlan] = {}
    for index, table in enumerate(tables):
        has_optimizer = table.optimizer is not OptimizerKind.NONE
        kernel = EmbeddingComputeKernel.FUSED if has_optimizer else EmbeddingComputeKernel.DENSE
        # Tables without a backward pass are quantized.
        kernel = kernel if table.trained else EmbeddingComputeKernel.QUANT
        whole = bool(placements.replicated_T[index])
        plan.setdefault(table.module_path, EmbeddingModuleShardingPlan())[table.local_name] = (
            ParameterSharding(
                sharding_type=types_T[index],
                compute_kernel=kernel,
                ranks=None if whole else tuple(shard.placement.rank for shard in shards[index]),
                sharding_spec=None if whole else EnumerableShardingSpec(shards=tuple(shards[index])),
            )
        )
    return plan


def from_plan(
    plan: ShardingPlan | Mapping[str, EmbeddingModuleShardingPlan], tables: Sequence[Table]
) -> Placements:
    """Convert a sharding plan to `Placements`, which have a rectangle (rows x columns) per table shard.

    Raises:
        ValueError: the plan lacks a table.
    """
    modules = plan.plan if isinstance(plan, ShardingPlan) else plan
    rectangles: list[tuple[int, int, int, int, int, int]] = []
    replicated = []
    for index, table in enumerate(tables):
        tables_of_module = modules.get(table.module_path)
        sharding = tables_of_module.get(table.local_name) if tables_of_module else None
        if sharding is None:
            raise ValueError(
                f"the plan does not place table {table.name!r} of module {table.module_path!r}; it has "
                f"{[(path, *names) for path, names in modules.items()]}."
            )
        replicated.append(sharding.sharding_type is ShardingType.DATA_PARALLEL)
        rectangles += [
            (index, *shard.rows, *shard.columns, shard.placement.rank) for shard in sharding.shards
        ]
    # With a shape, because a plan may have no rectangles.
    columns = np.array(rectangles, np.int64).reshape(-1, 6).T
    return _placements(columns, replicated)


def _placements(columns: Ints, replicated: Sequence[bool]) -> Placements:
    """Convert an array [6, N] to `Placements`.

    The rows of the array are table, first row, end row, first column, end column and rank. `replicated` has
    an entry per table, which is True for a data-parallel table.
    """
    table, row, row_end, column, column_end, rank = columns
    return Placements(table, row, row_end, column, column_end, rank, np.array(replicated, bool))


def _row_cuts(rows: int, amount_N: Floats) -> Ints:
    """Split `rows` rows into N parts in proportion to `amount_N`.

    No part is empty if there are at least as many rows as parts.

    Returns:
        First row of every part, followed by the row count, int64 [N + 1].
    """
    ends = np.cumsum(amount_N)
    cuts = np.concatenate(([0], np.rint(rows * ends / ends[-1]))).astype(np.int64)
    if rows >= len(amount_N):
        # Rounding may leave a part empty: push cuts apart to at least one row, then back below the end.
        floor = np.arange(len(cuts))
        cuts = np.maximum.accumulate(cuts - floor) + floor
        cuts = np.minimum(cuts, rows - floor[::-1])
    return cuts
