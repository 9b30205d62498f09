"""Search for a plan: solve and evaluate every replica group size and every set of collectives."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from meshrec.plan.sharding_plan import ShardingType
from meshrec.planner.enumerators import build_problem
from meshrec.planner.estimators import CostModel, Usage
from meshrec.planner.evaluate import StepEstimate, evaluate_placements, sharding_type, to_placements
from meshrec.planner.problem import Problem
from meshrec.planner.search import Effort
from meshrec.planner.solver import CollectiveSet, Solution, solve
from meshrec.planner.types import Bools, ParameterConstraints, Placements, Table, Topology

DEFAULT_EFFORT = Effort(time_limit=30.0, max_work=5e8, gap=0.005)
_MOST_RETRIES = 4


class Optimized(NamedTuple):
    """Best placement, cost, and the proven bound in seconds."""

    placements: Placements
    types_T: list[ShardingType]
    estimate: StepEstimate
    lower_bound: float
    replicas: int
    work: int
    num_boxes: int

    @property
    def gap(self) -> float:
        """Proven distance from the best plan, as a fraction of the plan's time."""
        return max(0.0, 1 - self.lower_bound / self.estimate.seconds) if self.estimate.seconds else 0.0


def optimize(
    tables: Sequence[Table],
    topology: Topology,
    *,
    batch_size: int,
    constraints: Mapping[str, ParameterConstraints] | None = None,
    effort: Effort = DEFAULT_EFFORT,
) -> Optimized | None:
    """Search for the best plan.

    The lower bound holds for all plans of the enumerated kinds: any sharding type, any number of column
    parts, even or uneven splits, under the constraints.

    Args:
        tables: tables.
        topology: machine.
        batch_size: samples per rank.
        constraints: constraints by table name.
        effort: search limits.

    Returns:
        The best plan; None if none is known which fits into memory.

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
        optimized, bound = _optimize_group(model, constraints or {}, effort, best)
        # The result's bound is the lowest over all group sizes: no size may beat it.
        bounds.append(bound)
        if optimized is not None and (best is None or optimized.estimate.seconds < best.estimate.seconds):
            best = optimized
    if best is None:
        return None
    return best._replace(lower_bound=min(*bounds, best.estimate.seconds))


class _Regime(NamedTuple):
    """A set of collectives, and the candidates which need no others."""

    usage: Usage
    allowed_C: Bools


def _optimize_group(
    model: CostModel,
    constraints: Mapping[str, ParameterConstraints],
    effort: Effort,
    best: Optimized | None,
) -> tuple[Optimized | None, float]:
    problem = build_problem(model, constraints)
    collective_sets = [
        CollectiveSet(allowed_C, float(model.fixed_seconds(usage).sum()))
        for usage, allowed_C in _regimes(problem, model)
    ]
    cutoff = np.inf if best is None else best.estimate.seconds
    solution = _solve(problem, model, collective_sets, effort, cutoff)
    if solution.parts_T:
        best = _better(best, problem, model, constraints, solution)
    return best, solution.lower_bound


def _solve(
    problem: Problem,
    model: CostModel,
    collective_sets: Sequence[CollectiveSet],
    effort: Effort,
    cutoff: float,
) -> Solution:
    solution = solve(problem, collective_sets, effort, cutoff=cutoff)
    bound, cap = solution.lower_bound, problem.memory_cap
    for _ in range(_MOST_RETRIES):
        # The search splits tables at fractional rows; whole rows may need slightly more memory.
        excess = _excess_bytes(problem, model, solution) if solution.parts_T else 0.0
        if excess <= 0:
            break
        cap -= 2 * excess
        solution = solve(problem._replace(memory_cap=cap), collective_sets, effort, cutoff=cutoff)
    else:
        solution = solution._replace(parts_T=[])
    return solution._replace(lower_bound=bound)


def _excess_bytes(problem: Problem, model: CostModel, solution: Solution) -> float:
    estimate = evaluate_placements(to_placements(problem, solution.parts_T, model.tables), model)
    return 0.0 if estimate.fits else float(estimate.bytes_R.max() - estimate.memory_cap)


def _better(
    best: Optimized | None,
    problem: Problem,
    model: CostModel,
    constraints: Mapping[str, ParameterConstraints],
    solution: Solution,
) -> Optimized:
    candidate = _evaluated(problem, model, constraints, solution)
    work = solution.work + (0 if best is None else best.work)
    num_boxes = solution.num_boxes + (0 if best is None else best.num_boxes)
    winner = best if best is not None and best.estimate.seconds <= candidate.estimate.seconds else candidate
    return winner._replace(work=work, num_boxes=num_boxes)


def _regimes(problem: Problem, model: CostModel) -> list[_Regime]:
    """Return sets of collectives, from all to few, because fewer collectives save latency.

    A plan belongs to every regime which allows its candidates, so the lowest bound over regimes holds for all
    plans.
    """
    kinds = len(np.unique(problem.type_C))
    regimes: list[_Regime] = []
    for usage in (
        Usage(True, True, True),
        Usage(True, False, True),
        Usage(True, True, False),
        Usage(True, False, False),
        Usage(False, False, True),
    ):
        allowed_C = np.ones(len(problem.type_C), bool)
        if not usage.row_stats:
            allowed_C &= ~problem.row_stats_C
        if not usage.data_parallel:
            allowed_C &= problem.sharded_C
        if not usage.sharded:
            allowed_C &= ~problem.sharded_C
        covers = len(np.unique(problem.type_C[allowed_C])) == kinds
        same = any((regime.allowed_C == allowed_C).all() for regime in regimes)
        if covers and not same:
            regimes.append(_Regime(usage, allowed_C))
    # Equal candidate sets: keep the regime with fewest collectives.
    cheapest: dict[bytes, _Regime] = {}
    for regime in regimes:
        cheapest[regime.allowed_C.tobytes()] = regime
    return [regime._replace(usage=_needed(problem, regime)) for regime in cheapest.values()]


def _needed(problem: Problem, regime: _Regime) -> Usage:
    """Return the collectives which a regime's candidates can use."""
    allowed_C = regime.allowed_C
    return Usage(
        sharded=bool(problem.sharded_C[allowed_C].any()),
        row_stats=bool(problem.row_stats_C[allowed_C].any()),
        data_parallel=bool((~problem.sharded_C[allowed_C]).any()),
    )


def _evaluated(
    problem: Problem,
    model: CostModel,
    constraints: Mapping[str, ParameterConstraints],
    solution: Solution,
) -> Optimized:
    placements = to_placements(problem, solution.parts_T, model.tables)
    types = [
        sharding_type(problem.layouts_C[parts.candidate], constraints.get(table.name))
        for parts, table in zip(solution.parts_T, model.tables, strict=True)
    ]
    estimate = evaluate_placements(placements, model)
    return Optimized(
        placements, types, estimate, solution.lower_bound, model.replicas, solution.work, solution.num_boxes
    )
