"""A first plan: the relaxation's choice of candidates, rounded, and the largest pieces placed first."""

import numpy as np

from meshrec.planner.local_search import exchange, reinsert
from meshrec.planner.problem import Problem, Scope
from meshrec.planner.state import State
from meshrec.planner.types import Bools, Floats, Ints

_BALANCE_EXPONENT = 64
_LIMITS = (np.inf, 2.0, 1.0, 0.5)
"""Parts of a rank's mean load in some phase."""


def candidates_by_type(problem: Problem, allowed_C: Bools) -> list[Ints]:
    """The allowed candidates of each type; all of them where none is allowed."""
    found = []
    for candidates in _of_each_type(problem):
        some = candidates[allowed_C[candidates]]
        found.append(some if len(some) else candidates)
    return found


def _of_each_type(problem: Problem) -> list[Ints]:
    candidates = np.arange(len(problem.type_C))
    return np.split(candidates, np.searchsorted(problem.type_C, np.arange(1, int(problem.type_C.max()) + 1)))


def round_choice(problem: Problem, share_C: Floats) -> Ints:
    """A candidate for each table: as many tables of a type per candidate as the relaxation has, largest
    rests up."""
    choice_T = np.zeros(len(problem.type_T), np.int64)
    for kind, candidates in enumerate(_of_each_type(problem)):
        tables = np.flatnonzero(problem.type_T == kind)
        counts = np.floor(share_C[candidates] + 1e-6).astype(int)
        rest = share_C[candidates] - counts
        for index in np.argsort(-rest, kind="stable")[: max(len(tables) - counts.sum(), 0)]:
            counts[index] += 1
        # A relaxation that could not be solved has no shares.
        counts[int(np.argmax(share_C[candidates]))] += max(len(tables) - counts.sum(), 0)
        choice_T[tables] = np.repeat(candidates, counts)[: len(tables)]
    return choice_T


def table_order(problem: Problem, choice_T: Ints) -> Ints:
    """Tables by the size of their largest piece, largest first."""
    size_C = problem.largest_load_CK().sum(axis=1)
    return np.argsort(-size_C[choice_T], kind="stable")


def construct(problem: Problem, share_C: Floats, candidates_Y: list[Ints]) -> State | None:
    """Places every table by the relaxation's `share_C`; None where the memory does not suffice.

    The relaxation sees the mean over ranks and does not mind a table that is heavy for one rank. So this is
    tried with several limits beyond which tables are spread over a node, and the fastest plan is taken.
    """
    target_K = share_C @ problem.mean_load_CK()
    choice_T = round_choice(problem, share_C)
    spread_Y = _in_one_node(problem, candidates_Y)
    weight_C = (problem.largest_load_CK() / np.maximum(target_K, 1e-30)).max(axis=1)
    best, tried = None, set()
    for limit in _LIMITS:
        spread_T = spread_Y[problem.type_T]
        heavy_T = (spread_T >= 0) & (weight_C[choice_T] > limit) & (weight_C[spread_T] < weight_C[choice_T])
        new_T = np.where(heavy_T, spread_T, choice_T)
        if new_T.tobytes() in tried:
            continue
        tried.add(new_T.tobytes())
        state = _placed(problem, new_T, target_K, candidates_Y)
        if state is not None and (best is None or state.seconds < best.seconds):
            best = state
    return best


def _in_one_node(problem: Problem, candidates_Y: list[Ints]) -> Ints:
    """Each type's candidate that splits rows over the ranks of a node, or -1."""
    found = np.full(len(candidates_Y), -1)
    for kind, candidates in enumerate(candidates_Y):
        for candidate in candidates:
            scope, widths, row_parts = problem.layouts_C[candidate]
            if scope is Scope.NODES and row_parts == len(widths) == 1:
                found[kind] = candidate
    return found


def _placed(problem: Problem, choice_T: Ints, target_K: Floats, candidates_Y: list[Ints]) -> State | None:
    state = State(problem, 1 / np.maximum(target_K, 1e-3 * problem.load_PK.max(axis=0, initial=0) + 1e-30))
    for table in table_order(problem, choice_T):
        reinsert(state, int(table), choice_T[table : table + 1])
        if state.parts_T[table] is None:
            reinsert(state, int(table), candidates_Y[problem.type_T[table]])
        if state.parts_T[table] is None:
            reinsert(state, int(table), np.flatnonzero(problem.type_C == problem.type_T[table]))
        if state.parts_T[table] is None:
            return None
    return state


def fitting_plan(problem: Problem, allowed_C: Bools | None = None) -> State | None:
    """A plan that spreads memory, whatever its speed (the state's loads are bytes); None where none was
    found."""
    in_bytes = problem._replace(
        common_C=problem.common_bytes_C,
        load_PK=problem.bytes_P[:, None],
        fixed_PK=problem.fixed_bytes_P[:, None],
    )
    allowed_C = np.ones(len(problem.type_C), bool) if allowed_C is None else allowed_C
    candidates_Y = candidates_by_type(problem, allowed_C)
    state = State(in_bytes, np.array([1 / max(float(problem.memory_cap), 1.0)]))
    size_C = in_bytes.mean_bytes_C()
    for table in np.argsort([-size_C[candidates_Y[kind]].min() for kind in problem.type_T], kind="stable"):
        reinsert(state, int(table), candidates_Y[problem.type_T[table]])
        if state.parts_T[table] is None:
            return None
    state.set_exponent(_BALANCE_EXPONENT)
    exchange(state, 10_000_000)
    return state
