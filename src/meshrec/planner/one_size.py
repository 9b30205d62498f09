"""Candidates whose pieces are alike, to begin plans with where a rank holds one or two pieces.

What does not fit beside a piece of another size is lost on every rank that holds one. A search that moves one
piece at a time hardly gets from a plan of several sizes to one where all are alike, and all ranks are full:
with one piece on a rank, or with one and another that is a node's.
"""

import itertools
from collections.abc import Iterator

import numpy as np

from meshrec.planner.problem import Problem
from meshrec.planner.types import Bools, Floats

_ALIKE = 1.05
_NEXT_TO_NOTHING = 0.02


def sets_of_one_size(problem: Problem, allowed_C: Bools, phase: int, most: float) -> Iterator[Bools]:
    """Sets of candidates [C] whose largest pieces in a phase take `most` seconds at most, and are alike if
    they go to ranks, and alike if they go to nodes, or take next to nothing of it: those that all types have
    something of."""
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
