"""Proven lower bound on the step time of every plan, by branch and bound.

Let T_k be the slowest rank's load in phase k. For every plan, (1) T_k is at least the mean load; (2) T_k is
at least the largest piece of every selected candidate; (3) a rank with a heavy table has little room for
others. (1) is linear. (2) and (3) become linear once T is known to lie in a small box, lower <= T <= upper: a
range for T_k for every phase. So branch and bound starts from a root box with every plan, and always
splits the box with the lowest bound. It drops boxes in which no plan is better than the best known plan.
Splitting a table unevenly keeps the mean load and increases the largest piece, so the bound also holds for
uneven plans.
"""

import heapq
import itertools
from typing import NamedTuple

import numpy as np

from meshrec.planner.highs import INFINITY
from meshrec.planner.problem import Problem
from meshrec.planner.relaxation import Box, Relaxation
from meshrec.planner.types import Bools, Floats

# Minimum distance of a requested split from T. If all are closer, the widest side of the box is split.
_LEAST_CUT = 1e-4
# Minimum width of a box that is still split. T is relative to `LowerBound.scale`, so this is a fraction.
_LEAST_WIDTH = 1e-4
# Maximum cutting plane rounds for the root box, from which plans start, and for boxes that must prove a
# bound.
_ROOT_ROUNDS, _ROUNDS = 3, 8
# Minimum piece count that must fit on a rank together. Larger pieces leave gaps which others cannot fill.
_PIECES_IN_MEMORY = 4
# Load below which a phase does not limit the piece size, as a fraction of `LowerBound.scale`.
_LEAST_LOAD = 1e-4


