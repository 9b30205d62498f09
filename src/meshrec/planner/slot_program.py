"""A tighter linear program for few tables on many ranks, in a box with little freedom in the largest phase.

In that phase a rank takes one *main* piece (one that two of do not fit beside each other) or none, and some
small ones (of tables by node, which many ranks take alike): sizes are few, so what fits together is known.
Classes of ranks: those with a main piece, one class for all that are alike, and the rest, which follow
*patterns*, largest multisets of sizes that fit. Variables: how many tables use each candidate, ranks per
pattern, T, and how many of the slots for small pieces hold each table's, filled with what varies up to what
there is room for, or empty. What varies so little that it hardly matters where it is may be on any rank.

Of the room beyond `lower` a main candidate has its ranks times T - lower. That product is exact where a table
uses one candidate as a whole, McCormick's envelope elsewhere, which is the tighter the narrower the box is.

C candidates (M of them main), H classes (the last one's ranks have no main piece), B patterns, K phases, S
sizes, E small elements, V of what varies, X empty slots of a size in a class, F slots in a class filled with
what varies.
"""

from collections.abc import Sequence

import numpy as np

from meshrec.planner.class_program import TIGHT, Box
from meshrec.planner.cuts import Cut
from meshrec.planner.elements import Elements
from meshrec.planner.highs import INFINITY, LinearProgram, Rows
from meshrec.planner.problem import Problem
from meshrec.planner.relaxation import add_largest
from meshrec.planner.types import Bools, Floats, Ints

_FEW_RANKS = 16
_MOST_PATTERNS, _MOST_SLOTS = 500, 10
_NEAR = 1e-7
_LEAST_ROOM = 1e-6
_ALIKE = 0.01
"""Main pieces that differ by no more than this part of T share a class."""
_LITTLE = 0.05
"""What varies by less than this part of T on a rank may be on any."""


