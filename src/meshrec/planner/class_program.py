"""The linear program of ranks in classes; see `rank_classes` for what it says.

C candidates, H classes, E light elements and V splits (L = E + V of what is spread over classes), K phases.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from meshrec.planner.elements import Elements
from meshrec.planner.highs import INFINITY, LinearProgram, Rows
from meshrec.planner.problem import Problem
from meshrec.planner.relaxation import add_largest
from meshrec.planner.types import Floats, Ints
from meshrec.planner.warm_start import FIRST_ROW, ClassCut, key

TIGHT = 1 + 1e-9
_MOST_FACTOR, _MOST_WEIGHT = 8, 200.0
"""Of cuts: what an element counts for that they are made for, and a whole rank."""
_LEAST_EXCESS = 1e-4
_ROUNDING = 1e-7
_NAMES, _CODE = 1 << 24, 7_920_007
"""Of classes: two that have the same by chance only begin badly."""


class Classes(NamedTuple):
    """H classes of ranks."""

    heavy: Ints
    """The heavy elements, G of them."""
    heavy_HG: Ints
    """How many of each a rank of the class holds."""
    load_HK: Floats
    most_H: Floats
    """The most ranks that can be in the class."""


class Box(NamedTuple):
    """lower <= T <= upper, and a cost of `cutoff` at most."""

    lower_K: Floats
    upper_K: Floats
    cutoff: float


class ClassProgram:
    """Builds the program, and knows where its variables are: how many tables use each candidate, ranks per
    class, nodes per kind (what its ranks hold together; S kinds), lights per class, room per class and phase,
    T."""

    def __init__(
        self,
        problem: Problem,
        elements: Elements,
        candidates: Ints,
        classes: Classes,
        box: Box,
        *,
        scale: float,
    ) -> None:
        self.problem, self.elements, self.candidates = problem, elements, candidates
        self.classes, self.box, self.scale = classes, box, scale
        self.num_classes, self.num_phases = classes.load_HK.shape
        self._place_C = np.full(len(problem.type_C), -1)
        self._place_C[candidates] = np.arange(len(candidates))
        self._groups = np.flatnonzero(self._place_C[problem.candidate_P] >= 0)
        self._used = self._place_C[problem.candidate_P[self._groups]]
        self.light = np.setdiff1d(elements.element_P[self._groups], classes.heavy)
        self._varying = elements.varying_P[self._groups]
        self.split = np.unique(self._varying[self._varying >= 0])
        self.num_lights = len(self.light) + len(self.split)
        self.first_class = len(candidates)
        in_node_HG = classes.heavy_HG * elements.in_node_E[classes.heavy]
        kinds_SG, self._kind_H = np.unique(in_node_HG, axis=0, return_inverse=True)
        self._kinds_SG = kinds_SG if in_node_HG.any() else kinds_SG[:0]
        self.first_node = self.first_class + self.num_classes
        self.first_light = self.first_node + len(self._kinds_SG)
        self.first_load = self.first_light + self.num_lights * self.num_classes
        self.first_slowest = self.first_load + self.num_classes * self.num_phases
        self.num_columns = self.first_slowest + self.num_phases
        self._spread = (
            self.first_light
            + np.arange(self.num_lights)[:, None] * self.num_classes
            + np.arange(self.num_classes)
        )
        self._rows = Rows(self.num_columns)
        code_G = (classes.heavy + 1) ** 5 * _CODE % _NAMES
        self._name_H = classes.heavy_HG @ code_G % _NAMES
        self._name_S = self._kinds_SG @ code_G % _NAMES
        self._in_node = classes.heavy[self._kinds_SG.any(axis=0)]
        self._tables_Y = np.bincount(problem.type_T).astype(np.float64)

    @property
    def on_light_LH(self) -> Ints:
        """The columns that say how many of each light element are on a class."""
        on_light_LH: Ints = self._spread[: len(self.light)]
        return on_light_LH

    def build(self) -> LinearProgram:
        """Minimises the cost over the relaxation of plans in the box."""
        for part in (self._count, self._presence, self._nodes, self._loads, self._products):
            part()
        slowest = self.first_slowest + np.arange(self.num_phases)
        add_largest(self._rows, self.problem, self.candidates, slowest, self.scale)
        cost = self._cost()
        bytes_C = self.problem.mean_bytes_C()[self.candidates] / self.problem.memory_cap
        self._rows.add(np.arange(len(self.candidates)), bytes_C, -INFINITY, 1.0)
        self._rows.add(np.flatnonzero(cost), cost[cost != 0], -INFINITY, self.box.cutoff)
        return self._rows.program(cost, *self._bounds())

    def keys(self, cuts: Sequence[ClassCut]) -> Ints:
        """What tells the variables and the rows, those of `cuts` last, apart in all programs of a way."""
        names, nodes, phases = self._name_H[:, None], self._name_S, np.arange(self.num_phases)
        split = self.split[:, None]
        element_V = self.elements.element_V[self.split]
        heavy = [element for element in self._in_node if (element_V == element).any()]
        num_largest = int((self._tables_Y == 1).sum()) * self.num_phases
        parts: tuple[tuple[int, Ints | int, Ints | int], ...] = (
            *((0, self.candidates, 0), (1, self._name_H, 0), (2, nodes, 0)),
            *((3, self.light[:, None], self._name_H), (4, split, self._name_H)),
            *((5, names, phases), (6, phases, 0)),
            *((FIRST_ROW, np.arange(len(self._tables_Y)), 0), (17, 0, 0)),
            *((18, self.classes.heavy, 0), (18, self.light, 0), (19, self.split, 0)),
            *((20, split, self._name_H), (21, nodes, 0)),
            *((22, nodes, element) for element in heavy),
            *((kind, names, phases) for kind in range(23, 28)),
            *((28, phases, 0), (29, np.arange(num_largest), 0), (30, np.arange(2), 0)),
            *((31, cut.name, int(1e3 * cut.factor) * self.num_phases + cut.phase) for cut in cuts),
        )
        return np.concatenate([key(kind, first, second) for kind, first, second in parts])

    def _cost(self) -> Floats:
        cost = np.zeros(self.num_columns)
        cost[self.first_slowest :] = 1.0
        cost[: len(self.candidates)] = self.problem.common_C[self.candidates] / self.scale
        return cost

    def _bounds(self) -> tuple[Floats, Floats]:
        classes, elements = self.classes, self.elements
        lower, upper = np.zeros(self.num_columns), np.full(self.num_columns, INFINITY)
        lower[self.first_slowest :] = self.box.lower_K
        upper[self.first_slowest :] = self.box.upper_K
        upper[self.first_class : self.first_node] = classes.most_H
        least_LK = np.concatenate(
            (elements.still_EK[self.light], elements.still_EK[elements.element_V[self.split]])
        )
        # What varies comes on top of its element, which is in the class's load where it is heavy.
        heavy_V = np.isin(elements.element_V[self.split], classes.heavy)
        least_LK[len(self.light) :][heavy_V] = 0.0
        full_LH = (classes.load_HK[None] + least_LK[:, None] > self.box.upper_K * TIGHT + 1e-12).any(axis=2)
        upper[self.first_light : self.first_load][full_LH.ravel()] = 0.0
        return lower, upper

    def error(self, x: Floats) -> Floats:
        """How far room [K] is from numbers of ranks times T, summed over classes."""
        ranks_H = x[self.first_class : self.first_node]
        room_HK = x[self.first_load : self.first_slowest].reshape(self.num_classes, self.num_phases)
        error_K: Floats = np.abs(room_HK - ranks_H[:, None] * x[self.first_slowest :]).sum(axis=0)
        return error_K

    def _count(self) -> None:
        """Each table uses a candidate, each rank is in a class, elements are as many as candidates say."""
        classes, elements, rows = self.classes, self.elements, self._rows
        candidate = np.arange(len(self.candidates))
        tables_Y = self._tables_Y
        rows.add_each(self.problem.type_C[self.candidates], candidate, 1.0, tables_Y, tables_Y)
        ranks = float(self.problem.num_ranks)
        rows.add(self.first_class + np.arange(self.num_classes), np.ones(self.num_classes), ranks, ranks)
        order_E = np.full(len(elements.still_EK), -1)
        order_E[classes.heavy] = np.arange(len(classes.heavy))
        order_E[self.light] = len(classes.heavy) + np.arange(len(self.light))
        class_G, heavy_G = np.nonzero(classes.heavy_HG)
        light_row = np.repeat(len(classes.heavy) + np.arange(len(self.light)), self.num_classes)
        heavy_count = classes.heavy_HG[class_G, heavy_G]
        num_elements = len(classes.heavy) + len(self.light)
        rows.add_each(
            np.concatenate((heavy_G, light_row, order_E[elements.element_P[self._groups]])),
            np.concatenate((self.first_class + class_G, self._spread[: len(self.light)].ravel(), self._used)),
            np.concatenate((heavy_count, np.ones(len(light_row)), -elements.count_P[self._groups])),
            np.zeros(num_elements),
            np.zeros(num_elements),
        )
        cut = self._varying >= 0
        split = self._spread[len(self.light) :]
        none = np.zeros(len(self.split))
        rows.add_each(
            np.append(
                np.repeat(np.arange(len(self.split)), self.num_classes),
                np.searchsorted(self.split, self._varying[cut]),
            ),
            np.append(split.ravel(), self._used[cut]),
            np.append(np.ones(split.size), -elements.uses_P[self._groups[cut]]),
            none,
            none,
        )

    def _presence(self) -> None:
        """What of a split table is on a class is there with its parts, for each of them no more than the
        whole, and no more than a rank of the class has room for."""
        classes, elements = self.classes, self.elements
        split = self._spread[len(self.light) :]
        row = np.arange(split.size).reshape(split.shape)
        element_V = elements.element_V[self.split]
        heavy_V = np.isin(element_V, classes.heavy)
        heavy = np.flatnonzero(heavy_V)
        order_E = np.full(len(elements.still_EK), -1)
        order_E[classes.heavy] = np.arange(len(classes.heavy))
        count_XH = classes.heavy_HG[:, order_E[element_V[heavy]]].T
        light = np.flatnonzero(~heavy_V)
        present = self._spread[np.searchsorted(self.light, element_V[light])]
        ranks = np.tile(self.first_class + np.arange(self.num_classes), len(heavy))
        room_VH = self._room()
        self._rows.add_each(
            np.concatenate((row.ravel(), row[heavy].ravel(), row[light].ravel())),
            np.concatenate((split.ravel(), ranks, present.ravel())),
            -np.concatenate(
                (
                    -np.ones(split.size),
                    np.minimum(count_XH, room_VH[heavy]).ravel(),
                    np.minimum(1.0, room_VH[light]).ravel(),
                )
            ),
            np.full(split.size, -INFINITY),
            np.zeros(split.size),
        )

    def _room(self) -> Floats:
        """The largest share [V, H] of what varies of a split table that a rank of a class has room for."""
        elements = self.elements
        element_V = elements.element_V[self.split]
        still_VK = np.where(
            np.isin(element_V, self.classes.heavy)[:, None], 0.0, elements.still_EK[element_V]
        )
        room_VHK = self.box.upper_K * TIGHT - self.classes.load_HK - still_VK[:, None]
        varying_VK = elements.varying_VK[self.split]
        with np.errstate(divide="ignore", invalid="ignore"):
            share_VHK = np.where(varying_VK[:, None] > 0, (room_VHK + 1e-9) / varying_VK[:, None], np.inf)
        share_VH: Floats = share_VHK.min(axis=2, initial=np.inf)
        return np.maximum(share_VH, 0.0)

    def _nodes(self) -> None:
        """Ranks that hold the same elements in nodes are whole nodes, with all of what varies with them."""
        classes, elements = self.classes, self.elements
        if not len(self._kinds_SG):
            return
        ranks = self.first_class + np.arange(self.num_classes)
        self._in_nodes(ranks[None], np.full(len(self._kinds_SG), float(self.problem.node_size)))
        element_V = elements.element_V[self.split]
        for order in np.flatnonzero(self._kinds_SG.any(axis=0)):
            parts = self._spread[len(self.light) :][element_V == classes.heavy[order]]
            if len(parts):
                self._in_nodes(parts, self._kinds_SG[:, order])

    def _in_nodes(self, columns_XH: Ints, per_node_S: Floats | Ints) -> None:
        """The columns of the classes of a kind of node add up to so much per node."""
        kind = np.arange(len(self._kinds_SG))
        none = np.zeros(len(kind))
        self._rows.add_each(
            np.append(np.tile(self._kind_H, len(columns_XH)), kind),
            np.append(columns_XH, self.first_node + kind),
            np.append(np.ones(columns_XH.size), -per_node_S),
            none,
            none,
        )

    def _loads(self) -> None:
        """What lies on a class fits into its room."""
        elements = self.elements
        loads = (elements.still_EK[self.light], elements.varying_VK[self.split])
        shape = (self.num_lights, self.num_classes, self.num_phases)
        hk = np.arange(self.num_classes * self.num_phases)
        piece_row = np.broadcast_to(hk.reshape(shape[1:]), shape)
        piece_column = np.broadcast_to(self._spread[:, :, None], shape)
        piece_load = np.broadcast_to(np.concatenate(loads)[:, None, :], shape)
        some = piece_load > 0
        ranks = np.repeat(self.first_class + np.arange(self.num_classes), self.num_phases)
        self._rows.add_each(
            np.concatenate((piece_row[some], hk, hk)),
            np.concatenate((piece_column[some], ranks, self.first_load + hk)),
            np.concatenate((piece_load[some], self.classes.load_HK.ravel(), np.full(len(hk), -1.0))),
            np.full(len(hk), -INFINITY),
            np.zeros(len(hk)),
        )

    def cuts(self, x: Floats, most: int) -> list[ClassCut]:
        """The rows, `most` of them, that `x` violates most, and no plan does.

        What lies on a rank as one fits: sum_e load_e n_e <= room = upper - load of the class. So for any
        factor, sum_e floor(factor load_e) n_e <= floor(factor room), and the sum over the ranks of the class
        holds as well (Chvatal and Gomory's cuts; see Conforti, Cornuejols and Zambelli, Integer Programming,
        5.2).
        """
        on_LH = self.on_light_LH
        used = x[on_LH].sum(axis=1) > _LEAST_EXCESS
        ranks_H = x[self.first_class : self.first_node]
        found: list[tuple[float, ClassCut]] = []
        for phase in range(self.num_phases):
            load_L = self.elements.still_EK[self.light[used], phase]
            factor_Q = _factors(load_L, float(self.box.upper_K[phase]))
            if not len(factor_Q):
                continue
            weight_QL, limit_QH = self._rounded(phase, factor_Q, load_L)
            excess_QH = (weight_QL @ x[on_LH[used]] - limit_QH * ranks_H) / factor_Q[:, None]
            for kind, best in enumerate(excess_QH.argmax(axis=0)):
                if excess_QH[best, kind] > _LEAST_EXCESS:
                    cut = ClassCut(int(self._name_H[kind]), phase, float(factor_Q[best]))
                    found.append((-float(excess_QH[best, kind]), cut))
        return [cut for _, cut in sorted(found)[:most]]

    def rows(self, cuts: Sequence[ClassCut]) -> tuple[Rows, list[ClassCut]]:
        """The rows of the cuts of classes that there are, and these."""
        rows, mine = Rows(self.num_columns), []
        for cut in cuts:
            for kind in np.flatnonzero(self._name_H == cut.name)[:1]:
                load_L = self.elements.still_EK[self.light, cut.phase]
                weight_QL, limit_QH = self._rounded(cut.phase, np.array([cut.factor]), load_L)
                columns = np.append(self._spread[: len(self.light), kind], self.first_class + kind)
                rows.add(columns, np.append(weight_QL[0], -limit_QH[0, kind]), -INFINITY, 0.0)
                mine.append(cut)
        return rows, mine

    def _rounded(self, phase: int, factor_Q: Floats, load_L: Floats) -> tuple[Floats, Floats]:
        """What elements count [Q, L], and what a rank of a class has room for [Q, H]."""
        room_H = self.box.upper_K[phase] - self.classes.load_HK[:, phase] + _ROUNDING
        weight_QL = np.floor(factor_Q[:, None] * load_L + 1e-8)
        return weight_QL, np.floor(factor_Q[:, None] * room_H + 1e-5)

    def _products(self) -> None:
        """McCormick's envelope of a class's room, its number of ranks times T; all classes together have
        room for R times T."""
        num_classes, num_phases, box = self.num_classes, self.num_phases, self.box
        hk = np.arange(num_classes * num_phases)
        room, ranks = self.first_load + hk, self.first_class + hk // num_phases
        most = np.repeat(self.classes.most_H, num_phases)
        slowest = np.tile(self.first_slowest + np.arange(num_phases), num_classes)
        lower, upper = np.tile(box.lower_K, num_classes), np.tile(box.upper_K, num_classes)
        upper = np.minimum(upper, box.cutoff)
        ones, free = np.ones(len(hk)), np.full(len(hk), INFINITY)
        two, pair = np.tile(hk, 2), np.append(room, ranks)
        three, triple = np.tile(hk, 3), np.concatenate((room, ranks, slowest))
        add = self._rows.add_each
        add(two, pair, np.append(ones, -upper), -free, 0 * free)
        add(two, pair, np.append(ones, -lower), 0 * free, free)
        add(three, triple, np.concatenate((ones, -lower, -most)), -free, -lower * most)
        add(three, triple, np.concatenate((ones, -upper, -most)), -upper * most, free)
        for phase in range(num_phases):
            columns = np.append(room[phase::num_phases], self.first_slowest + phase)
            self._rows.add(columns, np.append(np.ones(num_classes), -float(self.problem.num_ranks)), 0.0, 0.0)


def _factors(load_N: Floats, upper: float) -> Floats:
    """Factors that make a whole number of one of the loads."""
    sizes = np.unique(load_N[load_N > 1e-6].round(10))
    factors = np.unique(np.arange(1, _MOST_FACTOR + 1)[:, None] / sizes)
    return np.asarray(factors[factors * upper < _MOST_WEIGHT])
