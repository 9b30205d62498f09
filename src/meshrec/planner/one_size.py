"""Candidates whose pieces are of one size, to begin plans with where a rank holds one or two pieces.

What does not fit beside a piece of another size is lost on every rank that holds one. A search that moves one
piece at a time hardly gets from a plan of several sizes to one where all are alike, and all ranks are full.
"""

from collections.abc import Iterator

import numpy as np

from meshrec.planner.problem import Problem
from meshrec.planner.types import Bools

_ALIKE = 1.05
_NEXT_TO_NOTHING = 0.02
"""Of a size."""


def sets_of_one_size(problem: Problem, allowed_C: Bools, phase: int) -> Iterator[Bools]:
    """Sets of candidates [C] whose largest pieces in a phase are alike, or take next to nothing of it: those
    that all types have something of."""
    largest_C = problem.largest_load_CK()[:, phase]
    num_types = int(problem.type_C[-1]) + 1
    previous_C = np.zeros(len(largest_C), bool)
    for size in np.unique(largest_C[allowed_C & (largest_C > 0)]):
        alike_C = (largest_C >= size) & (largest_C <= _ALIKE * size)
        some_C = allowed_C & (alike_C | (largest_C <= _NEXT_TO_NOTHING * size))
        if (some_C & ~previous_C).any() and len(np.unique(problem.type_C[some_C])) == num_types:
            yield some_C
        previous_C = some_C
