"""Relaxations of the planning problem within a box lower <= T <= upper of the slowest ranks' loads T.

This file's is for many types of tables: T_k is at least the mean load, which is linear in how often each
candidate is chosen. Types of identical tables are one variable per candidate and ranks need no variable at
all, so the program is small whatever the cluster. Candidates with a piece above `upper` are out.
"""

from typing import NamedTuple, Protocol

import numpy as np

from meshrec.planner.highs import INFINITY, LinearProgram, Solver, sparse_matrix
from meshrec.planner.problem import Problem
from meshrec.planner.types import Bools, Floats

_USED = 1e-7
_SOLVE_WORK = 100_000
_SOLVE_WORK_PER_CANDIDATE = 200


class Relaxed(NamedTuple):
    """A relaxation's optimum: no plan in the box costs less than `bound`.

    `share_C`: how many tables use each candidate. `slowest_K`: T. `cut_at_K`: where T has to be told apart,
    below or above, for the relaxation to be more like a plan; equal to T where there is nothing to tell.
    """

    bound: float
    share_C: Floats
    slowest_K: Floats
    cut_at_K: Floats


class Relaxation(Protocol):
    """Solves relaxations of one problem; loads are in units of `scale` seconds."""

    @property
    def work(self) -> int:
        """What one more solution costs; see `Effort`."""
        ...

    def solve(
        self, lower_K: Floats, upper_K: Floats, cutoff: float, cost_K: Floats | None = None
    ) -> Relaxed | None:
        """The optimum over plans with lower <= T <= upper that cost `cutoff` at most; None where there are
        none. `cost_K` replaces the cost: of T alone, by phase."""
        ...


class MeanRelaxation:
    """T is at least the mean load of each phase."""

    def __init__(self, problem: Problem, allowed_C: Bools, scale: float) -> None:
        self._largest_CK = problem.largest_load_CK() / scale
        self._allowed_C = allowed_C
        self._tables_C = np.bincount(problem.type_T)[problem.type_C].astype(np.float64)
        self._num_phases = problem.load_PK.shape[1]
        self._cost = np.concatenate((problem.common_C / scale, np.ones(self._num_phases)))
        self._solver = Solver(_program(problem, scale, self._cost))

    @property
    def work(self) -> int:
        """What one more solution costs."""
        return _SOLVE_WORK + _SOLVE_WORK_PER_CANDIDATE * len(self._tables_C)

    def solve(
        self, lower_K: Floats, upper_K: Floats, cutoff: float, cost_K: Floats | None = None
    ) -> Relaxed | None:
        """See `Relaxation`."""
        admitted_C = (self._largest_CK <= upper_K * (1 + 1e-9)).all(axis=1) & self._allowed_C
        most_C = np.where(admitted_C, self._tables_C, 0.0)
        self._solver.set_bounds(np.concatenate((0 * most_C, lower_K)), np.concatenate((most_C, upper_K)))
        self._solver.set_cost(self._cost if cost_K is None else np.concatenate((0 * most_C, cost_K)))
        optimum = self._solver.solve()
        if optimum is None or (cost_K is None and optimum.objective > cutoff):
            return None
        share_C, slowest_K = np.split(optimum.x, [len(most_C)])
        return Relaxed(optimum.objective, share_C, slowest_K, self._cut_at(share_C, slowest_K))

    def _cut_at(self, share_C: Floats, slowest_K: Floats) -> Floats:
        """The median size of the pieces in use that are larger than T."""
        cut_at_K = slowest_K.copy()
        for phase in range(self._num_phases):
            sizes = np.unique(self._largest_CK[share_C > _USED, phase])
            above = sizes[sizes > slowest_K[phase] + 1e-6]
            if len(above):
                cut_at_K[phase] = above[len(above) // 2]
        return cut_at_K


def _program(problem: Problem, scale: float, cost: Floats) -> LinearProgram:
    """Variables: how many tables use each candidate [C], and T [K]. Rows: each type's tables, mean loads,
    memory."""
    num_candidates, num_phases = len(problem.type_C), problem.load_PK.shape[1]
    tables_Y = np.bincount(problem.type_T).astype(np.float64)
    num_types = len(tables_Y)
    mean_CK = problem.mean_load_CK() / scale
    candidate, phase = np.arange(num_candidates), np.arange(num_phases)
    rows = [
        problem.type_C,
        np.tile(num_types + phase, num_candidates),
        np.full(num_candidates, num_types + num_phases),
        num_types + phase,
    ]
    columns = [candidate, np.repeat(candidate, num_phases), candidate, num_candidates + phase]
    values = [
        np.ones(num_candidates),
        mean_CK.ravel(),
        problem.mean_bytes_C() / problem.memory_cap,
        np.full(num_phases, -1.0),
    ]
    return LinearProgram(
        cost=cost,
        lower=np.zeros(num_candidates + num_phases),
        upper=np.full(num_candidates + num_phases, INFINITY),
        matrix=sparse_matrix(
            np.concatenate(rows),
            np.concatenate(columns),
            np.concatenate(values),
            num_rows=num_types + num_phases + 1,
            num_columns=num_candidates + num_phases,
        ),
        row_lower=np.concatenate((tables_Y, np.full(num_phases + 1, -INFINITY))),
        row_upper=np.concatenate((tables_Y, np.zeros(num_phases), [1.0])),
    )
