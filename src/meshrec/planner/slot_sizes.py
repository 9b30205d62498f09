"""Where in the largest phase more fits on a rank: what its *main* piece takes with small ones beside it.

See `slot_program` for these. Between two such sums nothing new fits, so a plan's slowest rank takes the lower
one, or little more: boxes that begin at a sum are easily told from those that end below.
"""

import numpy as np

from meshrec.planner.elements import Elements
from meshrec.planner.problem import Problem
from meshrec.planner.types import Bools, Floats

_MOST_SUMS = 1000
_SAME, _LESS = 1e-6, 3e-6
_PLATEAU = 0.04


def sums_of_sizes(
    problem: Problem, elements: Elements, admitted_C: Bools, phase: int, limit: float
) -> Floats:
    """All that a main piece takes with one or more small ones, up to `limit` of a phase, from least to most:
    a little less, so that limits below it are not the same; none where there are too many to tell apart."""
    groups = np.flatnonzero(admitted_C[problem.candidate_P])
    still_P, candidate_P = elements.still_EK[elements.element_P[groups], phase], problem.candidate_P[groups]
    least_C = np.full(len(admitted_C), np.inf)
    np.minimum.at(least_C, candidate_P, still_P)
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


def after_plateaus(sums: Floats) -> Floats:
    """Those above a wide stretch without any."""
    return sums[1:][sums[1:] > (1 + _PLATEAU) * sums[:-1]]


def _different(values: Floats) -> Floats:
    values = np.sort(values)
    different: Floats = values[np.diff(values, prepend=-1.0) > _SAME]
    return different
