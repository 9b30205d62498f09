"""Cutting planes ("cuts"): inequalities which hold for every plan in a box but not for the relaxation's
optimum.

The relaxation spreads load evenly. Actual pieces are indivisible, and leave room on ranks.

If the loads on a rank sum to at most u, then sum_i F(load_i) <= F(u) for every superadditive F with F(0) = 0
(a *dual feasible function*: Fekete & Schepers, Mathematical Programming 91, 2001; Clautiaux, Alves & Valerio
de Carvalho, Annals of Operations Research 179, 2010). We use the mixed integer rounding function (Nemhauser &
Wolsey, Integer and Combinatorial Optimization, 1988, II.1.7), with x = factor * load:

    F(x) = floor(x) + max(0, x - floor(x) - rest) / (1 - rest),    rest = factor * u - floor(factor * u).

Example: tables with 32, 64, ... columns are placed whole, and a rank has room for 31.5 units of 32 columns.
Then the rank holds at most 31 units, unless a smaller piece fills the half.
"""

from typing import NamedTuple

import numpy as np

from meshrec.planner.problem import Problem
from meshrec.planner.types import Bools, Floats, Ints

# Limits on the search for cuts: number of piece sizes to try, maximum kinds of candidates, largest integer to
# which a piece size is scaled, and largest scaled load limit of a rank.
_MOST_SIZES, _MOST_KINDS, _MOST_MULTIPLE, _MOST_ROUNDED = 5, 1000, 6, 200.0
# Range for the fractional part of a rank's scaled load limit. Rounding cuts it off: a small part gains
# little, and a part near 1 makes the slope 1 / (1 - part) large.
_MIN_FRACTION, _MAX_FRACTION = 0.01, 0.97
# Tolerance in rounding, so that a value slightly below an integer counts as the integer.
_NEAR = 1e-6
# Minimum cut violation worth adding, relative to the objective.
_LEAST_EXCESS = 1e-4


class Cut(NamedTuple):
    """Cutting plane, which is the inequality ``sum_n value_n * x_(candidate_n) + slope * T_phase <= limit``.

    Here x_c is the number of tables that use candidate c (a way to split a table), and T_phase is the slowest
    rank's load in the phase. The inequality is valid for plans with ``lower <= T_phase <= upper``.
    """

    phase: int
    lower: float
    upper: float
    candidate_N: Ints
    value_N: Floats
    slope: float
    limit: float

    def holds(self, lower_K: Floats, upper_K: Floats) -> bool:
        """Return whether the inequality is valid for all plans in the box ``lower_K <= T <= upper_K``."""
        return bool(self.lower <= lower_K[self.phase] and upper_K[self.phase] <= self.upper)


class Rounding:
    """Generator of cutting planes ("cuts") by mixed integer rounding.

    The module docstring defines the rounding function F and the constant `rest`. The n pieces of a candidate
    may be uneven. Each piece costs at least `least`, and all pieces together cost n times `mean`. F is
    monotone, and F(x) >= x - rest for every x. So the values of F for the n pieces sum to at least
    n max(F(least), mean - rest).
    """

    def __init__(self, problem: Problem, scale: float) -> None:
        count_P = (problem.count_P * problem.ranks_per_piece_C()[problem.candidate_P]).astype(np.float64)
        num_candidates, num_phases = len(problem.type_C), problem.load_PK.shape[1]
        count_C = np.bincount(problem.candidate_P, count_P, num_candidates).astype(np.float64)
        mean_CK = problem.mean_load_CK() * problem.num_ranks / scale / np.maximum(count_C, 1.0)[:, None]
        # The candidate's smallest possible piece, in an uneven split.
        least_CK = np.full((num_candidates, num_phases), np.inf)
        np.minimum.at(least_CK, problem.candidate_P, problem.least_load_PK() / scale)
        least_CK = np.minimum(least_CK, mean_CK)
        self._ranks = float(problem.num_ranks)
        self._phases = [
            _Phase.of(count_C, mean_C, least_C) for mean_C, least_C in zip(mean_CK.T, least_CK.T, strict=True)
        ]

    def violated(self, num_tables_C: Floats, upper_K: Floats, admitted_C: Bools) -> list[Cut]:
        """Return the most violated cutting plane per phase; see `Cut` for the terms.

        Phases whose cuts hold, or are violated only slightly, are left out.

        Args:
            num_tables_C: tables that use each candidate at the relaxation's optimum; may be fractional.
            upper_K: upper limit on the load of the slowest rank in each phase (``T_phase`` in `Cut`).
            admitted_C: mask of the candidates that plans may use.
        """
        cuts = []
        for index, (phase, upper) in enumerate(zip(self._phases, upper_K.tolist(), strict=True)):
            num_tables_U = np.bincount(phase.kind_C, num_tables_C, len(phase.count_U))
            factor_Q = phase.factors(upper, num_tables_U.astype(np.float64))
            if not len(factor_Q):
                continue
            # The cut summed over all ranks: every rank holds at most the rounded limit.
            limit_Q = self._ranks * np.floor(factor_Q * upper + _NEAR)
            value_QU = phase.rounded(factor_Q, upper)
            best = int((value_QU @ num_tables_U / limit_Q).argmax())
            if value_QU[best] @ num_tables_U > limit_Q[best] * (1 + _LEAST_EXCESS):
                admitted = np.flatnonzero(admitted_C)
                value_N = value_QU[best][phase.kind_C[admitted]]
                cuts.append(Cut(index, 0.0, upper, admitted, value_N, 0.0, float(limit_Q[best])))
        return cuts


