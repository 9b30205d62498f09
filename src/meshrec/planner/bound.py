"""A proven lower bound: no plan can be faster.

Let T_k be the slowest rank's load in phase k. For every plan (1) T_k is at least the mean load, which is
linear in how often each candidate is chosen; (2) T_k is at least the largest piece of every chosen
candidate. Types of identical tables are one variable per candidate, ranks need no variable at all, so the
relaxation is small whatever the cluster.

(3) T_k is a sum of pieces' loads: where few sums are possible, T_k is one of them.

(2) and (3) are disjunctions, so they are branched on: a node of the search is a box lower <= T <= upper,
where candidates with a piece above `upper` are out. Splitting a table's pieces unevenly keeps its mean load
and raises its largest piece, so the bound holds for uneven plans as well.
"""

import heapq
import itertools
from typing import NamedTuple

import numpy as np

from meshrec.planner.highs import INFINITY, LinearProgram, Solver, sparse_matrix
from meshrec.planner.problem import Problem
from meshrec.planner.types import Bools, Floats

_FEASIBILITY = 1e-7
_LEAST_STEP = 2e-4
_MOST_SIZES = 60
_MOST_SUMS = 4000


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
        self._problem = problem
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
        least = min(best, self._closed)
        return least * self._scale if least < INFINITY else np.inf

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
        upper_K, lower_K = box.upper_K.copy(), box.lower_K.copy()
        upper_K[cut.phase] = cut.at_most
        lower_K[cut.phase] = cut.at_least
        self._open(box.bound, box.lower_K, upper_K)
        self._open(box.bound, lower_K, box.upper_K)
        return True

    def set_aside(self) -> None:
        """Ends the work on the best box; its bound stays."""
        if self._heap:
            self._closed = min(self._closed, heapq.heappop(self._heap)[0])

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

    def _cut(self, box: Box) -> "_Cut | None":
        """The phase and the size of piece to branch on: the candidate in use that breaks (2) most."""
        used_C = box.share_C > _FEASIBILITY
        excess_CK = np.where(used_C[:, None], self._largest_CK - box.slowest_K, 0.0)
        phase = int(excess_CK.max(axis=0).argmax())
        values = np.unique(self._largest_CK[excess_CK[:, phase] > 1e-6, phase])
        if len(values):
            value = float(values[len(values) // 2])
            return _Cut(phase, value * (1 - 1e-7), value)
        admitted_C = self._admitted(box.upper_K)
        cuts = [self._sum_cut(box, admitted_C, phase) for phase in range(self.num_phases)]
        found = [cut for cut in cuts if cut is not None]
        if not found:
            return None
        return max(
            found,
            key=lambda cut: min(
                box.slowest_K[cut.phase] - cut.at_most, cut.at_least - box.slowest_K[cut.phase]
            ),
        )

    def _sum_cut(self, box: Box, admitted_C: Bools, phase: int) -> "_Cut | None":
        """(3): where T_k lies between two loads that a rank can have, it is at most the one or at least
        the other."""
        slowest = float(box.slowest_K[phase])
        sums = _achievable_sums(self._problem, admitted_C, phase, self._scale, 2 * slowest)
        if sums is None:
            return None
        above = int(np.searchsorted(sums, slowest * (1 + 1e-6)))
        if above == 0 or above == len(sums):
            return None
        low, high = sums[above - 1], sums[above]
        if slowest - low < _LEAST_STEP or high - slowest < _LEAST_STEP:
            return None
        return _Cut(phase, float(low) * (1 + 1e-7), float(high) * (1 - 1e-7))


class _Cut(NamedTuple):
    """Two alternatives that leave nothing out: T of `phase` is at most the one or at least the other."""

    phase: int
    at_most: float
    at_least: float


def _achievable_sums(
    problem: Problem, admitted_C: Bools, phase: int, scale: float, most: float
) -> Floats | None:
    """The loads up to `most` that sums of pieces can have, in order; None where they are too many to help."""
    sizes = _piece_sizes(problem, admitted_C, phase)
    if sizes is None or len(sizes) > _MOST_SIZES:
        return None
    sums = np.zeros(1)
    for size in sizes / scale:
        if size <= 0:
            continue
        count = int(most / size) + 1
        sums = (sums[:, None] + size * np.arange(count + 1)).ravel()
        sums = np.sort(sums[sums <= most + size])
        sums = sums[np.concatenate(([True], np.diff(sums) > 1e-9))]
        if len(sums) > _MOST_SUMS:
            return None
    return sums


def _piece_sizes(problem: Problem, admitted_C: Bools, phase: int) -> Floats | None:
    """The loads [S] that pieces of the admitted candidates can have; None where sizes vary freely (by
    rows)."""
    found = []
    for group in np.flatnonzero(admitted_C[problem.candidate_P]):
        candidate = problem.candidate_P[group]
        layout = problem.layouts_C[candidate]
        load, fixed = problem.load_PK[group, phase], problem.fixed_PK[group, phase]
        slope = load - fixed
        if slope <= 1e-9 * load or (
            len(layout.widths) == 1 and layout.row_parts == 1 and not layout.by_nodes
        ):
            found.append(np.array([load]))
        elif layout.row_parts > 1 or layout.by_nodes:
            return None
        else:
            least = problem.min_partition_Y[problem.type_C[candidate]]
            widths = np.arange(least, sum(layout.widths) + 1)
            found.append(fixed + slope * widths / problem.width_P[group])
    return np.unique(np.concatenate(found).round(15)) if found else None


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
