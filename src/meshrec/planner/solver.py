"""The solver: a first plan in a moment, then a better bound and better plans until the work is done.

Anytime and deterministic: effort is counted in work, so the result depends on the input and on `max_work`
alone, unless the clock runs out first.
"""

from typing import NamedTuple

from meshrec.planner.bound import LowerBound
from meshrec.planner.problem import Problem
from meshrec.planner.search import Effort, Search
from meshrec.planner.state import Parts
from meshrec.planner.types import Bools

_BOUND_SHARE = 0.25
_MOST_STARTS = 8
_LP_WORK = 100_000
_LP_WORK_PER_CANDIDATE = 200


class Solution(NamedTuple):
    """The best plan found, and what no plan can beat; both without latencies."""

    parts_T: list[Parts]
    seconds: float
    lower_bound: float
    work: int
    num_boxes: int


def solve(problem: Problem, allowed_C: Bools, effort: Effort, fixed_seconds: float) -> Solution | None:
    """The best plan that uses `allowed_C`; None where no plan was found that fits into memory.

    `fixed_seconds`: latencies, which count in the gap.
    """
    search = Search(problem, allowed_C, effort)
    scale = float(problem.mean_load_CK().sum() + problem.common_C.max(initial=0.0)) or 1.0
    box = LowerBound(problem, allowed_C, scale).best_box
    if box is None:
        return None
    search.start_from(box, allowed_C)
    if not search.parts_T:
        return None
    bound = LowerBound(problem, allowed_C, search.seconds)

    def is_done() -> bool:
        return search.is_spent or search.seconds - bound.value <= effort.gap * (search.seconds + fixed_seconds)

    starts = 0
    bound_work = 0.0
    while not is_done() and starts < _MOST_STARTS:
        while bound.branch() and bound_work < _BOUND_SHARE * effort.max_work:
            bound_work += 2 * (_LP_WORK + _LP_WORK_PER_CANDIDATE * len(problem.type_C))
        box = bound.close_best()
        if box is None:
            break
        search.start_from(box, bound.allowed(box))
        starts += 1
    search.work += int(bound_work)
    while not is_done():
        search.disturb()
    value = min(bound.value, search.seconds)
    return Solution(search.parts_T, search.seconds, value, search.work, bound.num_solves)
