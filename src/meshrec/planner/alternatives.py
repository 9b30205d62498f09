"""For a finished plan: how the step time would change if one table were sharded differently."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from meshrec.plan.sharding_plan import ShardingType
from meshrec.planner.enumerators import build_problem
from meshrec.planner.estimators import CostModel, UsedCollectives
from meshrec.planner.evaluate import evaluate_placements, from_plan, sharding_type
from meshrec.planner.plan_file import PlannedShardingPlan
from meshrec.planner.problem import Problem
from meshrec.planner.state import State
from meshrec.planner.types import Bools, Floats, ParameterConstraints, Placements

# Exponent of the norm over ranks, see state.py: high, so that the slowest rank dominates.
_EXPONENT = 32


class Alternative(NamedTuple):
    """Another placement for a table, while all other tables stay where they are.

    Attributes:
        sharding_type: sharding type, such as ``"row_wise"``.
        num_parts: rectangles into which the table is split.
        change: step time change in seconds; negative if the step gets faster. If no other table needs some
            collective, such as the gradient all-reduce of data-parallel tables, the collective's latency is
            included.
    """

    sharding_type: str
    num_parts: int
    change: float


def alternatives(plan: PlannedShardingPlan, *, most_tables: int = 400) -> dict[str, list[Alternative]]:
    """Return for every table a list with the best placement per sharding type, by table name.

    Each list is sorted by step time, fastest first.

    Args:
        plan: plan with the planner inputs (tables, machine, constraints), as the planner returns it.
        most_tables: number of tables to consider, largest first.

    Raises:
        ValueError: the plan has no inputs.
    """
    inputs = plan.required_inputs()
    model = CostModel(inputs.tables, inputs.topology, batch_size=inputs.batch_size, replicas=plan.replicas)
    problem = build_problem(model, inputs.constraints)
    placements = from_plan(plan, inputs.tables)
    estimate = evaluate_placements(placements, model)
    # The target is irrelevant here: set_exponent sets the scale for every table.
    state = State(problem, np.ones(problem.load_PK.shape[1]))
    load_RK = estimate.load_RF @ problem.merge_FK
    # Phases which no piece uses are not in the problem, but data-parallel tables may cost time there.
    unmerged = estimate.load_RF[:, ~problem.merge_FK.any(axis=1)].max(axis=0).sum()
    # Pricing takes time for every table and rank, so only the largest tables are priced.
    order = sorted(range(len(inputs.tables)), key=lambda index: -inputs.tables[index].num_bytes)[:most_tables]
    by_table = {}
    for index in order:
        only_table = evaluate_placements(_only(placements, index), model)
        before = float(load_RK.max(axis=0).sum() + unmerged)
        # The state holds the plan without this table, to search for the table's cheapest placement.
        state.load_RK = load_RK - only_table.load_RF @ problem.merge_FK
        state.bytes_R = estimate.bytes_R - only_table.bytes_R
        # Must follow the assignments: it recomputes the powers which the state caches for `load_RK`.
        state.set_exponent(_EXPONENT)
        table_unmerged = only_table.load_RF[:, ~problem.merge_FK.any(axis=1)].max(axis=0).sum()
        remaining = float(unmerged - table_unmerged)
        table = inputs.tables[index]
        present_sharding = plan.plan[table.module_path][table.name]
        latency = _Latency(model, np.delete(placements.replicated_T, index))
        before += latency.seconds(bool(placements.replicated_T[index])) - remaining
        best = _best_per_type(
            state, problem, model, index, constraints=inputs.constraints, before=before, latency=latency
        )
        # Candidates are split evenly, so an uneven split in the plan may beat all of them.
        present = Alternative(present_sharding.sharding_type.value, max(1, len(present_sharding.shards)), 0.0)
        if best.get(present.sharding_type, present).change >= 0:
            best[present.sharding_type] = present
        by_table[table.name] = sorted(best.values(), key=lambda alternative: alternative.change)
    return by_table


class _Latency:
    """Computes the latency of a step's collectives when a table is added to the other tables of a plan.

    A collective runs if at least one table needs it. So the added table increases the latency only if it
    needs a collective which no other table needs.

    Args:
        model: cost model.
        replicated_T: whether a table is data-parallel, for all other tables.
    """

    def __init__(self, model: CostModel, replicated_T: Bools) -> None:
        self._model = model
        self._sharded, self._replicated = bool((~replicated_T).any()), bool(replicated_T.any())

    def seconds(self, replicated: bool) -> float:
        """Return the step's latency in seconds with the added table.

        Args:
            replicated: True if the added table is data-parallel, False if it is sharded.
        """
        # The latency of the row statistics all-reduce is left out, for the present placement as for all
        # others.
        usage = UsedCollectives(self._sharded or not replicated, False, self._replicated or replicated)
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
    """Return the fastest even split of a table for every sharding type, by sharding type.

    A sharding type is missing if no placement with this type is possible, for example for lack of memory.

    Args:
        state: the plan's ranks and loads without this table.
        problem: planning problem, with the candidates (ways to split a table).
        model: cost model.
        index: table index.
        constraints: constraints by table name.
        before: step time in seconds with the table's present placement, with latencies. Phases which only
            other, data-parallel tables use are left out, because they do not change.
        latency: latency for the collectives which other tables need.
    """
    weight_K = state.weights()
    best: dict[str, Alternative] = {}
    table = model.tables[index]
    for candidate in np.flatnonzero(problem.type_C == problem.type_T[index]):
        placed = state.cheapest_placement(index, int(candidate), weight_K)
        if placed is None:
            continue
        load_RK: Floats = state.load_RK.copy()
        load_RK[placed.placement.rank_N] += state.loads(placed.placement)
        after = float(load_RK.max(axis=0).sum() + problem.common_cost_C[candidate])
        name = sharding_type(problem.layouts_C[candidate], constraints.get(table.name)).value
        after += latency.seconds(name == ShardingType.DATA_PARALLEL.value)
        alternative = Alternative(name, max(1, len(placed.placement.rank_N)), after - before)
        if name not in best or alternative.change < best[name].change:
            best[name] = alternative
    return best


def _only(placements: Placements, index: int) -> Placements:
    """Return only the placements of the table with this index; the index stays valid."""
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
