"""The alternatives for a table: the time of a step if the table were placed in another way."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from meshrec.plan.sharding_plan import ShardingType
from meshrec.planner.enumerators import build_problem
from meshrec.planner.estimators import CostModel, Usage
from meshrec.planner.evaluate import evaluate_placements, from_plan, sharding_type
from meshrec.planner.plan_file import PlannedShardingPlan
from meshrec.planner.problem import Problem
from meshrec.planner.state import State
from meshrec.planner.types import Bools, Floats, ParameterConstraints, Placements

_EXPONENT = 32


class Alternative(NamedTuple):
    """Another way to place one table, with everything else unchanged.

    ``change`` is in seconds per step. It includes the latency of collectives that only this table would need,
    because it would be the first split table, or the first data-parallel one.
    """

    sharding_type: str
    num_parts: int
    change: float


def alternatives(plan: PlannedShardingPlan, *, most_tables: int = 400) -> dict[str, list[Alternative]]:
    """Return the best placement of each sharding type for each of the `most_tables` largest tables."""
    inputs = plan.required_inputs()
    model = CostModel(inputs.tables, inputs.topology, batch_size=inputs.batch_size, replicas=plan.replicas)
    problem = build_problem(model, inputs.constraints)
    placements = from_plan(plan, inputs.tables)
    estimate = evaluate_placements(placements, model)
    state = State(problem, np.ones(problem.load_PK.shape[1]))
    load_RK = estimate.load_RF @ problem.merge_FK
    unmerged = estimate.load_RF[:, ~problem.merge_FK.any(axis=1)].max(axis=0).sum()
    order = sorted(range(len(inputs.tables)), key=lambda index: -inputs.tables[index].num_bytes)[:most_tables]
    found = {}
    for index in order:
        alone = evaluate_placements(_only(placements, index), model)
        before = float(load_RK.max(axis=0).sum() + unmerged)
        state.load_RK = load_RK - alone.load_RF @ problem.merge_FK
        state.bytes_R = estimate.bytes_R - alone.bytes_R
        state.set_exponent(_EXPONENT)
        own_unmerged = alone.load_RF[:, ~problem.merge_FK.any(axis=1)].max(axis=0).sum()
        rest = float(unmerged - own_unmerged)
        table = inputs.tables[index]
        chosen = plan.plan[table.module_path][table.name]
        latency = _Latency(model, np.delete(placements.replicated_T, index))
        before += latency.seconds(bool(placements.replicated_T[index])) - rest
        best = _best_per_type(
            state, problem, model, index, constraints=inputs.constraints, before=before, latency=latency
        )
        # The plan may cut the table unevenly, but all candidates are even.
        present = Alternative(chosen.sharding_type.value, max(1, len(chosen.shards)), 0.0)
        if best.get(present.sharding_type, present).change >= 0:
            best[present.sharding_type] = present
        found[table.name] = sorted(best.values(), key=lambda alternative: alternative.change)
    return found


class _Latency:
    """The latency of collectives, which the first table of a kind adds to the step."""

    def __init__(self, model: CostModel, others_replicated: Bools) -> None:
        self._model = model
        self._sharded, self._replicated = bool((~others_replicated).any()), bool(others_replicated.any())

    def seconds(self, replicated: bool) -> float:
        """Return the latency with one more table, data-parallel or split."""
        usage = Usage(self._sharded or not replicated, False, self._replicated or replicated)
        return float(self._model.fixed_seconds(usage).sum())


def _best_per_type(
    state: State,
    problem: Problem,
    model: CostModel,
    index: int,
    *,
    constraints: Mapping[str, ParameterConstraints],
    before: float,
    latency: "_Latency",
) -> dict[str, Alternative]:
    weight_K = state.weights()
    best: dict[str, Alternative] = {}
    table = model.tables[index]
    for candidate in np.flatnonzero(problem.type_C == problem.type_T[index]):
        placed = state.best_place(index, int(candidate), weight_K)
        if placed is None:
            continue
        load_RK: Floats = state.load_RK.copy()
        load_RK[placed.parts.rank_N] += state.loads(placed.parts)
        after = float(load_RK.max(axis=0).sum() + problem.common_C[candidate])
        name = sharding_type(problem.layouts_C[candidate], constraints.get(table.name)).value
        after += latency.seconds(name == ShardingType.DATA_PARALLEL.value)
        found = Alternative(name, max(1, len(placed.parts.rank_N)), after - before)
        if name not in best or found.change < best[name].change:
            best[name] = found
    return best


def _only(placements: Placements, index: int) -> Placements:
    """Return the rectangles of one table."""
    mine_N = placements.table_N == index
    replicated_T = np.zeros_like(placements.replicated_T)
    replicated_T[index] = placements.replicated_T[index]
    return Placements(
        placements.table_N[mine_N],
        placements.row_start_N[mine_N],
        placements.row_end_N[mine_N],
        placements.column_start_N[mine_N],
        placements.column_end_N[mine_N],
        placements.rank_N[mine_N],
        replicated_T,
    )
