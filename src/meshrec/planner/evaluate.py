"""The time and memory of a plan under the cost model, whoever made the plan."""

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
from meshrec.planner.estimators import NUM_PHASES, PHASES, CostModel, Usage
from meshrec.planner.problem import Layout, Problem, Scope
from meshrec.planner.state import Parts
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
    """The cost of a plan.

    Attributes:
        seconds: time of a training step without its dense part: the sum of `phase_seconds_F`.
        phase_seconds_F: latency plus the slowest rank's load, for each phase of `PHASES`.
        load_RF: seconds of each rank in each phase, without latencies.
        bytes_R: memory of each rank: tables, optimizer state, buffers.
        memory_cap: bytes that a rank may use.
        sent_bytes: bytes that leave ranks in a step, summed over ranks, in the tables' wire formats: of
            ``"ids"``, of embeddings (``"output"``) and of their gradients (``"gradient"``).
        id_travel_seconds: the part of the phase of IDs that passes until the IDs have arrived. A train
            pipeline can hide it, but not the computation of that phase.
    """

    seconds: float
    phase_seconds_F: Floats
    load_RF: Floats
    bytes_R: Floats
    memory_cap: float
    sent_bytes: dict[str, float]
    id_travel_seconds: float

    def pipelined_seconds(self, dense_seconds: float = 0.0) -> float:
        """Return the time of a step, without its dense part, under a train pipeline.

        The pipeline sends the IDs of the next batch during this batch's lookups and updates, and during
        `dense_seconds` of its dense part.
        """
        phases = self.phases
        computes = phases["lookup"] + phases["update"] + dense_seconds
        return self.seconds - min(self.id_travel_seconds, computes)

    @property
    def fits(self) -> bool:
        """Whether the plan fits into the memory of every rank."""
        return bool(self.bytes_R.max() <= self.memory_cap * (1 + 1e-9))

    @property
    def phases(self) -> dict[str, float]:
        """Seconds of each phase, by name."""
        return dict(zip(PHASES, map(float, self.phase_seconds_F), strict=True))


def evaluate(
    plan: ShardingPlan | Mapping[str, EmbeddingModuleShardingPlan],
    tables: Sequence[Table],
    topology: Topology,
    *,
    batch_size: int,
    replicas: int = 1,
) -> StepEstimate:
    """Return the cost of a plan: `tables` on `topology` with `batch_size` samples per rank.

    Raises:
        ValueError: The plan leaves a table out, or names a rank that does not exist.
    """
    model = CostModel(tables, topology, batch_size=batch_size, replicas=replicas)
    return evaluate_placements(from_plan(plan, tables), model)


def evaluate_placements(placements: Placements, model: CostModel) -> StepEstimate:
    """Return the cost of rectangles."""
    table_N, rank_N = placements.table_N, placements.rank_N
    if len(rank_N) and not (rank_N.min() >= 0 and rank_N.max() < model.num_ranks):
        raise ValueError(
            f"the plan uses ranks {rank_N.min()}..{rank_N.max()}; the topology has [0, {model.num_ranks}) "
            "per replica group. Give evaluate() the topology that the plan was made for."
        )
    rows_N = placements.row_end_N - placements.row_start_N
    columns_N = placements.column_end_N - placements.column_start_N
    in_node_N = _summed_in_node(placements, model)
    part_NF = model.rectangle_loads(table_N, rows_N, columns_N, in_node_N)
    load_RF = np.zeros((model.num_ranks, NUM_PHASES))
    np.add.at(load_RF, rank_N, part_NF)
    load_RF += model.shared_loads(load_RF.mean(axis=0))
    bytes_R = np.zeros(model.num_ranks)
    np.add.at(bytes_R, rank_N, model.rectangle_bytes(table_N, rows_N, columns_N))
    bytes_R += model.received_bytes(table_N, rows_N, columns_N, in_node_N).sum()
    whole = np.flatnonzero(placements.replicated_T)
    if len(whole):
        load_RF += model.replicated_loads(whole).sum(axis=0)
        bytes_R += model.replicated_bytes(whole).sum()
    usage = Usage(
        sharded=len(table_N) > 0,
        row_stats=bool(part_NF[:, PHASES.index("row_stats")].any()),
        data_parallel=len(whole) > 0,
    )
    phase_F = model.fixed_seconds(usage) + load_RF.max(axis=0)
    sent = model.sent_bytes(table_N, rows_N, columns_N, in_node_N)
    # Rectangles with the same rows on one rank, or behind one that stands for their ranks, get IDs once.
    stands_N = rank_N % model.node_size if model.rows_across else rank_N
    inside_N, across_N = sent["ids"]
    sent["ids"] = Sent(inside_N / _sharing(placements, stands_N), across_N / _sharing(placements, rank_N))
    travel_R = np.zeros(model.num_ranks)
    shares_N = rows_N / model.arrays.rows_T[table_N]
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


def _sharing(placements: Placements, place_N: Ints) -> Ints:
    """Return, for each rectangle, how many rectangles of its rank have the same rows of the same table."""
    key_N4 = np.stack((placements.table_N, placements.row_start_N, placements.row_end_N, place_N), axis=1)
    _, group_N, count_G = np.unique(key_N4, axis=0, return_inverse=True, return_counts=True)
    found: Ints = count_G[group_N.ravel()]
    return found


