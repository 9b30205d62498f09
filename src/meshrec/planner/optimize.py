"""From tables and a machine to a plan: tries each replica group size and each set of collectives, solves,
evaluates."""

import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from meshrec.distributed.sharding_plan import ShardingType
from meshrec.planner.enumerators import build_problem
from meshrec.planner.estimators import CostModel, Usage
from meshrec.planner.evaluate import StepEstimate, evaluate_placements
from meshrec.planner.placements import sharding_type, to_placements
from meshrec.planner.problem import Problem
from meshrec.planner.search import Effort
from meshrec.planner.solver import Solution, solve
from meshrec.planner.state import Parts
from meshrec.planner.types import Bools, ParameterConstraints, Placements, Table, Topology

DEFAULT_EFFORT = Effort(time_limit=30.0, max_work=5e8, gap=0.005)
_TRIAL_SHARE = 0.12
_MOST_RETRIES = 4


class Optimized(NamedTuple):
    """The best placement found, its cost, and the proven bound in seconds."""

    placements: Placements
    types_T: list[ShardingType]
    estimate: StepEstimate
    lower_bound: float
    replicas: int
    work: int
    num_boxes: int

    @property
    def gap(self) -> float:
        """How far the plan may be from the best one, as a fraction of its time."""
        return max(0.0, 1 - self.lower_bound / self.estimate.seconds) if self.estimate.seconds else 0.0


def optimize(
    tables: Sequence[Table],
    topology: Topology,
    *,
    batch_size: int,
    constraints: Mapping[str, ParameterConstraints] | None = None,
    effort: Effort = DEFAULT_EFFORT,
) -> Optimized | None:
    """The best plan for `tables`; None where no plan was found that fits into memory.

    The lower bound holds for all plans of the enumerated kinds: any sharding type, any number of column
    parts, even or uneven cuts, under the constraints. Raises ValueError for constraints that leave a table
    without a candidate.
    """
    if not tables:
        raise ValueError(
            "there are no tables to plan. Give a model that has some, and sharders for their modules."
        )
    best: Optimized | None = None
    bounds = []
    for replicas in topology.replicate:
        model = CostModel(tables, topology, batch_size=batch_size, replicas=replicas)
        found, bound = _optimize_group(model, constraints or {}, effort, best)
        bounds.append(bound)
        if found is not None and (best is None or found.estimate.seconds < best.estimate.seconds):
            best = found
    if best is None:
        return None
    return best._replace(lower_bound=min(*bounds, best.estimate.seconds))


class _Regime(NamedTuple):
    """A set of collectives, and the candidates that need no other."""

    usage: Usage
    allowed_C: Bools


def _optimize_group(
    model: CostModel,
    constraints: Mapping[str, ParameterConstraints],
    effort: Effort,
    best: Optimized | None,
) -> tuple[Optimized | None, float]:
    problem = build_problem(model, constraints)
    deadline = time.perf_counter() + effort.time_limit
    tried = []
    for regime in sorted(_regimes(problem, model), key=lambda regime: _rough_bound(problem, model, regime)):
        bound = _rough_bound(problem, model, regime)
        solution = None
        if best is None or bound < best.estimate.seconds:
            trial = Effort(
                time_limit=max(0.0, _TRIAL_SHARE * effort.time_limit),
                max_work=_TRIAL_SHARE * effort.max_work,
                gap=effort.gap,
            )
            solution = _solve(problem, model, regime, trial, best)
            bound = max(bound, solution.fixed_seconds + solution.lower_bound)
            if solution.parts_T:
                best = _better(best, problem, model, constraints, solution)
        tried.append(_Trial(regime, solution, bound))
    solved = [trial for trial in tried if trial.solution is not None and trial.solution.parts_T]
    if best is not None and solved:
        winner = min(solved, key=_seconds)
        rest = max(0.0, 1 - _TRIAL_SHARE * len(solved))
        full = Effort(max(0.0, deadline - time.perf_counter()), rest * effort.max_work, effort.gap)
        solution = _solve(problem, model, winner.regime, full, best)
        if solution.parts_T:
            best = _better(best, problem, model, constraints, solution)
        bound = max(winner.bound, solution.fixed_seconds + solution.lower_bound)
        tried = [trial._replace(bound=bound) if trial is winner else trial for trial in tried]
    return best, min(trial.bound for trial in tried)


