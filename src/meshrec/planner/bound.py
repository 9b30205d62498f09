"""A proven lower bound: no plan can be faster.

Let T_k be the slowest rank's load in phase k. For every plan (1) T_k is at least the mean load; (2) T_k is
at least the largest piece of every chosen candidate; (3) a rank that holds a heavy table has little room
for others. (1) is linear; the rest becomes so once T is known to lie in a small box lower <= T <= upper. So
boxes are narrowed to where a plan that beats a goal can be, and branched on, the one with the lowest bound
first; a goal below the best known plan leaves little room, and is quickly proven. Splitting a table's
pieces unevenly keeps its mean load and raises its largest piece, so the bound holds for uneven plans as
well.
"""

import heapq
import itertools
from typing import NamedTuple

import numpy as np

from meshrec.planner.highs import INFINITY
from meshrec.planner.one_size import sets_of_one_size
from meshrec.planner.problem import Problem
from meshrec.planner.relaxation import MeanRelaxation, Relaxed
from meshrec.planner.types import Bools, Floats

_LEAST_CUT = 1e-4
_NARROW, _WIDE, _LEAST_WIDTH = 8e-3, 5e-2, 1e-4
"""The width of boxes that are worth a closer look, of those that are where most were closed by it, and of
those that are not worth a cut."""
_EQUAL = 1 + 1e-6
_SQUEEZED, _FILLED = 1.08, 0.95
"""Of a relaxation's T: the largest pieces of plans to begin with; of these, what ranks hold on average."""


class Box(NamedTuple):
    """A node of the search: limits of T, and the relaxation's solution within them; see `Relaxed`."""

    bound: float
    share_C: Floats
    slowest_K: Floats
    cut_at_K: Floats
    lower_K: Floats
    upper_K: Floats
    admitted_C: Bools
    is_closer: bool = False
    """Whether the bound is that of a closer look (see `MeanRelaxation.solve_closely`)."""


