"""Search for the best plan over all ``replicate`` axis sizes and all collective sets."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from meshrec.plan.sharding_plan import ShardingType
from meshrec.planner.enumerators import build_problem
from meshrec.planner.estimators import CostModel, UsedCollectives
from meshrec.planner.evaluate import StepEstimate, evaluate_placements, sharding_type, whole_row_placements
from meshrec.planner.problem import Problem
from meshrec.planner.search import Effort
from meshrec.planner.solver import CollectiveSet, Solution, solve
from meshrec.planner.types import ParameterConstraints, Placements, Table, Topology

# 5e8 units of work take about 5 s, so usually the work limit ends the search, not the time limit. A plan that
# the time limit ended would depend on the machine's speed.
DEFAULT_EFFORT = Effort(time_limit=30.0, max_work=5e8, gap=0.005)
# Maximum number of searches with a lower memory cap, if rounding to whole rows exceeds the actual cap.
_MOST_RETRIES = 4


class Optimized(NamedTuple):
    """Best plan and proven lower bound.

    Attributes:
        placements: rectangles in the plan.
        types_T: sharding type per table.
        estimate: predicted time and memory.
        lower_bound: step time in seconds which no plan with any allowed replica count can beat.
        replicas: ``replicate`` axis size in this plan.
    """

    placements: Placements
    types_T: list[ShardingType]
    estimate: StepEstimate
    lower_bound: float
    replicas: int

    @property
    def gap(self) -> float:
        """Upper bound on the time a better plan could save, as a fraction of this plan's step time."""
        return max(0.0, 1 - self.lower_bound / self.estimate.seconds) if self.estimate.seconds else 0.0


def optimize(
    tables: Sequence[Table],
    topology: Topology,
    *,
    batch_size: int,
    constraints: Mapping[str, ParameterConstraints] | None = None,
    effort: Effort = DEFAULT_EFFORT,
) -> Optimized | None:
    """Search for the plan with the shortest predicted step time.

    The lower bound holds for all plans of the enumerated kinds: any sharding type, any number of column
    parts, even or uneven splits, under the constraints.

    Args:
        tables: tables to plan.
        topology: machine to plan for.
        batch_size: samples per rank.
        constraints: constraints by table name.
        effort: search limits, for every ``replicate`` axis size.

    Returns:
        The best plan, or None if no plan was found which fits into memory.

    Raises:
        ValueError: no tables, or constraints which leave a table without a candidate.
    """
    if not tables:
        raise ValueError(
            "there are no tables to plan. Pass a model with embedding tables, and sharders for its modules."
        )
    best: Optimized | None = None
    bounds = []
    for replicas in topology.replicate:
        model = CostModel(tables, topology, batch_size=batch_size, replicas=replicas)
        problem = build_problem(model, constraints or {})
        # The best plan so far is the cutoff, so the search for another size ends early if it cannot win.
        solution = _solve(problem, model, effort, np.inf if best is None else best.estimate.seconds)
        # The result's bound is the lowest over all group sizes: no size may beat it.
        bounds.append(solution.lower_bound)
        if solution.placements_T:
            candidate = _evaluated(problem, model, constraints or {}, solution)
            if best is None or candidate.estimate.seconds < best.estimate.seconds:
                best = candidate
    if best is None:
        return None
    return best._replace(lower_bound=min(*bounds, best.estimate.seconds))


def _solve(problem: Problem, model: CostModel, effort: Effort, cutoff: float) -> Solution:
    """Search for a plan, and repeat with less memory until it also fits after rounding to whole rows.

    The solver splits tables at fractional rows; whole rows may need slightly more memory.

    Args:
        cutoff: step time in seconds of a known plan. The search ends once no plan can be faster.

    Returns:
        The solution, without placements if no plan fits. The lower bound holds for the actual memory cap.
    """
    collective_sets = _collective_sets(problem, model)
    solution = solve(problem, collective_sets, effort, cutoff=cutoff)
    # The bound of the first search is kept: it holds for the actual cap, later ones only for lower caps.
    bound, cap = solution.lower_bound, problem.memory_cap
    for _ in range(_MOST_RETRIES):
        # The search splits tables at fractional rows; whole rows may need slightly more memory.
        excess = _excess_bytes(problem, model, solution) if solution.placements_T else 0.0
        if excess <= 0:
            break
        # Twice the excess, so that a single retry usually suffices.
        cap -= 2 * excess
        solution = solve(problem._replace(memory_cap=cap), collective_sets, effort, cutoff=cutoff)
    else:
        solution = solution._replace(placements_T=[])
    return solution._replace(lower_bound=bound)


def _excess_bytes(problem: Problem, model: CostModel, solution: Solution) -> float:
    """Return the bytes by which the fullest rank exceeds the memory cap after rounding; 0 if it fits."""
    estimate = evaluate_placements(whole_row_placements(problem, solution.placements_T, model.tables), model)
    return 0.0 if estimate.fits else float(estimate.bytes_R.max() - estimate.memory_cap)


def _collective_sets(problem: Problem, model: CostModel) -> list[CollectiveSet]:
    """Return the collective sets to try, from all collectives to few.

    A collective set has the collectives which a plan may use. Without a collective, a plan saves the
    collective's latency, but can use fewer candidates (ways to split a table). A plan belongs to every set
    that allows the plan's candidates. So the lowest bound over all sets holds for all plans.
    """
    num_types = len(np.unique(problem.type_C))
    sets: dict[bytes, CollectiveSet] = {}
    # Fields: sharded, row_stats, data_parallel. Row statistics are needed only by sharded tables, so the sets
    # (False, True, ...) are left out.
    for allowed in (
        UsedCollectives(True, True, True),
        UsedCollectives(True, False, True),
        UsedCollectives(True, True, False),
        UsedCollectives(True, False, False),
        UsedCollectives(False, False, True),
    ):
        allowed_C = np.ones(len(problem.type_C), bool)
        if not allowed.row_stats:
            allowed_C &= ~problem.row_stats_C
        if not allowed.data_parallel:
            allowed_C &= problem.sharded_C
        if not allowed.sharded:
            allowed_C &= ~problem.sharded_C
        # A set without a candidate for some table type contains no complete plan.
        if len(np.unique(problem.type_C[allowed_C])) == num_types:
            # The candidates may use fewer collectives than are allowed.
            used = UsedCollectives(
                sharded=bool(problem.sharded_C[allowed_C].any()),
                row_stats=bool(problem.row_stats_C[allowed_C].any()),
                data_parallel=bool((~problem.sharded_C[allowed_C]).any()),
            )
            collectives = CollectiveSet(allowed_C, float(model.fixed_seconds(used).sum()))
            # Sets with the same candidates would repeat the same search.
            sets.setdefault(allowed_C.tobytes(), collectives)
    return list(sets.values())


def _evaluated(
    problem: Problem, model: CostModel, constraints: Mapping[str, ParameterConstraints], solution: Solution
) -> Optimized:
    """Return a solution with whole rows and columns, and with predicted time and memory after rounding."""
    placements = whole_row_placements(problem, solution.placements_T, model.tables)
    types = [
        sharding_type(problem.layouts_C[placement.candidate], constraints.get(table.name))
        for placement, table in zip(solution.placements_T, model.tables, strict=True)
    ]
    # Evaluated again, because whole rows differ slightly from the solver's fractional rows.
    estimate = evaluate_placements(placements, model)
    return Optimized(placements, types, estimate, solution.lower_bound, model.replicas)