class _Solved(NamedTuple):
    """A solution with the latencies of its regime, and the work it took."""

    parts_T: list[Parts]
    seconds: float
    lower_bound: float
    fixed_seconds: float
    work: int
    num_boxes: int


class _Trial(NamedTuple):
    regime: "_Regime"
    solution: _Solved | None
    bound: float


def _seconds(trial: _Trial) -> float:
    assert trial.solution is not None
    return trial.solution.seconds + trial.solution.fixed_seconds


def _rough_bound(problem: Problem, model: CostModel, regime: "_Regime") -> float:
    return float(model.fixed_seconds(regime.usage).sum()) + _mean_bound(problem, regime.allowed_C)


def _solve(
    problem: Problem, model: CostModel, regime: "_Regime", effort: Effort, best: Optimized | None
) -> _Solved:
    fixed = float(model.fixed_seconds(regime.usage).sum())
    cutoff = np.inf if best is None else best.estimate.seconds - fixed
    found = solve(problem, regime.allowed_C, effort, fixed, cutoff=cutoff)
    bound, cap = found.lower_bound, problem.memory_cap
    for _ in range(_MOST_RETRIES):
        # The search cuts tables at fractions of rows; whole rows may take a little more memory.
        excess = _excess_bytes(problem, model, found) if found.parts_T else 0.0
        if excess <= 0:
            break
        cap -= 2 * excess
        found = solve(problem._replace(memory_cap=cap), regime.allowed_C, effort, fixed, cutoff=cutoff)
    else:
        found = found._replace(parts_T=[])
    return _Solved(found.parts_T, found.seconds, bound, fixed, found.work, found.num_boxes)


def _excess_bytes(problem: Problem, model: CostModel, solution: Solution) -> float:
    estimate = evaluate_placements(to_placements(problem, solution.parts_T, model.tables), model)
    return 0.0 if estimate.fits else float(estimate.bytes_R.max() - estimate.memory_cap)


def _better(
    best: Optimized | None,
    problem: Problem,
    model: CostModel,
    constraints: Mapping[str, ParameterConstraints],
    solution: _Solved,
) -> Optimized:
    found = _evaluated(problem, model, constraints, solution)
    work = solution.work + (0 if best is None else best.work)
    num_boxes = solution.num_boxes + (0 if best is None else best.num_boxes)
    winner = best if best is not None and best.estimate.seconds <= found.estimate.seconds else found
    return winner._replace(work=work, num_boxes=num_boxes)


def _regimes(problem: Problem, model: CostModel) -> list[_Regime]:
    """From all collectives to few: fewer collectives save their latencies. A plan belongs to each regime
    that allows its candidates, so the lowest bound over regimes is a bound for all plans."""
    kinds = len(np.unique(problem.type_C))
    found: list[_Regime] = []
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
        same = any((regime.allowed_C == allowed_C).all() for regime in found)
        if covers and not same:
            found.append(_Regime(usage, allowed_C))
    # The same candidates with fewer collectives: keep the cheapest name for each set.
    cheapest: dict[bytes, _Regime] = {}
    for regime in found:
        cheapest[regime.allowed_C.tobytes()] = regime
    return [regime._replace(usage=_needed(problem, regime)) for regime in cheapest.values()]


def _needed(problem: Problem, regime: _Regime) -> Usage:
    """The collectives that a regime's candidates can use at all."""
    allowed_C = regime.allowed_C
    return Usage(
        sharded=bool(problem.sharded_C[allowed_C].any()),
        row_stats=bool(problem.row_stats_C[allowed_C].any()),
        data_parallel=bool((~problem.sharded_C[allowed_C]).any()),
    )


def _mean_bound(problem: Problem, allowed_C: Bools) -> float:
    """A quick bound: every table on its own takes the candidate with the least mean load."""
    total_C = np.where(allowed_C, problem.common_C + problem.mean_load_CK().sum(axis=1), np.inf)
    least_Y = np.full(int(problem.type_C.max()) + 1, np.inf)
    np.minimum.at(least_Y, problem.type_C, total_C)
    return float(least_Y[problem.type_T].sum())


def _evaluated(
    problem: Problem,
    model: CostModel,
    constraints: Mapping[str, ParameterConstraints],
    solution: _Solved,
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