class _Phase(NamedTuple):
    """Costs of the candidates' pieces in a phase. Candidates with equal costs are grouped into U kinds.

    Attributes:
        count_U: piece count per candidate, counting every rank that takes a piece's load.
        mean_U: mean load per piece.
        least_U: minimum load per piece in an uneven split.
        kind_C: kind index per candidate.
    """

    count_U: Floats
    mean_U: Floats
    least_U: Floats
    kind_C: Ints

    @classmethod
    def of(cls, count_C: Floats, mean_C: Floats, least_C: Floats) -> "_Phase":
        """Create the phase from arrays per candidate, and group equal candidates into kinds.

        Args:
            count_C: piece count per candidate.
            mean_C: mean load per piece.
            least_C: minimum load per piece.
        """
        kind_UN, kind_C = np.unique(np.column_stack((count_C, mean_C, least_C)), axis=0, return_inverse=True)
        count_U, mean_U, least_U = kind_UN.T
        return cls(count_U, mean_U, least_U, kind_C.ravel())

    def factors(self, upper: float, num_tables_U: Floats) -> Floats:
        """Return the factors [Q] to try for scaling loads before they are rounded to integers.

        A factor turns a piece size with a large part of the total load into a small integer. Rounding then
        loses nothing for such pieces. A cut gains only the fractional part of the scaled limit on a rank's
        load. So factors that scale this limit to nearly an integer are left out. The array is empty if there
        are too many kinds.

        Args:
            num_tables_U: number of tables per kind in the relaxation.
        """
        # For more kinds, the arrays [Q, U] would be large.
        if len(num_tables_U) > _MOST_KINDS:
            return np.zeros(0)
        load_U = num_tables_U * self.count_U * self.mean_U
        most = np.argsort(-load_U)[:_MOST_SIZES]
        size_N = self.mean_U[most[load_U[most] > _NEAR]]
        # Scales piece sizes to 1, 2, ...
        multiples = (np.arange(1, _MOST_MULTIPLE + 1)[:, None] / size_N).ravel()
        rooms = multiples * upper
        fraction = rooms - np.floor(rooms + _NEAR)
        fits = (
            (rooms >= 1) & (rooms < _MOST_ROUNDED) & (fraction > _MIN_FRACTION) & (fraction < _MAX_FRACTION)
        )
        return np.asarray(multiples[fits])

    def rounded(self, factor_Q: Floats, upper: float) -> Floats:
        """Return a lower bound [Q, U] on the sum of F over a candidate's pieces, for every factor and kind.

        F is the rounding function in the module docstring, with `upper` as the limit u on a rank's load.
        """
        fraction_Q = (factor_Q * upper - np.floor(factor_Q * upper + _NEAR))[:, None]
        slope_Q = 1.0 / (1.0 - fraction_Q)
        least = factor_Q[:, None] * self.least_U
        whole = np.floor(least)
        piece = whole + np.maximum(least - whole - fraction_Q, 0.0) * slope_Q
        total = factor_Q[:, None] * (self.count_U * self.mean_U)
        lost = _max_rounding_loss(total, np.maximum(self.count_U, 1.0), fraction_Q, slope_Q)
        return np.asarray(np.maximum(self.count_U * piece, total - lost))


