"""What lies on a rank as one, for relaxations that tell ranks apart.

A whole table lies on one rank. Of a part of a table, something does not shrink with the part (its outputs,
where rows are split); the rest may be cut anywhere.

*Grid*: in the phase where whole tables take multiples of one unit (the width of embeddings), the sum of
those on a rank is a multiple of it. Parts of tables that are summed in their node are off this grid, in
multiples of a step of their own.
"""

from typing import NamedTuple

import numpy as np

from meshrec.planner.problem import Problem, Scope
from meshrec.planner.types import Bools, Floats, Ints

_MOST_SIZES = 20


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
    unit_K: Floats
    """The unit of the grid in the phase that has one; 0 in others."""
    steps_E: Floats
    """Steps off the grid; 0 for elements on it, NaN for those that are neither."""
    step: float
    """A step in seconds of the phase with the grid."""
    odd_V: Bools

    @property
    def is_grid(self) -> bool:
        """Whether all elements are on the grid (so is the slowest rank)."""
        return not (self.steps_E.any() or self.odd_V.any())


def find_elements(problem: Problem, allowed_C: Bools, scale: float) -> Elements:
    """The elements of a problem's pieces, loads in units of `scale` seconds; the grid is that of
    `allowed_C`."""
    load_PK = problem.load_PK / scale
    fixed_PK = np.minimum(problem.fixed_PK / scale, load_PK)
    allowed_P = allowed_C[problem.candidate_P]
    whole_C = [
        layout.scope is Scope.RANKS and len(layout.widths) == 1 and layout.row_parts == 1
        for layout in problem.layouts_C
    ]
    whole_P = np.array(whole_C)[problem.candidate_P]
    unit_K = _units(load_PK[whole_P & allowed_P])
    still_PK = np.where(whole_P[:, None], load_PK, fixed_PK)
    count_P = (problem.count_P * problem.ranks_per_piece_C()[problem.candidate_P]).astype(np.float64)
    varying_PK = count_P[:, None] * (load_PK - still_PK)
    type_P = problem.type_C[problem.candidate_P]
    key_P = np.column_stack((type_P, whole_P, still_PK.round(12)))
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
    step, steps_E = _steps(np.where(allowed_E[:, None], still_EK, 0.0), unit_K)
    odd_V = ((varying_VK > 1e-12) & (unit_K > 0)).any(axis=1)
    return Elements(
        still_EK=still_EK,
        type_E=type_P[first_E],
        element_P=element_P,
        count_P=count_P,
        varying_VK=varying_VK,
        element_V=element_P[splits[first_V]],
        varying_P=varying_P,
        unit_K=unit_K,
        steps_E=steps_E,
        step=step,
        odd_V=np.asarray(odd_V & allowed_V),
    )


def on_grid(elements: Elements, lower_K: Floats, upper_K: Floats) -> tuple[Floats, Floats]:
    """The part of the box lower <= T <= upper with T on the grid, where everything is."""
    if not elements.is_grid:
        return lower_K, upper_K
    has = elements.unit_K > 0
    unit_K = np.where(has, elements.unit_K, 1.0)
    up_K, down_K = np.ceil(lower_K / unit_K - 1e-6) * unit_K, np.floor(upper_K / unit_K + 1e-6) * unit_K
    return np.where(has, up_K, lower_K), np.where(has, down_K, upper_K)


def _units(load_WK: Floats) -> Floats:
    """The load that those of all whole tables are multiples of, in the phase where whole tables take most
    of such; 0 in others."""
    units = np.zeros(load_WK.shape[1])
    for phase in np.argsort(-load_WK.sum(axis=0), kind="stable"):
        positive = load_WK[load_WK[:, phase] > 0, phase]
        if not len(positive) or len(np.unique(positive)) > _MOST_SIZES:
            continue
        if _multiples(positive, positive.min()).all():
            units[phase] = positive.min()
            break
    return units


def _steps(still_EK: Floats, unit_K: Floats) -> tuple[float, Floats]:
    """The step off the grid, and how many each element takes."""
    steps_E = np.zeros(len(still_EK))
    phase = int(unit_K.argmax())
    if unit_K[phase] <= 0:
        return 1.0, steps_E
    load_E = still_EK[:, phase]
    odd = np.flatnonzero(~_multiples(load_E, unit_K[phase]))
    if not len(odd):
        return 1.0, steps_E
    step = float(load_E[odd].min())
    steps_E[odd] = np.where(_multiples(load_E[odd], step), np.rint(load_E[odd] / step), np.nan)
    return step, steps_E


def _multiples(values: Floats, unit: Floats | float) -> Bools:
    ratio = values / unit
    result: Bools = np.abs(ratio - np.rint(ratio)) < 1e-6
    return result
