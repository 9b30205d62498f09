"""The time and memory of any plan under the cost model, whoever made it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from meshrec.plan.sharding_plan import EmbeddingModuleShardingPlan, ShardingPlan
from meshrec.planner.estimators import NUM_PHASES, PHASES, CostModel, Usage
from meshrec.planner.placements import from_plan
from meshrec.planner.types import Bools, Floats, Placements, Table, Topology


@dataclass(frozen=True, kw_only=True, eq=False)
class StepEstimate:
    """What a plan costs.

    Attributes:
        seconds: a training step without its dense part: the sum of `phase_seconds_F`.
        phase_seconds_F: per phase of `PHASES`, latency and the slowest rank's load.
        load_RF: seconds of each rank in each phase, latencies left out.
        bytes_R: memory of each rank: tables, optimizer state, buffers.
        memory_cap: bytes a rank may use.
    """

    seconds: float
    phase_seconds_F: Floats
    load_RF: Floats
    bytes_R: Floats
    memory_cap: float

    @property
    def fits(self) -> bool:
        """Whether every rank has the memory."""
        return bool(self.bytes_R.max() <= self.memory_cap * (1 + 1e-9))

    @property
    def phases(self) -> dict[str, float]:
        """Seconds by the name of the phase."""
        return dict(zip(PHASES, map(float, self.phase_seconds_F), strict=True))


def evaluate(
    plan: ShardingPlan | Mapping[str, EmbeddingModuleShardingPlan],
    tables: Sequence[Table],
    topology: Topology,
    *,
    batch_size: int,
    replicas: int = 1,
) -> StepEstimate:
    """The cost of a plan: `tables` on `topology` with `batch_size` samples per rank.

    Raises ValueError when the plan leaves a table out or names a rank that is not there.
    """
    model = CostModel(tables, topology, batch_size=batch_size, replicas=replicas)
    return evaluate_placements(from_plan(plan, tables), model)


def evaluate_placements(placements: Placements, model: CostModel) -> StepEstimate:
    """The cost of rectangles."""
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
    return StepEstimate(
        seconds=float(phase_F.sum()),
        phase_seconds_F=phase_F,
        load_RF=load_RF,
        bytes_R=bytes_R,
        memory_cap=model.memory_cap,
    )


def _summed_in_node(placements: Placements, model: CostModel) -> Bools:
    """Whether all ranks of a rectangle's node hold rows of the same columns of its table."""
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
