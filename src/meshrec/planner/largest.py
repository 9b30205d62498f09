"""Rows that say how the largest piece of what tables use bounds the slowest rank.

Within lower <= T, and with y_t(h) the part of the tables of type t that use candidates with a piece of h or
more in a phase, every plan keeps

    T >= lower + integral from lower up of y_t(h)(h) dh

whatever type t(h) stands at each h: where the largest piece is H, every y is at most 1 up to H, and 0 above
(mixing inequalities: Gunluek & Pochet, Mathematical Programming 90, 2001). Where a relaxation takes a bit of
each candidate, the one that it violates most takes the type with the largest y at each h.
"""

import numpy as np

from meshrec.planner.cuts import Cut
from meshrec.planner.problem import Problem
from meshrec.planner.types import Bools, Floats, Ints

_USED = 1e-9
_LEAST_EXCESS = 1e-4
"""Of a row, as a part of the objective."""


class LargestPieces:
    """The cuts of one problem; loads are in units of `scale` seconds."""

    def __init__(self, problem: Problem, scale: float) -> None:
        self._largest_CK = problem.largest_load_CK() / scale
        self._type_C = problem.type_C
        self._tables_C = np.bincount(problem.type_T)[problem.type_C].astype(np.float64)
        self._num_types = int(problem.type_C[-1]) + 1

    def violated(self, share_C: Floats, slowest_K: Floats, lower_K: Floats, admitted_C: Bools) -> list[Cut]:
        """The rows, over the candidates `admitted_C`, that `share_C` and T violate where lower <= T: that of
        each single type, and in each phase that of all types."""
        some = np.flatnonzero(admitted_C)
        type_C, part_C = self._type_C[some], share_C[some] / self._tables_C[some]
        least = _LEAST_EXCESS * float(slowest_K.sum())
        found = []
        for phase, lower in enumerate(lower_K):
            above_C = np.maximum(self._largest_CK[some, phase] - lower, 0.0)
            room = float(slowest_K[phase] - lower) + least
            excess_Y = np.bincount(type_C, part_C * above_C, self._num_types) > room
            mine = np.flatnonzero(excess_Y[type_C] & (above_C > 0))
            rows = np.split(mine, np.flatnonzero(np.diff(type_C[mine])) + 1) if len(mine) else []
            values = [above_C[row] for row in rows]
            value_C = np.zeros(len(some))
            for kind, low, high in _steps(type_C, part_C, above_C):
                row = slice(*np.searchsorted(type_C, (kind, kind + 1)))
                value_C[row] += np.clip(above_C[row] - low, 0.0, high - low)
            if value_C @ part_C > room:
                rows.append(np.flatnonzero(value_C))
                values.append(value_C[rows[-1]])
            found += [
                Cut(phase, float(lower), np.inf, some[row], value / self._tables_C[some[row]], -1.0, -lower)
                for row, value in zip(rows, values, strict=True)
            ]
        return found


def _steps(type_C: Ints, part_C: Floats, above_C: Floats) -> list[tuple[int, float, float]]:
    """The type with the largest part at each height: (type, from, to), from the top down."""
    used = np.flatnonzero((part_C > _USED) & (above_C > 0))
    part_Y: dict[int, float] = {}
    most = 0.0
    tops: list[tuple[int, float]] = []
    for candidate in used[np.argsort(-above_C[used], kind="stable")]:
        kind = int(type_C[candidate])
        part = part_Y[kind] = part_Y.get(kind, 0.0) + float(part_C[candidate])
        if part > most:
            most = part
            if not tops or tops[-1][0] != kind:
                tops.append((kind, float(above_C[candidate])))
    below = [*(top for _, top in tops[1:]), 0.0]
    above = [np.inf, *below]
    return [(kind, least, most) for (kind, _), least, most in zip(tops, below, above, strict=False)]