class LowerBound:
    """Best-first search over boxes.

    Args:
        problem: what is planned.
        allowed_C: the candidates that plans may use.
        seconds: a plan's time: it scales the numbers.
        goal: seconds that are to be proven: boxes without anything faster are closed.
        coarse: whether one relaxation is good enough; there is no goal then.
        deadline: of `time.perf_counter`: what is begun before ends soon after it.
    """

    def __init__(
        self,
        problem: Problem,
        allowed_C: Bools,
        seconds: float,
        goal: float | None = None,
        *,
        coarse: bool = False,
        deadline: float = INFINITY,
    ) -> None:
        self._scale = seconds
        self._problem = problem
        self._largest_CK = problem.largest_load_CK() / seconds
        self._allowed_C, self._type_C = allowed_C, problem.type_C
        num_phases = problem.load_PK.shape[1]
        self._relaxation = MeanRelaxation(problem, allowed_C, seconds, root=coarse, deadline=deadline)
        self._count = itertools.count()
        self._heap: list[tuple[float, int, Box]] = []
        self._closed = INFINITY
        self._goal = INFINITY if coarse else (1.0 if goal is None else goal / seconds) * _EQUAL
        self.num_solves = 0
        self.num_closer = self._num_closed = 0
        limit = min(self._goal, INFINITY)
        self._open(0.0, np.zeros(num_phases), np.full(num_phases, limit), allowed_C)

    @property
    def value(self) -> float:
        """Seconds that no plan can beat, so far; the goal where it is proven."""
        best = self._heap[0][0] if self._heap else INFINITY
        least = min(best, self._closed, self._goal)
        return least * self._scale if least < INFINITY else np.inf

    @property
    def is_proven(self) -> bool:
        """Whether no plan is faster than the goal."""
        return not self._heap and self._closed >= self._goal

    @property
    def best_box(self) -> Box | None:
        """The open box with the lowest bound, T in seconds."""
        return self._in_seconds(self._heap[0][2]) if self._heap else None

    @property
    def work(self) -> int:
        """The work so far; see `Effort`."""
        return self._relaxation.work

    def squeezed(self) -> Box | None:
        """A box to begin plans from where pieces are many and of all sizes; None where there is none.

        In no phase but the largest has it pieces much above the best open box's T, and there is as much to do
        as ranks can share out so: then the largest phase takes the least. T in seconds.
        """
        if not self._heap:
            return None
        limit_K = _SQUEEZED * self._heap[0][2].slowest_K
        limit_K[limit_K.argmax()] = INFINITY
        fits_C = self._allowed_C & (self._largest_CK <= limit_K).all(axis=1)
        # Tables of larger pieces only keep them.
        fits_C |= self._allowed_C & ~np.isin(self._type_C, self._type_C[fits_C])
        lower_K = np.where(limit_K < INFINITY, _FILLED * limit_K, 0.0)
        relaxed = self._relaxation.solve(lower_K, np.full(len(lower_K), INFINITY), fits_C, INFINITY)
        self.num_solves += 1
        return None if relaxed is None else self._in_seconds(Box(*relaxed))

    def one_size(self) -> Box | None:
        """A box to begin plans from where a rank holds one or two pieces; None where there is none.

        Its pieces are alike in the largest phase (see `one_size`): of the sizes that may be best. T in
        seconds.
        """
        if not self._heap:
            return None
        slowest_K = self._heap[0][2].slowest_K
        best: Relaxed | None = None
        phase, most = int(slowest_K.argmax()), float(slowest_K.max() * self._scale)
        for some_C in sets_of_one_size(self._problem, self._allowed_C, phase, most):
            cutoff = INFINITY if best is None else best.bound
            everywhere_K = np.full(len(slowest_K), INFINITY)
            relaxed = self._relaxation.solve(0 * slowest_K, everywhere_K, some_C, cutoff)
            self.num_solves += 1
            if relaxed is not None and (best is None or relaxed.bound < best.bound):
                best = relaxed._replace(admitted_C=some_C)
        return None if best is None else self._in_seconds(Box(*best))

    def allowed(self, box: Box) -> Bools:
        """Candidates [C] that a box admits."""
        fits = (self._largest_CK <= box.upper_K / self._scale * (1 + 1e-9)).all(axis=1)
        return np.asarray(fits & self._allowed_C)

    def branch(self, seconds: float = INFINITY) -> bool:
        """Raises the bound of the best open box, or splits it; False when that would not raise the bound, or
        no box can be split. Takes not much longer than `seconds`."""
        while self._heap and self._heap[0][0] < self._closed:
            box = heapq.heappop(self._heap)[2]
            if not box.is_closer and self._is_worth_it(box):
                self._look_closer(box, seconds)
                return True
            cut = self._cut(box)
            if cut is None:
                self._closed = min(self._closed, box.bound)
                continue
            upper_K, lower_K = box.upper_K.copy(), box.lower_K.copy()
            upper_K[cut.phase] = cut.at_most
            lower_K[cut.phase] = cut.at_least
            self._open(box.bound, box.lower_K, upper_K, box.admitted_C)
            self._open(box.bound, lower_K, box.upper_K, box.admitted_C)
            return True
        return False

    def _in_seconds(self, box: Box) -> Box:
        scale = self._scale
        return box._replace(
            bound=box.bound * scale,
            lower_K=box.lower_K * scale,
            upper_K=box.upper_K * scale,
            slowest_K=box.slowest_K * scale,
            cut_at_K=box.cut_at_K * scale,
        )

    def _open(self, bound: float, lower_K: Floats, upper_K: Floats, admitted_C: Bools) -> None:
        # No phase can take what all others leave of the goal.
        upper_K = np.minimum(upper_K, self._goal - lower_K.sum() + lower_K)
        if (lower_K > upper_K).any():
            return
        relaxed = self._relaxation.solve(lower_K, upper_K, admitted_C, self._goal)
        self.num_solves += 1
        if relaxed is not None:
            self._push(Box(*relaxed._replace(bound=max(bound, relaxed.bound))))

    def _is_worth_it(self, box: Box) -> bool:
        width = float((box.upper_K - box.lower_K).max())
        return width < _NARROW or (width < _WIDE and 2 * self._num_closed >= self.num_closer)

    def _look_closer(self, box: Box, seconds: float) -> None:
        relaxed = self._relaxation.solve_closely(_relaxed(box), self._goal, seconds)
        self.num_solves += 1
        self.num_closer += 1
        if relaxed is None or relaxed.bound >= self._goal:
            self._num_closed += 1
        else:
            self._push(Box(*relaxed, is_closer=True))

    def _push(self, box: Box) -> None:
        heapq.heappush(self._heap, (box.bound, next(self._count), box))

    def _cut(self, box: Box) -> "_Cut | None":
        """Where the relaxation asks for it; else in the middle of the widest side."""
        width_K = box.upper_K - box.lower_K
        wanted_K = np.abs(box.cut_at_K - box.slowest_K)
        phase = int(wanted_K.argmax())
        if wanted_K[phase] > _LEAST_CUT:
            return _cut_at(phase, float(box.cut_at_K[phase]))
        phase = int(width_K.argmax())
        if width_K[phase] < _LEAST_WIDTH:
            return None
        return _cut_at(phase, float(box.lower_K[phase] + width_K[phase] / 2))


def _relaxed(box: Box) -> Relaxed:
    return Relaxed(*box[:-1])


class _Cut(NamedTuple):
    """Two alternatives that leave nothing out: T of `phase` is at most the one or at least the other."""

    phase: int
    at_most: float
    at_least: float


def _cut_at(phase: int, value: float) -> _Cut:
    return _Cut(phase, value * (1 - 1e-7), value)
