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
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from meshrec.planner.highs import INFINITY
from meshrec.planner.problem import Problem
from meshrec.planner.relaxation import MeanRelaxation
from meshrec.planner.types import Bools, Floats

_LEAST_CUT = 1e-4
_LEAST_WIDTH = 1e-4
"""Of boxes that are worth a cut."""
_EQUAL = 1 + 1e-6
_PIECES_IN_MEMORY = 4
"""As many at least have room on a rank: larger ones leave holes that others do not fill."""
_LEAST_LOAD = 1e-4
"""Of a step: what takes less is no matter."""


class Box(NamedTuple):
    """A node of the search: limits of T, and the relaxation's solution within them; see `Relaxed`."""

    bound: float
    share_C: Floats
    slowest_K: Floats
    cut_at_K: Floats
    lower_K: Floats
    upper_K: Floats
    admitted_C: Bools


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

    def squeezed(self, factor: float, *, leaves_room: bool = False) -> Box | None:
        """A box to begin plans from; None where there is none.

        It has no pieces of more than `factor` times the best open box's T in any phase, and perhaps none that
        leave no room in memory for others beside them, but of tables that have no such candidates: these take
        their smallest. T in seconds.
        """
        if not self._heap:
            return None
        root = self._heap[0][2]
        if factor == np.inf and not leaves_room:
            return self._in_seconds(root._replace(admitted_C=self._allowed_C))
        excess_C = (self._largest_CK / np.maximum(root.slowest_K, _LEAST_LOAD)).max(axis=1)
        excess_C /= factor
        if leaves_room:
            piece_C = self._problem.piece_bytes_C() / self._problem.memory_cap
            excess_C = np.maximum(excess_C, piece_C * _PIECES_IN_MEMORY)
        excess_C[~self._allowed_C] = np.inf
        least_Y = np.full(int(self._type_C[-1]) + 1, np.inf)
        np.minimum.at(least_Y, self._type_C, excess_C)
        fits_C = self._allowed_C & (excess_C <= np.maximum(least_Y, 1.0)[self._type_C])
        everywhere_K = np.full(len(root.slowest_K), INFINITY)
        relaxed = self._relaxation.solve(0 * root.slowest_K, everywhere_K, fits_C, INFINITY)
        self.num_solves += 1
        if relaxed is None or relaxed.bound < 0:
            return None
        return self._in_seconds(Box(*relaxed._replace(admitted_C=fits_C)))

    def one_size(self) -> Box | None:
        """A box to begin plans from where a rank holds one or two pieces; None where there is none.

        Its pieces are alike in the largest phase (see `one_size`): of the sizes that may be best. T in
        seconds.
        """
        if not self._heap:
            return None
        slowest_K = self._heap[0][2].slowest_K
        best: Box | None = None
        phase, most = int(slowest_K.argmax()), float(slowest_K.max() * self._scale)
        for some_C in sets_of_one_size(self._problem, self._allowed_C, phase, most):
            cutoff = INFINITY if best is None else best.bound
            everywhere_K = np.full(len(slowest_K), INFINITY)
            relaxed = self._relaxation.solve(0 * slowest_K, everywhere_K, some_C, cutoff)
            self.num_solves += 1
            if relaxed is not None and (best is None or relaxed.bound < best.bound):
                best = Box(*relaxed._replace(admitted_C=some_C))
        return None if best is None else self._in_seconds(best)

    def allowed(self, box: Box) -> Bools:
        """Candidates [C] that a box admits."""
        fits = (self._largest_CK <= box.upper_K / self._scale * (1 + 1e-9)).all(axis=1)
        return np.asarray(fits & self._allowed_C)

    def branch(self) -> bool:
        """Splits the best open box; False when that would not raise the bound, or no box can be split."""
        while self._heap and self._heap[0][0] < self._closed:
            box = heapq.heappop(self._heap)[2]
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
            box = Box(*relaxed._replace(bound=max(bound, relaxed.bound)))
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


class _Cut(NamedTuple):
    """Two alternatives that leave nothing out: T of `phase` is at most the one or at least the other."""

    phase: int
    at_most: float
    at_least: float


def _cut_at(phase: int, value: float) -> _Cut:
    return _Cut(phase, value * (1 - 1e-7), value)


_ALIKE = 1.05
_NEXT_TO_NOTHING = 0.02


def sets_of_one_size(problem: Problem, allowed_C: Bools, phase: int, most: float) -> Iterator[Bools]:
    """Sets of candidates [C] whose largest pieces in a phase take `most` seconds at most, and are alike if
    they go to ranks, and alike if they go to nodes, or take next to nothing of it: those that all types have
    something of.

    What does not fit beside a piece of another size is lost on every rank that holds one. A search that moves
    one piece at a time hardly gets from a plan of several sizes to one where all are alike, and all ranks are
    full: with one piece on a rank, or with one and another that is a node's.
    """
    largest_C = problem.largest_load_CK()[:, phase]
    small_C = allowed_C & (largest_C <= _NEXT_TO_NOTHING * most)
    large_C = allowed_C & ~small_C & (largest_C <= most)
    by_node_C = problem.ranks_per_piece_C() > 1
    on_ranks, on_nodes = (_alike(largest_C, large_C & where_C) for where_C in (~by_node_C, by_node_C))
    for alike, other in itertools.product(on_ranks, on_nodes):
        some_C = small_C | alike | other
        if len(np.unique(problem.type_C[some_C])) == int(problem.type_C[-1]) + 1:
            yield some_C


def _alike(largest_C: Floats, some_C: Bools) -> list[Bools]:
    """The parts of some candidates that are alike; an empty one where there are none."""
    found: list[Bools] = []
    for size in np.unique(largest_C[some_C]):
        alike_C = some_C & (largest_C >= size) & (largest_C <= _ALIKE * size)
        if not found or (alike_C & ~found[-1]).any():
            found.append(alike_C)
    return found or [np.zeros(len(largest_C), bool)]