class LowerBound:
    """Best-first branch and bound for a lower bound on the step time.

    T is the slowest rank's load per phase, and a box is a range of T for every phase; see the module
    docstring. The constructor solves the root box, which contains every plan. Every call of `branch` may
    raise the bound.

    Args:
        deadline: ``time.perf_counter`` time after which no cutting planes are added.

    Attributes:
        scale: unit for all loads in boxes, in seconds, chosen so that a step takes about 1.
    """

    def __init__(self, problem: Problem, allowed_C: Bools, deadline: float = INFINITY) -> None:
        self.scale = float(problem.mean_load_CK().sum() + problem.common_cost_C.max(initial=0.0)) or 1.0
        self._problem, self._allowed_C, self._type_C = problem, allowed_C, problem.type_C
        # For `solve_small_pieces`, which excludes large pieces.
        self._largest_CK = problem.largest_load_CK() / self.scale
        # One linear program for all boxes: basis and cuts are kept, so later boxes are solved faster.
        self._relaxation = Relaxation(problem, self.scale, deadline)
        self._count = itertools.count()
        # Open boxes by bound; the counter breaks ties.
        self._heap: list[tuple[float, int, Box]] = []
        # Lowest bound of boxes too small to split.
        self._closed = INFINITY
        num_phases = problem.load_PK.shape[1]
        nothing_K, everything_K = np.zeros(num_phases), np.full(num_phases, INFINITY)
        # If a type has no allowed candidate, no plan exists. Then no box is opened, and the bound is
        # infinite.
        if len(np.unique(self._type_C[allowed_C])) == int(self._type_C[-1]) + 1:
            self._open(0.0, nothing_K, everything_K, allowed_C, cutoff=INFINITY, rounds=_ROOT_ROUNDS)
        # Kept after it has been split, because starting plans are measured by the root's T.
        self._root = self.best_box

    @property
    def value(self) -> float:
        """Current lower bound on the step time, in seconds without latencies.

        Infinite if no plan exists, or if it is proven that none is faster than the best known plan.
        """
        # Dropped boxes have no plan below the cutoff, so they do not count.
        least = min(self._heap[0][0] if self._heap else INFINITY, self._closed)
        return least * self.scale if least < INFINITY else np.inf

    @property
    def best_box(self) -> Box | None:
        """Open box with the lowest bound; None if no box is open. Branching splits this box next."""
        return self._heap[0][2] if self._heap else None

    @property
    def work(self) -> int:
        """Work so far, in touched array elements; see `Effort`."""
        return self._relaxation.work

    def solve_small_pieces(self, factor: float, *, leaves_room: bool = False) -> Box | None:
        """Solve the linear relaxation with small pieces only, as a starting point to construct a plan.

        Args:
            factor: maximum load of a piece in any phase, as a multiple of T in the root box's optimum. If a
                table has only larger candidates, the candidates with the smallest excess are used.
            leaves_room: whether to exclude also pieces that leave too little memory on a rank for others.

        Returns:
            The root box with the new optimum, and a mask of the candidates that were allowed. None if the
            relaxation has no solution.
        """
        root = self._root
        if root is None or (factor == np.inf and not leaves_room):
            return root
        excess_C = (self._largest_CK / np.maximum(root.slowest_K, _LEAST_LOAD)).max(axis=1) / factor
        if leaves_room:
            piece_C = self._problem.piece_bytes_C() / self._problem.memory_cap
            excess_C = np.maximum(excess_C, piece_C * _PIECES_IN_MEMORY)
        # A candidate with excess up to 1 is small enough in every phase.
        excess_C[~self._allowed_C] = np.inf
        least_Y = np.full(int(self._type_C[-1]) + 1, np.inf)
        np.minimum.at(least_Y, self._type_C, excess_C)
        fits_C = self._allowed_C & (excess_C <= np.maximum(least_Y, 1.0)[self._type_C])
        everything_K = np.full(len(root.slowest_K), INFINITY)
        box = self._relaxation.solve(0 * root.slowest_K, everything_K, fits_C, INFINITY, _ROOT_ROUNDS)
        return None if box is None or box.bound < 0 else box._replace(admitted_C=fits_C)

    def branch(self, cutoff: float) -> bool:
        """Split the open box with the lowest bound into two, and solve both.

        Args:
            cutoff: step time in seconds of the best known plan. A half without faster plans is dropped.

        Returns:
            True if a box was split. False if splitting cannot raise the bound, because no box is open or a
            box with the lowest bound is too small to split.
        """
        most = cutoff / self.scale
        while self._heap and self._heap[0][0] < self._closed:
            box = heapq.heappop(self._heap)[2]
            split = _find_split(box)
            if split is None:
                # The box stays as it is, so no branching can prove more than its bound.
                self._closed = min(self._closed, box.bound)
                continue
            upper_K, lower_K = box.upper_K.copy(), box.lower_K.copy()
            upper_K[split.phase] = split.at_most
            lower_K[split.phase] = split.at_least
            self._open(box.bound, box.lower_K, upper_K, box.admitted_C, cutoff=most, rounds=_ROUNDS)
            self._open(box.bound, lower_K, box.upper_K, box.admitted_C, cutoff=most, rounds=_ROUNDS)
            return True
        return False

    def _open(
        self, bound: float, lower_K: Floats, upper_K: Floats, admitted_C: Bools, *, cutoff: float, rounds: int
    ) -> None:
        """Solve the relaxation in a box, and add the box to the heap if it may contain plans within `cutoff`.

        Args:
            bound: bound of the enclosing box, which is also valid for this box.
            lower_K: lower limits on T, the slowest rank's load per phase.
        """
        # A phase can use at most the cutoff minus the lower limits of all other phases.
        upper_K = np.minimum(upper_K, cutoff - lower_K.sum() + lower_K)
        box = None
        if (lower_K <= upper_K).all():
            box = self._relaxation.solve(lower_K, upper_K, admitted_C, cutoff, rounds)
        if box is not None:
            # The cuts which gave the enclosing box its bound may have been removed since.
            box = box._replace(bound=max(bound, box.bound))
            heapq.heappush(self._heap, (box.bound, next(self._count), box))


class _BoxSplit(NamedTuple):
    """Split of a box into a lower and an upper half, by the slowest rank's load in a phase.

    The load is at most ``at_most`` in the lower half, and at least ``at_least`` in the upper half.
    """

    phase: int
    at_most: float
    at_least: float


def _find_split(box: Box) -> _BoxSplit | None:
    """Return the phase and the load at which to split a box; None if the box is too small to split.

    The split with which the relaxation would come closest to a plan (`Box.cut_at_K`) is preferred. Without
    such a split, the box is split in the middle of its widest side.
    """
    width_K = box.upper_K - box.lower_K
    distance_K = np.abs(box.cut_at_K - box.slowest_K)
    phase = int(distance_K.argmax())
    value = float(box.cut_at_K[phase])
    if distance_K[phase] <= _LEAST_CUT:
        phase = int(width_K.argmax())
        value = float(box.lower_K[phase] + width_K[phase] / 2)
        if width_K[phase] < _LEAST_WIDTH:
            return None
    # A piece as large as `value` is then excluded from the lower half, despite rounding.
    return _BoxSplit(phase, value * (1 - 1e-7), value)
