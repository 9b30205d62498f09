"""Rows that no plan in a box violates: what does not divide evenly leaves room on every rank.

Where loads on a rank add up to u at most, sum_i F(load_i) <= F(u) for every superadditive F with F(0) = 0 (a
*dual feasible function*: Fekete & Schepers, Mathematical Programming 91, 2001; Clautiaux, Alves & Valerio de
Carvalho, Annals of Operations Research 179, 2010). The one used here is that of mixed integer rounding
(Nemhauser & Wolsey, Integer and Combinatorial Optimization, 1988, II.1.7), of x = factor * load:

    F(x) = floor(x) + max(0, x - floor(x) - rest) / (1 - rest),    rest = factor * u - floor(factor * u).

With whole tables of 32, 64, ... columns and room for 31.5 units of 32 columns, it says that a rank holds 31
units, unless something else fills the half.
"""

import copy
from typing import NamedTuple

import numpy as np

from meshrec.planner.problem import Problem
from meshrec.planner.types import Bools, Floats, Ints

_MOST_SIZES, _MOST_MULTIPLE, _MOST_ROUNDED = 20, 6, 200.0
"""Sizes of whole tables that are few enough to be told apart; multiples of them that count as one; the most
that a limit is worth."""
_LEAST_REST, _MOST_REST = 0.01, 0.97
_NEAR = 1e-6
_LEAST_EXCESS = 1e-4


class Cut(NamedTuple):
    """sum_n value_n x_(candidate n) + slope T <= limit, where T, of `phase`, is in [lower, upper]."""

    phase: int
    lower: float
    upper: float
    candidate_N: Ints
    value_N: Floats
    slope: float
    limit: float

    def holds(self, lower_K: Floats, upper_K: Floats) -> bool:
        """Whether it does in a box."""
        return bool(self.lower <= lower_K[self.phase] and upper_K[self.phase] <= self.upper)