class SlotProgram:
    """The program of a box; loads are in units of `scale` seconds."""

    def __init__(
        self, problem: Problem, elements: Elements, candidates: Ints, box: Box, *, scale: float
    ) -> None:
        self.problem, self.elements, self.candidates, self.box = problem, elements, candidates, box
        self._scale = scale
        self._phase = int(box.lower_K.argmax())
        self._limit_K = box.upper_K * TIGHT + _NEAR
        self._place_C = np.full(len(problem.type_C), -1)
        self._place_C[candidates] = np.arange(len(candidates))
        self._groups = np.flatnonzero(self._place_C[problem.candidate_P] >= 0)
        self._find_main()
        self._find_small()
        self._find_patterns()
        self._find_classes()
        self._lay_out()

    @staticmethod
    def suits(problem: Problem) -> bool:
        """Whether there are few tables, each of its own kind, on ranks that are too many to be told apart."""
        num_tables = len(problem.type_T)
        return (
            num_tables <= problem.num_ranks > _FEW_RANKS and problem.type_T.max(initial=-1) == num_tables - 1
        )

    @property
    def is_small(self) -> bool:
        """Whether there is something to tell, and not too much."""
        is_told = bool((self.problem.ranks_per_piece_C()[self.candidates[self._main_M]] == 1).any())
        return is_told and len(self._small) > 0 and 0 < len(self._patterns_BS) <= _MOST_PATTERNS

    def build(self, mean_cuts: Sequence[Cut] = ()) -> LinearProgram:
        """Minimises the cost over the relaxation of plans in the box, which keep `mean_cuts` as well."""
        self._rows = Rows(self.num_columns)
        for part in (self._count, self._count_small, self._slots, self._loads, self._products):
            part()
        self._means(mean_cuts)
        self._beside_heaviest()
        cost = np.zeros(self.num_columns)
        cost[self.first_slowest :] = 1.0
        cost[: len(self.candidates)] = self.problem.common_C[self.candidates] / self._scale
        lower, upper = np.zeros(self.num_columns), np.full(self.num_columns, INFINITY)
        lower[self.first_slowest :], upper[self.first_slowest :] = self.box.lower_K, self.box.upper_K
        upper[: len(self.candidates)] = 1.0
        return self._rows.program(cost, lower, upper)

    def error(self, x: Floats) -> Floats:
        """By how much [K] classes have more room than their ranks times T, all together."""
        free_K = x[self.first_slowest :] - self.box.lower_K
        ranks_M = np.append(x[self._main_M] * self._num_ranks_M, x[self._patterns].sum())
        error_K: Floats = np.maximum(x[self._beyond_MK] - ranks_M[:, None] * free_K, 0.0).sum(axis=0)
        return error_K

    def _find_main(self) -> None:
        """Main candidates, by their place, with their ranks, what a rank of theirs holds at least, and all
        that they add up to."""
        problem, elements, groups = self.problem, self.elements, self._groups
        still_PK = elements.still_EK[elements.element_P[groups]]
        used_P = self._place_C[problem.candidate_P[groups]]
        least_CK = np.full((len(self.candidates), still_PK.shape[1]), INFINITY)
        np.minimum.at(least_CK, used_P, still_PK)
        is_main_C = 2 * least_CK[:, self._phase] > self._limit_K[self._phase]
        is_main_C &= least_CK[:, 0] < INFINITY
        self._main_M = np.flatnonzero(is_main_C)
        self._least_MK = least_CK[self._main_M]
        ranks_C = np.bincount(used_P, elements.count_P[groups], len(self.candidates))
        self._num_ranks_M = ranks_C[self._main_M]
        load_CK = problem.mean_load_CK()[self.candidates] * (problem.num_ranks / self._scale)
        self._load_MK = load_CK[self._main_M]
        self._small_groups = groups[~is_main_C[used_P]]

    def _find_small(self) -> None:
        elements, groups = self.elements, self._small_groups
        self._small = np.unique(elements.element_P[groups])
        varies = groups[elements.varying_P[groups] >= 0]
        part_PK = elements.varying_VK[elements.varying_P[varies]] / self._limit_K
        part_P = part_PK.max(axis=1) * (elements.uses_P / elements.count_P)[varies]
        self._much, self._little = varies[part_P >= _LITTLE], varies[part_P < _LITTLE]
        self._split = np.unique(elements.varying_P[self._much])
        self._still_EK = elements.still_EK[self._small]
        size_E = np.floor(self._still_EK[:, self._phase] / _NEAR) * _NEAR
        self._size_S, self._kind_E = np.unique(size_E, return_inverse=True)
        self._still_SK = np.full((len(self._size_S), self._still_EK.shape[1]), INFINITY)
        np.minimum.at(self._still_SK, self._kind_E, self._still_EK)
        self._element_V = np.searchsorted(self._small, elements.element_V[self._split])

    def _find_patterns(self) -> None:
        """All multisets [B, S] of sizes that fit, but those that lack something of another."""
        limit = float(self._limit_K[self._phase])
        sets_BS, used_B = np.zeros((1, 0), np.int64), np.zeros(1)
        if not len(self._size_S) or self._size_S[0] * _MOST_SLOTS < limit:
            self._patterns_BS = np.zeros((0, len(self._size_S)), np.int64)
            return
        for size in self._size_S[::-1]:
            most_B = np.floor((limit - used_B) / size).astype(np.int64)
            index = np.repeat(np.arange(len(used_B)), most_B + 1)
            count = np.arange(len(index)) - np.repeat(np.cumsum(most_B + 1) - most_B - 1, most_B + 1)
            sets_BS = np.column_stack((count, sets_BS[index]))
            used_B = used_B[index] + count * size
        self._patterns_BS = sets_BS[used_B + self._size_S[0] > limit]

    def _find_classes(self) -> None:
        """The class of each main candidate, what fits into the slots of each class, and how much of what
        varies."""
        elements = self.elements
        type_E = elements.type_E[self._small]
        type_M = self.problem.type_C[self.candidates[self._main_M]]
        mean_MK = self._load_MK / self._num_ranks_M[:, None]
        self._class_M = _alike(np.column_stack((mean_MK, self._least_MK)) / np.tile(self._limit_K, 2))
        self._rest = int(self._class_M.max(initial=-1)) + 1
        room_EMK = self._limit_K - self._least_MK - self._still_EK[:, None]
        fits_EM = (room_EMK >= 0).all(axis=2) & (type_E[:, None] != type_M)
        # Other ranks hold nothing else.
        in_patterns_S = self._patterns_BS.sum(axis=0) > 0
        fits_EM = np.column_stack((fits_EM, in_patterns_S[self._kind_E]))
        room_EMK = np.append(room_EMK, (self._limit_K - self._still_EK)[:, None], axis=1)
        class_M = np.append(self._class_M, self._rest)
        varying_VK = elements.varying_VK[self._split]
        with np.errstate(divide="ignore", invalid="ignore"):
            part_VMK = np.where(
                varying_VK[:, None] > 0, room_EMK[self._element_V] / varying_VK[:, None], INFINITY
            )
        part_VM = np.where(fits_EM[self._element_V], part_VMK.min(axis=2, initial=1.0), 0.0)
        self._room_VH = np.zeros((len(self._split), self._rest + 1))
        np.maximum.at(self._room_VH.T, class_M, part_VM.T)
        # More room than there is does no harm, but what is very small does.
        self._room_VH = np.clip(self._room_VH, _LEAST_ROOM, 1.0)
        fits_EH = np.zeros((len(type_E), self._rest + 1), bool)
        np.logical_or.at(fits_EH.T, class_M, fits_EM.T)
        self._fits_VH = fits_EH[self._element_V]
        self._fits_SH = np.zeros((len(self._size_S), self._rest + 1), bool)
        np.logical_or.at(self._fits_SH, self._kind_E, fits_EH)

    def _lay_out(self) -> None:
        num_main, num_patterns = len(self._main_M), len(self._patterns_BS)
        shape = (num_main + 1, len(self.box.lower_K))
        first = len(self.candidates)
        self._patterns = first + np.arange(num_patterns)
        self._beyond_MK = first + num_patterns + np.arange(shape[0] * shape[1]).reshape(shape)
        first += num_patterns + shape[0] * shape[1]
        self._kind_X, self._class_X = np.nonzero(self._fits_SH)
        self._empty_X = first + np.arange(len(self._kind_X))
        first += len(self._empty_X)
        self._split_F, self._class_F = np.nonzero(self._fits_VH)
        self._fill_F = first + np.arange(len(self._split_F))
        first += len(self._fill_F)
        self._fluid_HK = first + np.arange((self._rest + 1) * shape[1]).reshape(-1, shape[1])
        self.first_slowest = first + self._fluid_HK.size
        self.num_columns = self.first_slowest + shape[1]

    def _used_in(self, groups: Ints) -> Ints:
        return self._place_C[self.problem.candidate_P[groups]]

    def _count(self) -> None:
        """Each table uses a candidate, each rank is in a class."""
        candidate = np.arange(len(self.candidates))
        tables_Y = np.bincount(self.problem.type_T).astype(np.float64)
        self._rows.add_each(self.problem.type_C[self.candidates], candidate, 1.0, tables_Y, tables_Y)
        ranks = float(self.problem.num_ranks)
        columns = np.append(self._main_M, self._patterns)
        self._rows.add(columns, np.append(self._num_ranks_M, np.ones(len(self._patterns))), ranks, ranks)

    def _count_small(self) -> None:
        """Slots of each size, and filled ones of each element, are as many as candidates say, as is what
        fills them, or is too little to."""
        elements, groups, add = self.elements, self._small_groups, self._rows.add_each
        element_F = self._element_V[self._split_F]
        element_P = np.searchsorted(self._small, elements.element_P[groups])
        filled_P = np.isin(element_P, self._element_V)
        used_P, minus_P = self._used_in(groups), -elements.count_P[groups]
        none_S, none_E, none_V = (np.zeros(len(a)) for a in (self._size_S, self._small, self._split))
        add(
            np.concatenate((self._kind_X, self._kind_E[element_F], self._kind_E[element_P])),
            np.concatenate((self._empty_X, self._fill_F, used_P)),
            np.concatenate((np.ones(len(self._empty_X) + len(self._fill_F)), minus_P)),
            none_S,
            none_S,
        )
        add(
            np.append(element_F, element_P[filled_P]),
            np.append(self._fill_F, used_P[filled_P]),
            np.append(np.ones(len(element_F)), minus_P[filled_P]),
            none_E - INFINITY,
            none_E,
        )
        much, little = self._much, self._little
        add(
            np.append(self._split_F, np.searchsorted(self._split, elements.varying_P[much])),
            np.append(self._fill_F, self._used_in(much)),
            np.append(self._room_VH[self._split_F, self._class_F], -elements.uses_P[much]),
            none_V,
            none_V,
        )
        load_PK = elements.varying_VK[elements.varying_P[little]] * elements.uses_P[little, None]
        none_K = np.zeros(load_PK.shape[1])
        phase = np.arange(len(none_K))
        add(
            np.tile(phase, len(self._fluid_HK) + len(little)),
            np.append(self._fluid_HK.ravel(), np.repeat(self._used_in(little), len(phase))),
            np.append(np.ones(self._fluid_HK.size), -load_PK.ravel()),
            none_K,
            none_K,
        )

    def _slots(self) -> None:
        """Ranks have no more slots than fit beside their main piece, and beside all main pieces of a table,
        or than their pattern has of each size."""
        num_sizes, first = len(self._size_S), self._rest
        limit, number_M = self._limit_K[self._phase], self._num_ranks_M
        each_M = np.floor((limit - self._least_MK[:, self._phase]) / self._size_S[0])
        all_M = np.floor((number_M * limit - self._load_MK[:, self._phase]) / self._size_S[0])
        kind = np.append(self._kind_X, self._kind_E[self._element_V[self._split_F]])
        of_class, column = np.append(self._class_X, self._class_F), np.append(self._empty_X, self._fill_F)
        row = np.where(of_class < first, of_class, first + kind)
        none = np.zeros(first + num_sizes)
        pattern_row = np.tile(first + np.arange(num_sizes), len(self._patterns))
        self._rows.add_each(
            np.concatenate((row, self._class_M, pattern_row)),
            np.concatenate((column, self._main_M, np.repeat(self._patterns, num_sizes))),
            np.concatenate(
                (np.ones(len(row)), -np.minimum(each_M * number_M, all_M), -self._patterns_BS.ravel())
            ),
            none - INFINITY,
            none,
        )

    def _loads(self) -> None:
        """What is on a class fits into its ranks times `lower`, and its room beyond."""
        lower_K = self.box.lower_K
        num_phases, phase = len(lower_K), np.arange(len(lower_K))
        room_F = self._room_VH[self._split_F, self._class_F]
        fill_FK = self._still_EK[self._element_V[self._split_F]]
        fill_FK = fill_FK + room_F[:, None] * self.elements.varying_VK[self._split[self._split_F]]
        main_MK = self._load_MK - self._num_ranks_M[:, None] * lower_K
        patterns_BK = np.tile(-lower_K, (len(self._patterns), 1))
        rest_B, every = np.full(len(self._patterns), self._rest), np.arange(self._rest + 1)
        columns = np.concatenate((self._fill_F, self._empty_X, self._main_M, self._patterns))
        values = np.concatenate((fill_FK, self._still_SK[self._kind_X], main_MK, patterns_BK))
        classes = (self._class_F, self._class_X, self._class_M, rest_B, every, self._class_M, every[-1:])
        none = np.zeros(self._fluid_HK.size)
        self._rows.add_each(
            (np.concatenate(classes)[:, None] * num_phases + phase).ravel(),
            np.concatenate((np.repeat(columns, num_phases), self._fluid_HK.ravel(), self._beyond_MK.ravel())),
            np.concatenate((values.ravel(), none + 1.0, np.full(self._beyond_MK.size, -1.0))),
            none - INFINITY,
            none,
        )

    def _products(self) -> None:
        """Room beyond `lower` is ranks times T - lower: for each main candidate, for ranks without, and for
        some together."""
        box, beyond_MK, add = self.box, self._beyond_MK, self._rows.add_each
        num_main, num_phases = len(self._main_M), len(box.lower_K)
        slowest, number_M = self.first_slowest + np.arange(num_phases), self._num_ranks_M
        width_K = box.upper_K - box.lower_K
        mine, mk, none = beyond_MK[:-1], np.arange(num_main * num_phases), np.zeros(beyond_MK.size)
        ranks = np.append(np.repeat(self._main_M, num_phases), np.tile(self._patterns, (num_phases, 1)).T)
        rest = len(mk) + np.arange(num_phases)
        add(
            np.concatenate((mk, rest, mk, np.tile(rest, len(self._patterns)))),
            np.append(beyond_MK.ravel(), ranks),
            np.concatenate(
                (
                    none + 1.0,
                    -(number_M[:, None] * width_K).ravel(),
                    np.tile(-width_K, len(self._patterns)),
                )
            ),
            none - INFINITY,
            none,
        )
        self._products_of_tables()
        add(
            np.tile(mk, 3),
            np.concatenate((mine.ravel(), np.tile(slowest, num_main), np.repeat(self._main_M, num_phases))),
            np.concatenate(
                (
                    np.ones(mine.size),
                    -np.repeat(number_M, num_phases),
                    -(number_M[:, None] * width_K).ravel(),
                )
            ),
            -(number_M[:, None] * box.upper_K).ravel(),
            np.full(mine.size, INFINITY),
        )

    def _products_of_tables(self) -> None:
        """For a rank of each, all main candidates of a table, of which it uses one (see `suits`); and all
        ranks together."""
        box, mine = self.box, self._beyond_MK[:-1]
        num_phases = len(box.lower_K)
        slowest = self.first_slowest + np.arange(num_phases)
        types, type_M = np.unique(self.problem.type_C[self.candidates[self._main_M]], return_inverse=True)
        ranks = float(self.problem.num_ranks)
        yk = np.arange(len(types) * num_phases).reshape(len(types), num_phases)
        self._rows.add_each(
            np.append(yk[type_M].ravel(), yk.ravel()),
            np.append(mine.ravel(), np.tile(slowest, len(types))),
            np.append(np.repeat(1 / self._num_ranks_M, num_phases), np.full(yk.size, -1.0)),
            np.full(yk.size, -INFINITY),
            np.tile(-box.lower_K, len(types)),
        )
        self._rows.add_each(
            np.append(np.tile(np.arange(num_phases), len(self._beyond_MK)), np.arange(num_phases)),
            np.append(self._beyond_MK.ravel(), slowest),
            np.append(np.ones(self._beyond_MK.size), np.full(num_phases, -ranks)),
            -ranks * box.lower_K,
            -ranks * box.lower_K,
        )

    def _means(self, mean_cuts: Sequence[Cut]) -> None:
        """What holds without classes: T is at least the mean, and a single table's largest piece; memory."""
        problem, candidate = self.problem, np.arange(len(self.candidates))
        slowest = self.first_slowest + np.arange(len(self.box.lower_K))
        mean_CK = problem.mean_load_CK()[self.candidates] / self._scale
        none = np.zeros(len(slowest))
        self._rows.add_each(
            np.append(np.tile(np.arange(len(slowest)), len(candidate)), np.arange(len(slowest))),
            np.append(np.repeat(candidate, len(slowest)), slowest),
            np.append(mean_CK.ravel(), none - 1.0),
            none - INFINITY,
            none,
        )
        add_largest(self._rows, problem, self.candidates, slowest, self._scale)
        if mean_cuts:
            row = np.arange(len(mean_cuts))
            place_N = self._place_C[np.concatenate([cut.candidate_N for cut in mean_cuts])]
            value_N = np.concatenate([cut.value_N for cut in mean_cuts])
            row_N = np.repeat(row, [len(cut.candidate_N) for cut in mean_cuts])
            mine = place_N >= 0
            self._rows.add_each(
                np.append(row_N[mine], row),
                np.append(place_N[mine], slowest[[cut.phase for cut in mean_cuts]]),
                np.append(value_N[mine], [cut.slope for cut in mean_cuts]),
                np.full(len(row), -INFINITY),
                np.array([cut.limit for cut in mean_cuts]),
            )
        bytes_C = problem.mean_bytes_C()[self.candidates] / problem.memory_cap
        self._rows.add(candidate, bytes_C, -INFINITY, 1.0)

    def _beside_heaviest(self) -> None:
        """T is at least what ranks hold on average that hold the heaviest table: their share of it, and the
        main pieces beside its filled slots."""
        problem, elements, groups = self.problem, self.elements, self._small_groups
        kind = heaviest_type(problem, self._place_C >= 0)
        groups = groups[elements.type_E[elements.element_P[groups]] == kind]
        used_P, element_P = self._used_in(groups), np.searchsorted(self._small, elements.element_P[groups])
        ranks_C = np.bincount(used_P, elements.count_P[groups], len(self.candidates))
        most_E = np.zeros(len(self._small))
        np.maximum.at(most_E, element_P, ranks_C[used_P])
        mine = np.flatnonzero(problem.type_C[self.candidates] == kind)
        largest_CK = problem.largest_load_CK()[self.candidates[mine]] / self._scale
        mean_CK = problem.mean_load_CK()[self.candidates[mine]] * (problem.num_ranks / self._scale)
        ranks = ranks_C[mine, None]
        average_CK = np.where(ranks > 0, mean_CK / np.maximum(ranks, 1), largest_CK)
        element_F = self._element_V[self._split_F]
        filled = np.flatnonzero((most_E[element_F] > 0) & (self._class_F < self._rest))
        num_phases = self._least_MK.shape[1]
        least_HK = np.full((self._rest, num_phases), INFINITY)
        np.minimum.at(least_HK, self._class_M, self._least_MK)
        beside_FK = least_HK[self._class_F[filled]] / most_E[element_F[filled], None]
        slowest = self.first_slowest + np.arange(num_phases)
        columns = np.concatenate((mine, self._fill_F[filled]))
        self._rows.add_each(
            np.append(np.tile(np.arange(num_phases), len(columns)), np.arange(num_phases)),
            np.append(np.repeat(columns, num_phases), slowest),
            np.append(np.concatenate((average_CK, beside_FK)).ravel(), np.full(num_phases, -1.0)),
            np.full(num_phases, -INFINITY),
            np.zeros(num_phases),
        )


