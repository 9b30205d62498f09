"""For a finished plan: how the step time would change if one table were sharded differently."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

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

    Raises:
        ValueError: the plan has no inputs.
    """
    inputs = plan.required_inputs()
    model = CostModel(inputs.tables, inputs.topology, batch_size=inputs.batch_size, replicas=plan.replicas)
    problem = build_problem(model, inputs.constraints)
    placements = from_plan(plan, inputs.tables)
    estimate = evaluate_placements(placements, model)
    row_stats_T = _need_row_stats(placements, model)
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
        present_sharding = plan.plan[table.module_path][table.local_name]
        replicated_N = np.delete(placements.replicated_T, index)
        other_tables = UsedCollectives(
            sharded=bool((~replicated_N).any()),
            row_stats=bool(np.delete(row_stats_T, index).any()),
            data_parallel=bool(replicated_N.any()),
        )
        replicated = bool(placements.replicated_T[index])
        used = UsedCollectives(not replicated, bool(row_stats_T[index]), replicated)
        before += _latency(model, other_tables, used) - remaining
        best = _best_per_type(
            state,
            problem,
            model,
            index,
            constraints=inputs.constraints,
            before=before,
            other_tables=other_tables,
        )
        # Candidates are split evenly, so an uneven split in the plan may beat all of them.
        present = Alternative(present_sharding.sharding_type.value, max(1, len(present_sharding.shards)), 0.0)
        if best.get(present.sharding_type, present).change >= 0:
            best[present.sharding_type] = present
        by_table[table.name] = sorted(best.values(), key=lambda alternative: alternative.change)
    return by_table


def _need_row_stats(placements: Placements, model: CostModel) -> Bools:
    """Return for every table whether the plan all-reduces row statistics for it."""
    columns_N = placements.column_end_N - placements.column_start_N
    row_stats_T = np.zeros(len(model.tables), bool)
    row_stats_T[placements.table_N[model.needs_row_stats(placements.table_N, columns_N)]] = True
    return row_stats_T


def _latency(model: CostModel, other_tables: UsedCollectives, table: UsedCollectives) -> float:
    """Return the fixed step time in seconds when a table is added to the other tables of a plan.

    A collective runs if at least one table needs it. So the added table increases the time only if it needs a
    collective which no other table needs.
    """
    usage = UsedCollectives(*(any(pair) for pair in zip(other_tables, table, strict=True)))
    return float(model.fixed_seconds(usage).sum())


def _best_per_type(
    state: State,
    problem: Problem,
    model: CostModel,
    index: int,
    *,
    constraints: Mapping[str, ParameterConstraints],
    before: float,
    other_tables: UsedCollectives,
) -> dict[str, Alternative]:
    """Return the fastest even split of a table for every sharding type, by sharding type.

    A sharding type is missing if no placement with this type is possible, for example for lack of memory.

    Args:
        before: step time in seconds with the table's present placement, with latencies. Phases which only
            other, data-parallel tables use are left out, because they do not change.
    """
    weight_K = state.weights()
    best: dict[str, Alternative] = {}
    table = model.tables[index]
    for candidate in np.flatnonzero(problem.type_C == problem.type_T[index]):
        placed = state.cheapest_placement(index, int(candidate), weight_K)
        if placed is None:
            continue
        # A copy, because the state must stay without the table for the other candidates.
        load_RK: Floats = state.load_RK.copy()
        load_RK[placed.placement.rank_N] += state.loads(placed.placement)
        after = float(load_RK.max(axis=0).sum() + problem.common_cost_C[candidate])
        name = sharding_type(problem.layouts_C[candidate], constraints.get(table.name)).value
        sharded = bool(problem.sharded_C[candidate])
        used = UsedCollectives(sharded, bool(problem.row_stats_C[candidate]), not sharded)
        after += _latency(model, other_tables, used)
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
