"""Cutting planes: inequalities that hold for every plan in a box, because uneven pieces leave room on ranks.

If the loads on a rank add up to at most u, sum_i F(load_i) <= F(u) for every superadditive F with F(0) = 0 (a
*dual feasible function*: Fekete & Schepers, Mathematical Programming 91, 2001; Clautiaux, Alves & Valerio de
Carvalho, Annals of Operations Research 179, 2010). We use the function of mixed integer rounding (Nemhauser &
Wolsey, Integer and Combinatorial Optimization, 1988, II.1.7), with x = factor * load:

    F(x) = floor(x) + max(0, x - floor(x) - rest) / (1 - rest),    rest = factor * u - floor(factor * u).

An example: tables have 32, 64, ... columns and are placed whole, and a rank has room for 31.5 units of 32
columns. Then the rank holds at most 31 units, unless something else fills the half.
"""

from typing import NamedTuple

import numpy as np

from meshrec.planner.problem import Problem
from meshrec.planner.types import Bools, Floats, Ints

_MOST_SIZES, _MOST_KINDS, _MOST_MULTIPLE, _MOST_ROUNDED = 5, 1000, 6, 200.0
"""Limits of the search for cuts: the number of piece sizes to try, the number of kinds of candidates up to
which we try at all, the multiples of a size that may count as one, and the largest rounded limit.
"""
_LEAST_REST, _MOST_REST = 0.01, 0.97
_NEAR = 1e-6
_LEAST_EXCESS = 1e-4


class Cut(NamedTuple):
    """The inequality sum_n value_n x_(candidate n) + slope T <= limit, valid if T of `phase` is in [lower,
    upper].
    """

    phase: int
    lower: float
    upper: float
    candidate_N: Ints
    value_N: Floats
    slope: float
    limit: float

    def holds(self, lower_K: Floats, upper_K: Floats) -> bool:
        """Return whether the inequality is valid in a box."""
        return bool(self.lower <= lower_K[self.phase] and upper_K[self.phase] <= self.upper)


class Rounding:
    """The rounding cuts of one problem. Loads are in units of `scale` seconds.

    A candidate's n pieces may be uneven: each costs at least `least`, and together they cost n times `mean`.
    Since F(x) >= x - rest everywhere and F grows, their values add up to at least n max(F(least), mean -
    rest).
    """

    def __init__(self, problem: Problem, scale: float) -> None:
        count_P = (problem.count_P * problem.ranks_per_piece_C()[problem.candidate_P]).astype(np.float64)
        num_candidates, num_phases = len(problem.type_C), problem.load_PK.shape[1]
        count_C = np.bincount(problem.candidate_P, count_P, num_candidates).astype(np.float64)
        mean_CK = problem.mean_load_CK() * problem.num_ranks / scale / np.maximum(count_C, 1.0)[:, None]
        least_CK = np.full((num_candidates, num_phases), np.inf)
        np.minimum.at(least_CK, problem.candidate_P, problem.least_load_PK() / scale)
        least_CK = np.minimum(least_CK, mean_CK)
        self._ranks = float(problem.num_ranks)
        self._phases = [
            _Phase.of(count_C, mean_C, least_C) for mean_C, least_C in zip(mean_CK.T, least_CK.T, strict=True)
        ]

    def violated(self, share_C: Floats, upper_K: Floats, admitted_C: Bools) -> list[Cut]:
        """Return, for each phase, the cut that `share_C` violates most, over the candidates `admitted_C`."""
        found = []
        for index, (phase, upper) in enumerate(zip(self._phases, upper_K.tolist(), strict=True)):
            share_U = np.bincount(phase.kind_C, share_C, len(phase.count_U))
            factor_Q = phase.factors(upper, share_U.astype(np.float64))
            if not len(factor_Q):
                continue
            limit_Q = self._ranks * np.floor(factor_Q * upper + _NEAR)
            value_QU = phase.rounded(factor_Q, upper)
            best = int((value_QU @ share_U / limit_Q).argmax())
            if value_QU[best] @ share_U > limit_Q[best] * (1 + _LEAST_EXCESS):
                some = np.flatnonzero(admitted_C)
                value_N = value_QU[best][phase.kind_C[some]]
                found.append(Cut(index, 0.0, upper, some, value_N, 0.0, float(limit_Q[best])))
        return found