class Rounding:
    """The cuts of one problem; loads are in units of `scale` seconds.

    A candidate's n pieces may be cut unevenly: each costs `least` at least, and all together n times `mean`.
    As F(x) >= x - rest everywhere, and F grows, they add up to n max(F(least), mean - rest) at least.
    """

    def __init__(self, problem: Problem, scale: float) -> None:
        count_P = (problem.count_P * problem.ranks_per_piece_C()[problem.candidate_P]).astype(np.float64)
        num_candidates, num_phases = len(problem.type_C), problem.load_PK.shape[1]
        self._count_N = np.bincount(problem.candidate_P, count_P, num_candidates)
        total_CK = problem.mean_load_CK() * problem.num_ranks / scale
        self._mean_NK = total_CK / np.maximum(self._count_N, 1.0)[:, None]
        self._least_NK = np.full((num_candidates, num_phases), np.inf)
        np.minimum.at(self._least_NK, problem.candidate_P, problem.least_load_PK() / scale)
        self._least_NK = np.minimum(self._least_NK, self._mean_NK)
        self._first_C: Ints | None = None
        """What a candidate stands for: [N] from here to the next one's."""
        self._ranks = float(problem.num_ranks)
        whole_K = [
            self._mean_NK[(self._count_N == 1) & (row > _NEAR), k] for k, row in enumerate(self._mean_NK.T)
        ]
        sizes_K = [np.unique(whole.round(9)) for whole in whole_K]
        self._sizes_K = [sizes if len(sizes) <= _MOST_SIZES else np.zeros(0) for sizes in sizes_K]

    def restricted(self, stands_C: Ints) -> "Rounding":
        """The cuts of those candidates that stand for themselves; each counts what the least of those that
        it stands for would."""
        owner_N = np.arange(len(stands_C))
        if self._first_C is not None:
            owner_N = np.repeat(owner_N, np.diff(self._first_C))
        member_N = np.flatnonzero(stands_C[owner_N] >= 0)
        member_N = member_N[np.argsort(stands_C[owner_N[member_N]], kind="stable")]
        kept = np.flatnonzero(stands_C == np.arange(len(stands_C)))
        other = copy.copy(self)
        other._count_N = self._count_N[member_N]
        other._mean_NK, other._least_NK = self._mean_NK[member_N], self._least_NK[member_N]
        other._first_C = np.searchsorted(stands_C[owner_N[member_N]], np.append(kept, len(stands_C)))
        return other

    def violated(self, share_C: Floats, upper_K: Floats, admitted_C: Bools) -> list[Cut]:
        """The cut of each phase that `share_C` violates most, over the candidates `admitted_C`."""
        found = []
        used = np.flatnonzero(share_C > 0)
        for phase, upper in enumerate(upper_K):
            factor_Q = self._factors(phase, float(upper))
            if not len(factor_Q):
                continue
            limit_Q = self._ranks * np.floor(factor_Q * upper + _NEAR)
            excess_Q = self._rounded(used, phase, factor_Q, float(upper)) @ share_C[used] / limit_Q
            best = slice(int(excess_Q.argmax()), int(excess_Q.argmax()) + 1)
            if excess_Q[best] > 1 + _LEAST_EXCESS:
                some = np.flatnonzero(admitted_C)
                value_N = self._rounded(some, phase, factor_Q[best], float(upper))[0]
                found.append(Cut(phase, 0.0, float(upper), some, value_N, 0.0, float(limit_Q[best][0])))
        return found

    def _factors(self, phase: int, upper: float) -> Floats:
        sizes = self._sizes_K[phase]
        multiples = (np.arange(1, _MOST_MULTIPLE + 1)[:, None] / sizes).ravel()
        rooms = multiples * upper
        rest = rooms - np.floor(rooms + _NEAR)
        fits = (rooms >= 1) & (rooms < _MOST_ROUNDED) & (rest > _LEAST_REST) & (rest < _MOST_REST)
        return np.asarray(multiples[fits])

    def _rounded(self, candidates: Ints, phase: int, factor_Q: Floats, upper: float) -> Floats:
        """What the candidates count [Q, candidates]."""
        rest_Q = (factor_Q * upper - np.floor(factor_Q * upper + _NEAR))[:, None]
        slope_Q = 1.0 / (1.0 - rest_Q)
        member, start_C = self._members(candidates)
        count = self._count_N[member]
        least = factor_Q[:, None] * self._least_NK[member, phase]
        whole = np.floor(least)
        each = whole + np.maximum(least - whole - rest_Q, 0.0) * slope_Q
        total = factor_Q[:, None] * (count * self._mean_NK[member, phase])
        lost = _most_lost(total, np.maximum(count, 1.0), rest_Q, slope_Q)
        value: Floats = np.maximum(count * each, total - lost)
        return value if start_C is None else np.asarray(np.minimum.reduceat(value, start_C, axis=1))

    def _members(self, candidates: Ints) -> tuple[Ints, Ints | None]:
        """What some candidates stand for, one after the other, and where each begins (None: all stand for
        themselves)."""
        if self._first_C is None:
            return candidates, None
        length_C = self._first_C[candidates + 1] - self._first_C[candidates]
        start_C = np.cumsum(length_C) - length_C
        return np.repeat(self._first_C[candidates] - start_C, length_C) + np.arange(length_C.sum()), start_C


def _most_lost(total: Floats, count: Floats, rest_Q: Floats, slope_Q: Floats) -> Floats:
    """The largest sum of x - F(x) over `count` pieces that add up to `total` [Q, C].

    It depends on a piece's fraction alone, and is concave there: the fraction itself up to `rest`, and then a
    line down to 0. All fractions add up to that of `total` and some whole number, and are best when equal:
    with the last sum that is not above count * rest, or the first one that is.
    """
    total = total % 1.0
    total += np.floor(np.maximum(count * rest_Q - total, 0.0))
    falling = (count - total) * (rest_Q * slope_Q)
    return np.asarray(np.maximum(np.minimum(total, falling), falling - rest_Q * slope_Q))
