"""Where in the largest phase more fits on a rank: what its *main* piece takes with small ones beside it.

See `slot_program` for these. Between two such sums nothing new fits, so a plan's slowest rank takes the lower
one, or little more: boxes that begin at a sum are easily told from those that end below.
"""

import numpy as np

from meshrec.planner.elements import Elements
from meshrec.planner.problem import Problem
from meshrec.planner.types import Bools, Floats, Ints

_MOST_SUMS = 1000
_SAME, _LESS = 1e-6, 3e-6
_PLATEAU = 0.04


def sums_of_sizes(
    problem: Problem, elements: Elements, admitted_C: Bools, phase: int, limit: float
) -> Floats:
    """All that a main piece takes with one or more small ones, up to `limit` of a phase, from least to most:
    a little less, so that limits below it are not the same; none where there are too many to tell apart."""
    least_C, still_P, candidate_P = _least(problem, elements, admitted_C, phase)
    main = _different(least_C[(2 * least_C > limit) & (least_C <= limit)])
    small = _different(still_P[2 * least_C[candidate_P] <= limit])
    small = small[small > _SAME]
    if not len(main) or not len(small):
        return np.zeros(0)
    beside = np.zeros(1)
    for size in small:
        number = int((limit - main[0]) / size) + 1
        if number * len(beside) > _MOST_SUMS:
            return np.zeros(0)
        beside = _different((beside[:, None] + size * np.arange(number)).ravel())
    sums = _different((main[:, None] + beside[1:]).ravel())
    return sums[sums <= limit] - _LESS


def steps_of_sizes(
    problem: Problem, elements: Elements, admitted_C: Bools, phase: int, limit: float
) -> Floats:
    """Where much more fits, up to `limit` of a phase: those of the sums above a wide stretch without any, and
    where two pieces on ranks fit beside each other that are main ones below."""
    sums = sums_of_sizes(problem, elements, admitted_C, phase, limit)
    steps = sums[1:][sums[1:] > (1 + _PLATEAU) * sums[:-1]]
    least_C, _, _ = _least(problem, elements, admitted_C & (problem.ranks_per_piece_C() == 1), phase)
    twice = 2 * _different(least_C[least_C < limit])
    return np.append(steps, twice[(twice > _SAME) & (twice <= limit)] - _LESS)


def _least(
    problem: Problem, elements: Elements, admitted_C: Bools, phase: int
) -> tuple[Floats, Floats, Ints]:
    """The least still piece of each candidate (infinite: none), and all pieces and their candidates."""
    groups = np.flatnonzero(admitted_C[problem.candidate_P])
    still_P, candidate_P = elements.still_EK[elements.element_P[groups], phase], problem.candidate_P[groups]
    least_C = np.full(len(admitted_C), np.inf)
    np.minimum.at(least_C, candidate_P, still_P)
    return least_C, still_P, candidate_P


def _different(values: Floats) -> Floats:
    values = np.sort(values)
    different: Floats = values[np.diff(values, prepend=-1.0) > _SAME]
    return different