class _Phase(NamedTuple):
    """The costs of pieces in one phase. Candidates of one kind [U] (`kind_C`) have equally many pieces, with
    the same mean cost and the same least cost.
    """

    count_U: Floats
    mean_U: Floats
    least_U: Floats
    kind_C: Ints

    @classmethod
    def of(cls, count_C: Floats, mean_C: Floats, least_C: Floats) -> "_Phase":
        """Group candidates by the number and cost of their pieces."""
        kind_UN, kind_C = np.unique(np.column_stack((count_C, mean_C, least_C)), axis=0, return_inverse=True)
        count_U, mean_U, least_U = kind_UN.T
        return cls(count_U, mean_U, least_U, kind_C.ravel())

    def factors(self, upper: float, share_U: Floats) -> Floats:
        """Return the factors [Q] to try: those with which a few pieces of the most frequent sizes add up to a
        whole number.
        """
        if len(share_U) > _MOST_KINDS:
            return np.zeros(0)
        load_U = share_U * self.count_U * self.mean_U
        most = np.argsort(-load_U)[:_MOST_SIZES]
        size_N = self.mean_U[most[load_U[most] > _NEAR]]
        multiples = (np.arange(1, _MOST_MULTIPLE + 1)[:, None] / size_N).ravel()
        rooms = multiples * upper
        rest = rooms - np.floor(rooms + _NEAR)
        fits = (rooms >= 1) & (rooms < _MOST_ROUNDED) & (rest > _LEAST_REST) & (rest < _MOST_REST)
        return np.asarray(multiples[fits])

    def rounded(self, factor_Q: Floats, upper: float) -> Floats:
        """Return the rounded values of the kinds of candidates [Q, U]."""
        rest_Q = (factor_Q * upper - np.floor(factor_Q * upper + _NEAR))[:, None]
        slope_Q = 1.0 / (1.0 - rest_Q)
        least = factor_Q[:, None] * self.least_U
        whole = np.floor(least)
        each = whole + np.maximum(least - whole - rest_Q, 0.0) * slope_Q
        total = factor_Q[:, None] * (self.count_U * self.mean_U)
        lost = _most_lost(total, np.maximum(self.count_U, 1.0), rest_Q, slope_Q)
        return np.asarray(np.maximum(self.count_U * each, total - lost))


def _most_lost(total: Floats, count: Floats, rest_Q: Floats, slope_Q: Floats) -> Floats:
    """Return the largest sum of x - F(x) over `count` pieces that add up to `total` [Q, C].

    x - F(x) depends on the fraction of x alone, and is concave in it: it rises with the fraction up to
    `rest`, and then falls in a line to 0. The fractions of all pieces add up to the fraction of `total` plus
    a whole number, and are best when equal. So we take the last sum of at most count * rest, or the first one
    above it.
    """
    total = total % 1.0
    total += np.floor(np.maximum(count * rest_Q - total, 0.0))
    falling = (count - total) * (rest_Q * slope_Q)
    return np.asarray(np.maximum(np.minimum(total, falling), falling - rest_Q * slope_Q))


_USED = 1e-9
_LEAST_EXCESS = 1e-4
"""Least violation of a cut that is worth adding, as a share of the objective."""


class LargestPieces:
    """The cuts that say that a phase takes at least as long as the largest piece. Loads are in units of
    `scale` seconds.
    """

    def __init__(self, problem: Problem, scale: float) -> None:
        self._largest_CK = problem.largest_load_CK() / scale
        self._type_C = problem.type_C
        self._tables_C = np.bincount(problem.type_T)[problem.type_C].astype(np.float64)
        self._num_types = int(problem.type_C[-1]) + 1

    def violated(self, share_C: Floats, slowest_K: Floats, lower_K: Floats, admitted_C: Bools) -> list[Cut]:
        """Return the cuts that `share_C` and T violate in the box lower <= T, over the candidates
        `admitted_C`.

        There is one cut for each single type, and one in each phase for all types together.
        """
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
    """Return, from the top down, the intervals (type, from, to) of height with the type that has the largest
    part there.
    """
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
