"""What lies on a rank as one, for relaxations that tell ranks apart.

A whole table lies on one rank. Of a part of a table, something does not shrink with the part (its outputs,
where rows are split; its fewest columns, where columns are); the rest may be cut anywhere.

*Grid*: where little can be cut and few loads differ (the widths of embeddings), a rank's load is one of not
many sums, and so is the slowest rank's.
"""

from typing import NamedTuple

import numpy as np

from meshrec.planner.problem import Problem
from meshrec.planner.types import Bools, Floats, Ints

_MOST_SIZES, _MOST_POINTS = 20, 1000
_MOST_LOAD = 1.5
"""Parts of the scale."""
_NEAR, _SAME = 1e-7, 1e-8
"""What is nearer to a point of the grid is on it; points that are one."""


class Elements(NamedTuple):
    """What lies on a rank as one: a whole table, or of a part of one what does not shrink with it (E of
    them); and what of split tables may be cut anywhere (V of them, each a whole table's).

    Parts that differ only in how many there are of them share an element.
    """

    still_EK: Floats
    type_E: Ints
    element_P: Ints
    count_P: Floats
    """Ranks that get the element when a table uses the candidate."""
    varying_VK: Floats
    element_V: Ints
    """The element that every share of it goes with."""
    varying_P: Ints
    """The index in V, or -1."""
    uses_P: Floats
    """How often what varies is there when a table uses the candidate."""
    in_node_E: Bools
    """Whether the ranks of a node hold the element together, and all of what varies with it."""
    grid_K: list[Floats]
    """All that a rank's load can be, from least to most, in phases where that is little; none in others."""


def find_elements(problem: Problem, allowed_C: Bools, scale: float) -> Elements:
    """The elements of a problem's pieces, loads in units of `scale` seconds; the grid is that of
    `allowed_C`."""
    load_PK = problem.load_PK / scale
    allowed_P = allowed_C[problem.candidate_P]
    still_PK = np.minimum(problem.least_load_PK() / scale, load_PK)
    count_P = (problem.count_P * problem.ranks_per_piece_C()[problem.candidate_P]).astype(np.float64)
    in_node_C = np.array([layout.by_nodes and layout.row_parts == 1 for layout in problem.layouts_C])
    in_node_P = in_node_C[problem.candidate_P]
    uses_P = np.where(in_node_P, problem.count_P, 1.0)
    varying_PK = (count_P / uses_P)[:, None] * (load_PK - still_PK)
    type_P = problem.type_C[problem.candidate_P]
    key_P = np.column_stack((type_P, in_node_P, still_PK.round(12)))
    _, first_E, element_P = np.unique(key_P, axis=0, return_index=True, return_inverse=True)
    element_P = element_P.ravel()
    splits = np.flatnonzero(varying_PK.max(axis=1, initial=0.0) > 1e-12)
    key_S = np.column_stack((element_P[splits], varying_PK[splits].round(12)))
    _, first_V, varying_S = np.unique(key_S, axis=0, return_index=True, return_inverse=True)
    varying_P = np.full(len(type_P), -1)
    varying_P[splits] = varying_S.ravel()
    still_EK, varying_VK = still_PK[first_E], varying_PK[splits[first_V]]
    allowed_E = np.isin(np.arange(len(still_EK)), element_P[allowed_P])
    allowed_V = np.isin(np.arange(len(varying_VK)), varying_P[allowed_P])
    varies_K = np.atleast_1d((varying_VK[allowed_V] > 1e-12).any(axis=0))
    return Elements(
        still_EK=still_EK,
        type_E=type_P[first_E],
        element_P=element_P,
        count_P=count_P,
        varying_VK=varying_VK,
        element_V=element_P[splits[first_V]],
        varying_P=varying_P,
        uses_P=uses_P,
        in_node_E=in_node_P[first_E],
        grid_K=[
            np.zeros(0) if varies else _sums(still_EK[allowed_E, phase])
            for phase, varies in enumerate(varies_K)
        ],
    )


def _sums(load_E: Floats) -> Floats:
    """All sums of some of the loads up to `_MOST_LOAD`, or none where they are more than `_MOST_POINTS`."""
    sums = np.zeros(1)
    sizes = np.unique(load_E[load_E > 1e-12].round(12))
    if len(sizes) > _MOST_SIZES:
        return np.zeros(0)
    for size in sizes:
        if _MOST_LOAD / size * len(sums) > 100 * _MOST_POINTS:
            return np.zeros(0)
        multiples = np.arange(0.0, _MOST_LOAD, size)
        sums = np.unique((sums[:, None] + multiples).ravel())
        sums = sums[np.diff(sums, prepend=-1.0) > _SAME]
        sums = sums[sums <= _MOST_LOAD]
        if len(sums) > _MOST_POINTS:
            return np.zeros(0)
    return sums


def on_grid(elements: Elements, lower_K: Floats, upper_K: Floats) -> tuple[Floats, Floats]:
    """The part of the box lower <= T <= upper with T on the grid."""
    lower_K, upper_K = lower_K.copy(), upper_K.copy()
    for phase, grid in enumerate(elements.grid_K):
        if len(grid) and upper_K[phase] < _MOST_LOAD - _NEAR:
            at_least = int(np.searchsorted(grid, lower_K[phase] - _NEAR))
            at_most = int(np.searchsorted(grid, upper_K[phase] + _NEAR)) - 1
            lower_K[phase] = grid[at_least] - _SAME if at_least < len(grid) else np.inf
            upper_K[phase] = grid[at_most] + _SAME if at_most >= 0 else -np.inf
    return lower_K, upper_K