def _summed_in_node(placements: Placements, model: CostModel) -> Bools:
    """Return, for each rectangle, whether all ranks of its node hold rows of the same columns of its
    table.
    """
    if not model.sum_in_node or not len(placements.table_N):
        return np.zeros(len(placements.table_N), bool)
    node_N = placements.rank_N // model.node_size
    key_N4 = np.stack(
        (placements.table_N, placements.column_start_N, placements.column_end_N, node_N), axis=1
    )
    _, group_N = np.unique(key_N4, axis=0, return_inverse=True)
    group_N = group_N.ravel()
    pairs = np.unique(group_N * model.num_ranks + placements.rank_N)
    ranks_G = np.bincount(pairs // model.num_ranks)
    complete: Bools = ranks_G[group_N] == model.node_size
    return complete


def to_placements(problem: Problem, parts_T: Sequence[Parts], tables: Sequence[Table]) -> Placements:
    """Return the rectangles of the solver's pieces. Their rows and columns are cut in proportion to the
    pieces' sizes.
    """
    found: list[tuple[int, int, int, int, int, int]] = []
    replicated = []
    for index, (parts, table) in enumerate(zip(parts_T, tables, strict=True)):
        layout = problem.layouts_C[parts.candidate]
        replicated.append(layout.scope is Scope.EVERYWHERE)
        length = layout.row_parts * (problem.node_size if layout.scope is Scope.NODES else 1)
        column = 0
        for first in range(0, len(parts.rank_N), length):
            chunk = slice(first, first + length)
            group = int(parts.group_N[first])
            width = int(problem.width_P[group])
            if length == 1:
                width = round(width * float(parts.amount_N[first]))
            order = np.argsort(parts.rank_N[chunk], kind="stable")
            cuts = _row_cuts(table.num_embeddings, parts.amount_N[chunk][order])
            for rank, start, end in zip(parts.rank_N[chunk][order], cuts[:-1], cuts[1:], strict=True):
                if end > start:
                    found.append((index, int(start), int(end), column, column + width, int(rank)))
            column += width
        assert replicated[-1] or column == table.embedding_dim
    columns = np.array(found, np.int64).reshape(-1, 6).T
    return _placements(columns, replicated)


def sharding_type(layout: Layout, constraints: ParameterConstraints | None) -> ShardingType:
    """Return the sharding type of a layout. If several types fit, it is one that the constraints allow."""
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
    # One rank holds one rectangle of any type.
    return next((name for name in _OF_ONE_RECTANGLE if name in allowed), ShardingType.TABLE_WISE)


_OF_ONE_RECTANGLE = [kind for kind in ShardingType if kind is not ShardingType.DATA_PARALLEL]
_OF_ONE_RECTANGLE.sort(key=lambda kind: kind is not ShardingType.TABLE_WISE)


def to_plan(
    placements: Placements, tables: Sequence[Table], types_T: Sequence[ShardingType], device: str
) -> dict[str, EmbeddingModuleShardingPlan]:
    """Return the plan of each module, by the module's path."""
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
        kernel = kernel if table.trained else EmbeddingComputeKernel.QUANT
        whole = bool(placements.replicated_T[index])
        plan.setdefault(table.module_path, EmbeddingModuleShardingPlan())[table.name] = ParameterSharding(
            sharding_type=types_T[index],
            compute_kernel=kernel,
            ranks=None if whole else tuple(shard.placement.rank for shard in shards[index]),
            sharding_spec=None if whole else EnumerableShardingSpec(shards=tuple(shards[index])),
        )
    return plan


def from_plan(
    plan: ShardingPlan | Mapping[str, EmbeddingModuleShardingPlan], tables: Sequence[Table]
) -> Placements:
    """Return a plan's rectangles as arrays.

    Raises:
        ValueError: The plan does not place one of the tables.
    """
    modules = plan.plan if isinstance(plan, ShardingPlan) else plan
    found: list[tuple[int, int, int, int, int, int]] = []
    replicated = []
    for index, table in enumerate(tables):
        tables_of_module = modules.get(table.module_path)
        sharding = tables_of_module.get(table.name) if tables_of_module else None
        if sharding is None:
            raise ValueError(
                f"the plan does not place table {table.name!r} of module {table.module_path!r}; it has "
                f"{[(path, *names) for path, names in modules.items()]}."
            )
        replicated.append(sharding.sharding_type is ShardingType.DATA_PARALLEL)
        found += [(index, *shard.rows, *shard.columns, shard.placement.rank) for shard in sharding.shards]
    columns = np.array(found, np.int64).reshape(-1, 6).T
    return _placements(columns, replicated)


def _placements(columns: Ints, replicated: Sequence[bool]) -> Placements:
    table, row, row_end, column, column_end, rank = columns
    return Placements(table, row, row_end, column, column_end, rank, np.array(replicated, bool))


def _row_cuts(rows: int, amount_N: Floats) -> Ints:
    """Return where to cut rows so that the parts are in proportion to `amount_N`. If there are enough rows,
    no part is empty.
    """
    ends = np.cumsum(amount_N)
    cuts = np.concatenate(([0], np.rint(rows * ends / ends[-1]))).astype(np.int64)
    if rows >= len(amount_N):
        floor = np.arange(len(cuts))
        cuts = np.maximum.accumulate(cuts - floor) + floor
        cuts = np.minimum(cuts, rows - floor[::-1])
    return cuts
