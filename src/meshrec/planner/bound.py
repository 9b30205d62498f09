"""A proven lower bound: no plan can be faster.

Let T_k be the slowest rank's load in phase k. For every plan (1) T_k is at least the mean load; (2) T_k is
at least the largest piece of every chosen candidate; (3) a rank that holds a heavy table has little room
for others. (1) is linear; the rest becomes so once T is known to lie in a small box lower <= T <= upper. So
boxes are branched on, the one with the lowest bound first. Splitting a table's pieces unevenly keeps its
mean load and raises its largest piece, so the bound holds for uneven plans as well.
"""

import heapq
import itertools
from typing import NamedTuple

import numpy as np

from meshrec.planner.highs import INFINITY
from meshrec.planner.problem import Problem
from meshrec.planner.rank_classes import ClassRelaxation
from meshrec.planner.relaxation import MeanRelaxation, Relaxation
from meshrec.planner.types import Bools, Floats

_LEAST_CUT = 1e-4
_LEAST_WIDTH = 2e-3
_CUTOFF = 1 + 1e-6


class Box(NamedTuple):
    """A node of the search: limits of T, and the relaxation's solution within them."""

    bound: float
    lower_K: Floats
    upper_K: Floats
    share_C: Floats
    slowest_K: Floats
    cut_at_K: Floats


class LowerBound:
    """Best-first search over boxes.

    Args:
        problem: what is planned.
        allowed_C: the candidates that plans may use.
        seconds: a plan's time: boxes that are not better are closed, and it scales the numbers.
        coarse: whether the mean over ranks is good enough.
    """

    def __init__(self, problem: Problem, allowed_C: Bools, seconds: float, *, coarse: bool = False) -> None:
        self._scale = seconds
        self._largest_CK = problem.largest_load_CK() / seconds
        self._allowed_C = allowed_C
        self._unit_K = np.zeros(problem.load_PK.shape[1])
        self._relaxation: Relaxation = MeanRelaxation(problem, allowed_C, seconds)
        if not coarse and ClassRelaxation.serves(problem, allowed_C):
            relaxation = ClassRelaxation(problem, allowed_C, seconds)
            self._relaxation, self._unit_K = relaxation, relaxation.unit_K
        self._count = itertools.count()
        self._heap: list[tuple[float, int, Box]] = []
        self._closed = INFINITY
        self._cutoff = INFINITY if coarse else _CUTOFF
        self.num_solves = 0
        self.num_phases = problem.load_PK.shape[1]
        lower_K, upper_K = np.zeros(self.num_phases), np.full(self.num_phases, INFINITY)
        if not coarse:
            lower_K, upper_K = self._limits(lower_K, np.ones(self.num_phases))
        self._open(0.0, lower_K, upper_K)

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

    @property
    def work(self) -> int:
        """What `branch` costs; see `Effort`."""
        return 2 * self._relaxation.work

    def boxes(self, most: int) -> list[Box]:
        """The open boxes with the lowest bounds, T in seconds."""
        return [self._in_seconds(box) for _, _, box in heapq.nsmallest(most, self._heap)]

    def allowed(self, box: Box) -> Bools:
        """Candidates [C] that a box admits."""
        fits = (self._largest_CK <= box.upper_K / self._scale * (1 + 1e-9)).all(axis=1)
        return np.asarray(fits & self._allowed_C)

    def improve(self, seconds: float) -> None:
        """Tells of a faster plan: from now on, boxes that are not better than it are closed."""
        self._cutoff = min(self._cutoff, seconds / self._scale * _CUTOFF)

    def branch(self) -> bool:
        """Splits the best open box; False when that would not raise the bound, or no box can be split."""
        while self._heap and self._heap[0][0] < self._closed:
            box = self._heap[0][2]
            cut = self._cut(box)
            if cut is None:
                self.set_aside()
                continue
            heapq.heappop(self._heap)
            upper_K, lower_K = box.upper_K.copy(), box.lower_K.copy()
            upper_K[cut.phase] = cut.at_most
            lower_K[cut.phase] = cut.at_least
            self._open(box.bound, box.lower_K, upper_K)
            self._open(box.bound, lower_K, box.upper_K)
            return True
        return False

    def set_aside(self) -> None:
        """Ends the work on the best box; its bound stays."""
        if self._heap:
            self._closed = min(self._closed, heapq.heappop(self._heap)[0])

    def _limits(self, lower_K: Floats, upper_K: Floats) -> tuple[Floats, Floats]:
        """The least and the largest T_k of plans that are good enough, phase by phase."""
        for phase in range(self.num_phases):
            cost_K = np.zeros(self.num_phases)
            cost_K[phase] = 1.0
            least = self._relaxation.solve(lower_K, upper_K, self._cutoff, cost_K)
            self.num_solves += 1
            if least is not None:
                lower_K[phase] = max(lower_K[phase], (least.bound - 1e-7) * (1 - 1e-7))
        return lower_K, upper_K

    def _in_seconds(self, box: Box) -> Box:
        scale = self._scale
        return box._replace(
            bound=box.bound * scale,
            lower_K=box.lower_K * scale,
            upper_K=box.upper_K * scale,
            slowest_K=box.slowest_K * scale,
            cut_at_K=box.cut_at_K * scale,
        )

    def _open(self, bound: float, lower_K: Floats, upper_K: Floats) -> None:
        # No phase can take what all others leave of the cutoff.
        upper_K = np.minimum(upper_K, self._cutoff - lower_K.sum() + lower_K)
        if (lower_K > upper_K).any():
            return
        relaxed = self._relaxation.solve(lower_K, upper_K, self._cutoff)
        self.num_solves += 1
        if relaxed is None:
            return
        box = Box(max(bound, relaxed.bound), lower_K, upper_K, *relaxed[1:])
        heapq.heappush(self._heap, (box.bound, next(self._count), box))

    def _cut(self, box: Box) -> "_Cut | None":
        """Where the relaxation asks for it; else in the middle of the widest side."""
        wanted_K = box.cut_at_K - box.slowest_K
        phase = int(wanted_K.argmax())
        if wanted_K[phase] > _LEAST_CUT:
            return self._cut_at(box, phase, float(box.cut_at_K[phase]))
        width_K = np.minimum(box.upper_K, self._cutoff) - box.lower_K
        phase = int(width_K.argmax())
        if width_K[phase] < _LEAST_WIDTH:
            return None
        return self._cut_at(box, phase, float(box.lower_K[phase] + width_K[phase] / 2))

    def _cut_at(self, box: Box, phase: int, value: float) -> "_Cut":
        return _Cut(phase, value * (1 - 1e-7), value)


class _Cut(NamedTuple):
    """Two alternatives that leave nothing out: T of `phase` is at most the one or at least the other."""

    phase: int
    at_most: float
    at_least: float
