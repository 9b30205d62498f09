"""Which candidates a relaxation can do without, once T is known to be above some limits.

A candidate that adds as much as another one of its type to every mean load, to what all ranks pay and to
memory, and has pieces as large *above the lower limits of T*, is *dominated*: whatever rows on means and
largest pieces hold with it hold with the other one in its place. Where T is above `floor`, pieces below that
are all alike, so that few ways to split a table are left of many.
"""

import numpy as np

from meshrec.planner.problem import Problem
from meshrec.planner.types import Bools, Floats, Ints


def representatives(problem: Problem, floor_K: Floats, admitted_C: Bools) -> Ints:
    """The candidate [C] that stands for each of those that are admitted, itself where none dominates it (the
    others: -1); `floor_K` in seconds."""
    above_CK = np.maximum(problem.largest_load_CK() - floor_K, 0.0)
    price_CN = np.column_stack(
        (problem.mean_load_CK(), above_CK, problem.common_C, problem.mean_bytes_C() / problem.memory_cap)
    )
    stands_C = np.full(len(problem.type_C), -1, np.int64)
    some = np.flatnonzero(admitted_C)
    # Who dominates costs less, or as much, in all.
    some = some[np.lexsort((price_CN[some].sum(axis=1), problem.type_C[some]))]
    for mine in np.split(some, np.flatnonzero(np.diff(problem.type_C[some])) + 1):
        price_MN = price_CN[mine]
        is_better = np.triu((price_MN[:, None] <= price_MN).all(axis=2))
        stands_C[mine] = mine[is_better.argmax(axis=0)]
    return stands_C


def restricted(problem: Problem, keep_C: Bools) -> Problem:
    """The problem of the candidates `keep_C` alone."""
    keep_P = keep_C[problem.candidate_P]
    place_C = np.cumsum(keep_C) - 1
    candidate_P = place_C[problem.candidate_P[keep_P]]
    by_candidate = {
        name: getattr(problem, name)[keep_C]
        for name in ("type_C", "common_C", "common_bytes_C", "sharded_C", "row_stats_C")
    }
    by_piece = {
        name: getattr(problem, name)[keep_P]
        for name in (
            *("count_P", "load_PK", "fixed_PK", "bytes_P", "fixed_bytes_P"),
            *("width_P", "rows_P"),
        )
    }
    return problem._replace(
        layouts_C=[layout for layout, keeps in zip(problem.layouts_C, keep_C, strict=True) if keeps],
        piece_start_C=np.searchsorted(candidate_P, np.arange(int(keep_C.sum()) + 1)),
        candidate_P=candidate_P,
        **by_candidate,
        **by_piece,
    )