def _max_rounding_loss(total: Floats, count: Floats, fraction_Q: Floats, slope_Q: Floats) -> Floats:
    """Return the most that rounding can lose in an uneven split [Q, U].

    The result is the maximum sum of x - F(x) over `count` pieces with loads x and total load `total`. The
    loss x - F(x) depends only on the fractional part of x. The loss is concave: it increases up to the
    fractional part `rest`, then decreases linearly to 0. So the sum is largest if all fractional parts are
    equal. They sum to the fractional part of `total` plus an integer. Only two such sums can be best: the
    last up to count * rest, and the first above it. The result is the larger loss of the two.

    Args:
        total: sum of the scaled piece loads [Q, U].
        count: piece count [U].
        fraction_Q: `rest` per factor [Q, 1].
        slope_Q: 1 / (1 - rest) [Q, 1].
    """
    # From here, the sum of the fractional parts.
    total = total % 1.0
    total += np.floor(np.maximum(count * fraction_Q - total, 0.0))
    falling = (count - total) * (fraction_Q * slope_Q)
    return np.asarray(np.maximum(np.minimum(total, falling), falling - fraction_Q * slope_Q))


# Fraction of a type's tables above which the relaxation uses a candidate. Solvers return tiny values for 0.
_USED = 1e-9


class LargestPieces:
    """Generator of cutting planes ("cuts"): a phase takes at least as long as the largest piece in use."""

    def __init__(self, problem: Problem, scale: float) -> None:
        self._largest_CK = problem.largest_load_CK() / scale
        self._type_C = problem.type_C
        self._tables_C = np.bincount(problem.type_T)[problem.type_C].astype(np.float64)
        self._num_types = int(problem.type_C[-1]) + 1

    def violated(
        self, num_tables_C: Floats, slowest_K: Floats, lower_K: Floats, admitted_C: Bools
    ) -> list[Cut]:
        """Return cutting planes that the relaxation's optimum violates; see `Cut` for the terms.

        Returns at most one cut per phase and table type, and at most one per phase over all types. Cuts that
        are violated only slightly are left out.

        Args:
            num_tables_C: tables that use each candidate at the optimum; may be fractional.
            lower_K: lower limit on ``T_phase``. A cut is valid for plans whose ``T_phase`` is at least this.
            admitted_C: mask of the candidates that plans may use.
        """
        admitted = np.flatnonzero(admitted_C)
        type_C, part_C = self._type_C[admitted], num_tables_C[admitted] / self._tables_C[admitted]
        least = _LEAST_EXCESS * float(slowest_K.sum())
        cuts = []
        for phase, lower in enumerate(lower_K):
            above_C = np.maximum(self._largest_CK[admitted, phase] - lower, 0.0)
            # The cut is violated if the relaxed excess of the pieces is above the excess of T.
            room = float(slowest_K[phase] - lower) + least
            excess_Y = np.bincount(type_C, part_C * above_C, self._num_types) > room
            mine = np.flatnonzero(excess_Y[type_C] & (above_C > 0))
            rows = np.split(mine, np.flatnonzero(np.diff(type_C[mine])) + 1) if len(mine) else []
            values = [above_C[row] for row in rows]
            value_C = np.zeros(len(admitted))
            for kind, low, high in _strongest_types(type_C, part_C, above_C):
                row = slice(*np.searchsorted(type_C, (kind, kind + 1)))
                value_C[row] += np.clip(above_C[row] - low, 0.0, high - low)
            if value_C @ part_C > room:
                rows.append(np.flatnonzero(value_C))
                values.append(value_C[rows[-1]])
            cuts += [
                # In the form of `Cut`: sum(value * x) - T <= -lower, so the excess of the pieces in use is at
                # most T - lower.
                Cut(
                    phase,
                    float(lower),
                    np.inf,
                    admitted[row],
                    value / self._tables_C[admitted[row]],
                    -1.0,
                    -lower,
                )
                for row, value in zip(rows, values, strict=True)
            ]
        return cuts


def _strongest_types(type_C: Ints, part_C: Floats, above_C: Floats) -> list[tuple[int, float, float]]:
    """Select the table type to use at every height in the cut for all types together.

    A height is a load in excess of the lower limit on T. The cut may use another type at every height, and
    counts the fraction of this type's tables with a largest piece above the height. It is valid for any
    selection, because no piece of a plan takes longer than T. The type with the largest fraction is selected,
    because it gives the strongest cut.

    Args:
        part_C: fraction of the type's tables which use the candidate in the relaxation.
        above_C: excess of the candidate's largest piece over the lower limit on T; 0 if below.

    Returns:
        Tuples (type, low, high), which select a type for the heights from low to high. They are sorted from
        high to low. The first interval has no upper end, and the last ends at 0.
    """
    used = np.flatnonzero((part_C > _USED) & (above_C > 0))
    # Fraction of a type's tables whose largest piece is above the current height; the height falls.
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
