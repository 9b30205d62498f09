"""A proven lower bound: no plan can be faster.

Let T_k be the slowest rank's load in phase k. For every plan (1) T_k is at least the mean load; (2) T_k is at
least the largest piece of every chosen candidate; (3) a rank that holds a heavy table has little room for
others. (1) is linear. The rest becomes linear once T is known to lie in a small box lower <= T <= upper.
Branch and bound therefore splits boxes, the one with the lowest bound first, and drops those that contain no
plan better than the best known one. Splitting a table's pieces unevenly keeps its mean load and raises its
largest piece, so the bound holds for uneven plans as well.
"""

import heapq
import itertools
from typing import NamedTuple

import numpy as np

from meshrec.planner.highs import INFINITY
from meshrec.planner.problem import Problem
from meshrec.planner.relaxation import Box, Relaxation
from meshrec.planner.types import Bools, Floats

_LEAST_CUT = 1e-4
_LEAST_WIDTH = 1e-4
"""Least width of a box that is worth a cut, as a share of the first bound."""
_ROOT_ROUNDS, _ROUNDS = 3, 8
"""Maximum rounds of cuts for the first box, from which plans start, and for boxes that must prove
something.
"""
_PIECES_IN_MEMORY = 4
"""Least number of pieces that must fit on a rank. Larger pieces leave holes that others cannot fill."""
_LEAST_LOAD = 1e-4
"""Share of a step below which a load does not matter."""


class LowerBound:
    """Best-first search over boxes. Loads in boxes are in units of `scale` seconds.

    Args:
        problem: the planning problem.
        allowed_C: the candidates that plans may use.
        deadline: time of `time.perf_counter` after which nothing new begins; work in progress ends soon after
            it.
    """

    def __init__(self, problem: Problem, allowed_C: Bools, deadline: float = INFINITY) -> None:
        self.scale = float(problem.mean_load_CK().sum() + problem.common_C.max(initial=0.0)) or 1.0
        self._problem, self._allowed_C, self._type_C = problem, allowed_C, problem.type_C
        self._largest_CK = problem.largest_load_CK() / self.scale
        self._relaxation = Relaxation(problem, self.scale, deadline)
        self._count = itertools.count()
        self._heap: list[tuple[float, int, Box]] = []
        self._closed = INFINITY
        self.num_solves = 0
        num_phases = problem.load_PK.shape[1]
        nothing_K, everything_K = np.zeros(num_phases), np.full(num_phases, INFINITY)
        if len(np.unique(self._type_C[allowed_C])) == int(self._type_C[-1]) + 1:
            self._open(0.0, nothing_K, everything_K, allowed_C, cutoff=INFINITY, rounds=_ROOT_ROUNDS)
        self._root = self.best_box

    @property
    def value(self) -> float:
        """Seconds that no plan can beat, so far.

        Infinite if there is no plan, or none faster than the best known one.
        """
        least = min(self._heap[0][0] if self._heap else INFINITY, self._closed)
        return least * self.scale if least < INFINITY else np.inf

    @property
    def best_box(self) -> Box | None:
        """The open box with the lowest bound."""
        return self._heap[0][2] if self._heap else None

    @property
    def work(self) -> int:
        """The work so far; see `Effort`."""
        return self._relaxation.work

    def squeezed(self, factor: float, *, leaves_room: bool = False) -> Box | None:
        """Return a box to start plans from; None if there is none.

        The box admits no pieces larger than `factor` times the first box's T in any phase. With
        `leaves_room`, it also admits no pieces that leave no room in memory for others beside them. Tables
        that have only larger candidates use their smallest.
        """
        root = self._root
        if root is None or (factor == np.inf and not leaves_room):
            return root
        excess_C = (self._largest_CK / np.maximum(root.slowest_K, _LEAST_LOAD)).max(axis=1) / factor
        if leaves_room:
            piece_C = self._problem.piece_bytes_C() / self._problem.memory_cap
            excess_C = np.maximum(excess_C, piece_C * _PIECES_IN_MEMORY)
        excess_C[~self._allowed_C] = np.inf
        least_Y = np.full(int(self._type_C[-1]) + 1, np.inf)
        np.minimum.at(least_Y, self._type_C, excess_C)
        fits_C = self._allowed_C & (excess_C <= np.maximum(least_Y, 1.0)[self._type_C])
        everything_K = np.full(len(root.slowest_K), INFINITY)
        box = self._solved(0 * root.slowest_K, everything_K, fits_C, INFINITY, _ROOT_ROUNDS)
        return None if box is None or box.bound < 0 else box._replace(admitted_C=fits_C)

    def branch(self, cutoff: float) -> bool:
        """Split the best open box, and keep the parts that may have plans of less than `cutoff` seconds.

        Return False if that would not raise the bound, or if no box can be split.
        """
        most = cutoff / self.scale
        while self._heap and self._heap[0][0] < self._closed:
            box = heapq.heappop(self._heap)[2]
            cut = _cut(box)
            if cut is None:
                self._closed = min(self._closed, box.bound)
                continue
            upper_K, lower_K = box.upper_K.copy(), box.lower_K.copy()
            upper_K[cut.phase] = cut.at_most
            lower_K[cut.phase] = cut.at_least
            self._open(box.bound, box.lower_K, upper_K, box.admitted_C, cutoff=most, rounds=_ROUNDS)
            self._open(box.bound, lower_K, box.upper_K, box.admitted_C, cutoff=most, rounds=_ROUNDS)
            return True
        return False

    def _open(
        self, bound: float, lower_K: Floats, upper_K: Floats, admitted_C: Bools, *, cutoff: float, rounds: int
    ) -> None:
        # No phase can take what all others leave of the cutoff.
        upper_K = np.minimum(upper_K, cutoff - lower_K.sum() + lower_K)
        box = None
        if (lower_K <= upper_K).all():
            box = self._solved(lower_K, upper_K, admitted_C, cutoff, rounds)
        if box is not None:
            box = box._replace(bound=max(bound, box.bound))
            heapq.heappush(self._heap, (box.bound, next(self._count), box))

    def _solved(
        self, lower_K: Floats, upper_K: Floats, admitted_C: Bools, cutoff: float, rounds: int
    ) -> Box | None:
        self.num_solves += 1
        return self._relaxation.solve(lower_K, upper_K, admitted_C, cutoff, rounds)


class _Cut(NamedTuple):
    """Two alternatives that cover everything: T of `phase` is at most the first value, or at least the
    second.
    """

    phase: int
    at_most: float
    at_least: float


def _cut(box: Box) -> _Cut | None:
    """Return where the relaxation asks for a cut, or else the middle of the widest side."""
    width_K = box.upper_K - box.lower_K
    wanted_K = np.abs(box.cut_at_K - box.slowest_K)
    phase = int(wanted_K.argmax())
    value = float(box.cut_at_K[phase])
    if wanted_K[phase] <= _LEAST_CUT:
        phase = int(width_K.argmax())
        value = float(box.lower_K[phase] + width_K[phase] / 2)
        if width_K[phase] < _LEAST_WIDTH:
            return None
    return _Cut(phase, value * (1 - 1e-7), value)
