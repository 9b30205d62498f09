"""The solver: a first plan in a moment, then a better bound and better plans until the work is done.

Anytime and deterministic: effort is counted in work, so the result depends on the input and on `max_work`
alone, unless the clock runs out first.
"""

from typing import NamedTuple

import numpy as np

from meshrec.planner.bound import LowerBound
from meshrec.planner.problem import Problem
from meshrec.planner.search import Effort, Search
from meshrec.planner.state import Parts
from meshrec.planner.types import Bools

_BOUND_SHARE = 0.25
_LEAST_SECONDS = 1e-12
_LEAST_BRANCHES = 30
_MOST_STARTS = 8
_LP_WORK = 100_000
_LP_WORK_PER_CANDIDATE = 200


class Solution(NamedTuple):
    """The best plan found (no parts: none), and what no plan can beat; both without latencies."""

    parts_T: list[Parts]
    seconds: float
    lower_bound: float
    work: int
    num_boxes: int


def solve(
    problem: Problem,
    allowed_C: Bools,
    effort: Effort,
    fixed_seconds: float,
    *,
    cutoff: float = np.inf,
) -> Solution:
    """The best plan that uses `allowed_C`. Where none was found that fits into memory, it has no parts;
    where it is proven that there is none, the bound is infinite.

    `fixed_seconds`: latencies, which count in the gap. `cutoff`: seconds of a plan that is known already: the
    search ends once it is proven that there is none faster.
    """
    search = Search(problem, allowed_C, effort)
    scale = float(problem.mean_load_CK().sum() + problem.common_C.max(initial=0.0)) or 1.0
    root = LowerBound(problem, allowed_C, scale)
    box = root.best_box
    if box is None:
        return Solution([], np.inf, np.inf, 0, root.num_solves)
    search.construct_from(box, allowed_C)
    if not search.parts_T:
        return Solution([], np.inf, box.bound, search.work, root.num_solves)
    bound = LowerBound(problem, allowed_C, max(min(search.seconds, cutoff), _LEAST_SECONDS))

    def is_proven() -> bool:
        known = min(search.seconds, cutoff)
        return known - bound.value <= effort.gap * (known + fixed_seconds)

    work_per_branch = 2 * (_LP_WORK + _LP_WORK_PER_CANDIDATE * len(problem.type_C))
    for _ in range(_LEAST_BRANCHES + int(_BOUND_SHARE * effort.max_work / work_per_branch)):
        if is_proven() or not bound.branch():
            break
        search.work += work_per_branch
    for _ in range(_MOST_STARTS):
        box = bound.best_box
        if box is None or is_proven() or search.is_spent:
            break
        search.start_from(box, bound.allowed(box))
        bound.set_aside()
    while not (is_proven() or search.is_spent):
        search.disturb()
    value = min(bound.value, search.seconds)
    return Solution(search.parts_T, search.seconds, value, search.work, bound.num_solves)
