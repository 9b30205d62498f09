"""A proven lower bound: no plan can be faster.

Let T_k be the slowest rank's load in phase k. For every plan (1) T_k is at least the mean load, which is
linear in how often each candidate is chosen; (2) T_k is at least the largest piece of every chosen
candidate. Types of identical tables are one variable per candidate, ranks need no variable at all, so the
relaxation is small whatever the cluster.

(2) is a disjunction, so it is branched on: a node of the search is a box lower <= T <= upper, where
candidates with a piece above `upper` are out. Splitting a table's pieces unevenly keeps its mean load and
raises its largest piece, so the bound holds for uneven plans as well.
"""

import heapq
import itertools
from typing import NamedTuple

import numpy as np

from meshrec.planner.highs import INFINITY, LinearProgram, Solver, sparse_matrix
from meshrec.planner.problem import Problem
from meshrec.planner.types import Bools, Floats

_FEASIBILITY = 1e-7


class Box(NamedTuple):
    """A node of the search: limits of T, and the relaxation's solution within them."""

    bound: float
    lower_K: Floats
    upper_K: Floats
    share_C: Floats
    slowest_K: Floats


class LowerBound:
    """Best-first search over boxes.

    Args:
        problem: what is planned.
        allowed_C: the candidates that plans may use.
        seconds: a plan's time: boxes that are not better are closed, and it scales the numbers.
    """

    def __init__(self, problem: Problem, allowed_C: Bools, seconds: float) -> None:
        self._scale = seconds
        self._largest_CK = problem.largest_load_CK() / seconds
        self._allowed_C = allowed_C
        self._tables_C = np.bincount(problem.type_T)[problem.type_C].astype(np.float64)
        self._solver = Solver(_relaxation(problem, seconds))
        self._count = itertools.count()
        self._heap: list[tuple[float, int, Box]] = []
        self._closed = INFINITY
        self.num_solves = 0
        self.num_phases = problem.load_PK.shape[1]
        zero_K = np.zeros(self.num_phases)
        self._open(0.0, zero_K, np.full(self.num_phases, INFINITY))

    @property
    def value(self) -> float:
        """Seconds that no plan can beat, so far."""
        best = self._heap[0][0] if self._heap else INFINITY
        return min(best, self._closed) * self._scale

    @property
    def best_box(self) -> Box | None:
        """The open box with the lowest bound, T in seconds."""
        return self._in_seconds(self._heap[0][2]) if self._heap else None

    def allowed(self, box: Box) -> Bools:
        """Candidates [C] that a box admits."""
        return self._admitted(box.upper_K / self._scale)

    def branch(self) -> bool:
        """Splits the best open box; False when there is none, or it cannot be split."""
        if not self._heap:
            return False
        box = self._heap[0][2]
        cut = self._cut(box)
        if cut is None:
            return False
        heapq.heappop(self._heap)
        phase, value = cut
        upper_K, lower_K = box.upper_K.copy(), box.lower_K.copy()
        upper_K[phase] = value * (1 - 1e-7)
        lower_K[phase] = value
        self._open(box.bound, box.lower_K, upper_K)
        self._open(box.bound, lower_K, box.upper_K)
        return True

    def close_best(self) -> Box | None:
        """Takes the best box out of the search (its bound stays); it cannot be split further."""
        if not self._heap:
            return None
        box = heapq.heappop(self._heap)[2]
        self._closed = min(self._closed, box.bound)
        return self._in_seconds(box)

    def _in_seconds(self, box: Box) -> Box:
        scale = self._scale
        return Box(
            box.bound * scale, box.lower_K * scale, box.upper_K * scale, box.share_C, box.slowest_K * scale
        )

    def _admitted(self, upper_K: Floats) -> Bools:
        fits: Bools = (self._largest_CK <= upper_K * (1 + 1e-9)).all(axis=1) & self._allowed_C
        return fits

    def _open(self, bound: float, lower_K: Floats, upper_K: Floats) -> None:
        if (lower_K > upper_K).any():
            return
        most_C = np.where(self._admitted(upper_K), self._tables_C, 0.0)
        self._solver.set_bounds(np.concatenate((0 * most_C, lower_K)), np.concatenate((most_C, upper_K)))
        optimum = self._solver.solve()
        self.num_solves += 1
        if optimum is None:
            return
        share_C, slowest_K = np.split(optimum.x, [len(most_C)])
        box = Box(max(bound, optimum.objective), lower_K, upper_K, share_C, slowest_K)
        heapq.heappush(self._heap, (box.bound, next(self._count), box))

    def _cut(self, box: Box) -> tuple[int, float] | None:
        """The phase and the size of piece to branch on: the candidate in use that breaks (2) most."""
        used_C = box.share_C > _FEASIBILITY
        excess_CK = np.where(used_C[:, None], self._largest_CK - box.slowest_K, 0.0)
        phase = int(excess_CK.max(axis=0).argmax())
        values = np.unique(self._largest_CK[excess_CK[:, phase] > 1e-6, phase])
        if not len(values):
            return None
        return phase, float(values[len(values) // 2])


def _relaxation(problem: Problem, scale: float) -> LinearProgram:
    """Variables: how many tables use each candidate [C], and T [K]. Rows: each type's tables, (1), and
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
        cost=np.concatenate((problem.common_C / scale, np.ones(num_phases))),
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