def _alike(vector_MN: Floats) -> Ints:
    """A number for each vector, the same for those that are near the first of that number."""
    number_M = np.full(len(vector_MN), -1)
    number = 0
    while (number_M < 0).any():
        left = np.flatnonzero(number_M < 0)
        near = (np.abs(vector_MN[left] - vector_MN[left[0]]) <= _ALIKE).all(axis=1)
        number_M[left[0]] = number_M[left[near]] = number
        number += 1
    return number_M


def heaviest_type(problem: Problem, allowed_C: Bools) -> int:
    """The type whose least candidate costs a table the most."""
    cost_C = problem.mean_load_CK().sum(axis=1) + problem.common_C
    least_Y = np.full(int(problem.type_C[-1]) + 1, np.inf)
    np.minimum.at(least_Y, problem.type_C[allowed_C], cost_C[allowed_C])
    return int(least_Y.argmax())


def by_split(problem: Problem, kind: int, admitted_C: Bools) -> list[Bools]:
    """Candidates [C] with those of one type that go to the same places in as many column parts."""
    mine = np.flatnonzero(admitted_C & (problem.type_C == kind))
    splits = [(problem.layouts_C[index].scope, len(problem.layouts_C[index].widths)) for index in mine]
    parts = []
    for split in sorted(set(splits)):
        parts.append(admitted_C.copy())
        parts[-1][mine] = [other == split for other in splits]
    return parts
