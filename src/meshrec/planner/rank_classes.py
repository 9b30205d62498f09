"""A tighter relaxation for few types of tables: ranks in classes, by the heavy tables that they hold whole.

A rank that holds a heavy table has little room for anything else, in any phase, and the mean over ranks
does not know it. So ranks are divided into classes, one for each set of heavy tables that fits under the
box's upper limits together (*heavy*: a whole table that takes a large part of a limit). Variables: how many
ranks are in each class, how many tables use each candidate, and how much of every lighter piece goes to
each class. The ranks of a class together have that many times the limit as room. All of it is linear:

    load_hk >= m_h heavy_hk + sum_l piece_lk f_lh,    lower_k m_h <= load_hk <= upper_k m_h,
    load_hk <= lower_k m_h + (T_k - lower_k) most_h,    sum_h load_hk <= R T_k.

The second line says load_hk <= m_h T_k, which is not linear, for m_h <= most_h (McCormick's envelope).
Lighter pieces may be cut anywhere, so every plan, with even cuts or uneven ones, is a solution.

*Grid*: in the phase where whole tables take multiples of one unit (the width of embeddings), the sum of
those on a rank is a multiple of it. Parts of tables that are summed in their node are off this grid, in
multiples of a step of their own: classes are told apart by how many steps a rank has, and those with more
steps, or with parts of any width, are the ones without a grid.
"""

from typing import NamedTuple

import numpy as np

from meshrec.planner.highs import INFINITY, LinearProgram, solve_lp, sparse_matrix
from meshrec.planner.problem import Problem, Scope
from meshrec.planner.relaxation import Relaxed
from meshrec.planner.types import Bools, Floats, Ints

_HEAVY = 0.3
"""A whole table is heavy if it takes more than this part of a limit."""
_MOST_CLASSES = 16
_MOST_STEPS = 1
_MOST_VARIABLES = 4000
_USED = 1e-6
_TIGHT = 1 + 1e-9


class _Elements(NamedTuple):
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
    steps_E: Floats
    """Steps off the grid; 0 for elements on it, NaN for those that are neither."""
    step: float
    """A step in seconds of the phase with the grid."""
    odd_V: Bools


class _Classes(NamedTuple):
    """H classes of ranks."""

    heavy: Ints
    """The heavy elements, G of them."""
    heavy_HG: Ints
    """How many of each a rank of the class holds."""
    load_HK: Floats
    most_H: Floats
    """The most ranks that can be in the class."""
    steps_H: Ints
    """Steps off the grid, or -1 for any."""


class ClassRelaxation:
    """See above; `allowed_C` are the candidates to choose from."""

    def __init__(self, problem: Problem, allowed_C: Bools, scale: float) -> None:
        self._problem = problem
        self._allowed_C = allowed_C
        self._scale = scale
        self._load_PK = problem.load_PK / scale
        self._largest_CK = problem.largest_load_CK() / scale
        self._tables_Y = np.bincount(problem.type_T).astype(np.float64)
        self._ranks_C = problem.ranks_per_piece_C()
        self._elements = self._find_elements(allowed_C[problem.candidate_P])
        self._is_grid = not (self._elements.steps_E.any() or self._elements.odd_V.any())
        self._variables = 1000

    @staticmethod
    def serves(problem: Problem, allowed_C: Bools) -> bool:
        """Whether the problem is small enough."""
        return int(allowed_C[problem.candidate_P].sum()) <= _MOST_VARIABLES // 20

    @property
    def work(self) -> int:
        """What one more solution costs."""
        return 300_000 + 500 * self._variables

    def solve(
        self, lower_K: Floats, upper_K: Floats, cutoff: float, cost_K: Floats | None = None
    ) -> Relaxed | None:
        """See `Relaxation`."""
        if self._is_grid:
            lower_K, upper_K = self._on_grid(lower_K, upper_K)
            if (lower_K > upper_K).any():
                return None
        admitted_C = (self._largest_CK <= upper_K * _TIGHT).all(axis=1) & self._allowed_C
        if len(np.unique(self._problem.type_C[admitted_C])) < len(self._tables_Y):
            return None
        classes = self._classes(admitted_C, upper_K)
        light = np.setdiff1d(self._elements.element_P[admitted_C[self._problem.candidate_P]], classes.heavy)
        num_lights = len(light) + len(self._elements.varying_VK)
        layout = _Columns(np.flatnonzero(admitted_C), num_lights, len(classes.most_H), len(lower_K))
        program = self._program(layout, light, classes, (lower_K, upper_K), cutoff, cost_K)
        self._variables = len(program.cost)
        optimum = solve_lp(program)
        if optimum is None:
            return None
        share_C = np.zeros(len(admitted_C))
        share_C[layout.candidates] = optimum.x[: len(layout.candidates)]
        ranks_H = optimum.x[layout.first_class : layout.first_light]
        load_HK = optimum.x[layout.first_load : layout.first_slowest].reshape(len(ranks_H), -1)
        slowest_K = optimum.x[layout.first_slowest :]
        used_H = ranks_H > _USED
        peak_K = (load_HK[used_H] / ranks_H[used_H, None]).max(axis=0)
        return Relaxed(optimum.objective, share_C, slowest_K, np.maximum(slowest_K, (slowest_K + peak_K) / 2))

    def _find_elements(self, allowed_P: Bools) -> _Elements:
        problem = self._problem
        fixed_PK = np.minimum(problem.fixed_PK / self._scale, self._load_PK)
        whole_C = [
            layout.scope is Scope.RANKS and len(layout.widths) == 1 and layout.row_parts == 1
            for layout in problem.layouts_C
        ]
        whole_P = np.array(whole_C)[problem.candidate_P]
        self.unit_K = self._units(whole_P & allowed_P)
        still_PK = np.where(whole_P[:, None], self._load_PK, fixed_PK)
        count_P = (problem.count_P * self._ranks_C[problem.candidate_P]).astype(np.float64)
        varying_PK = count_P[:, None] * (self._load_PK - still_PK)
        type_P = problem.type_C[problem.candidate_P]
        key_P = np.column_stack((type_P, whole_P, still_PK.round(12)))
        _, first_E, element_P = np.unique(key_P, axis=0, return_index=True, return_inverse=True)
        element_P = element_P.ravel()
        splits = np.flatnonzero(varying_PK.max(axis=1) > 1e-12)
        key_S = np.column_stack((element_P[splits], varying_PK[splits].round(12)))
        _, first_V, varying_S = np.unique(key_S, axis=0, return_index=True, return_inverse=True)
        varying_P = np.full(len(type_P), -1)
        varying_P[splits] = varying_S.ravel()
        still_EK, varying_VK = still_PK[first_E], varying_PK[splits[first_V]]
        on_grid = self.unit_K > 0
        allowed_E = np.isin(np.arange(len(still_EK)), element_P[allowed_P])
        step, steps_E = self._steps(np.where(allowed_E[:, None], still_EK, 0.0))
        return _Elements(
            still_EK=still_EK,
            type_E=type_P[first_E],
            element_P=element_P,
            count_P=count_P,
            varying_VK=varying_VK,
            element_V=element_P[splits[first_V]],
            varying_P=varying_P,
            steps_E=steps_E,
            step=step,
            odd_V=np.asarray(((varying_VK > 1e-12) & on_grid).any(axis=1)),
        )

    def _steps(self, still_EK: Floats) -> tuple[float, Floats]:
        """The step off the grid, and how many each element takes."""
        steps_E = np.zeros(len(still_EK))
        phase = int(self.unit_K.argmax())
        if self.unit_K[phase] <= 0:
            return 1.0, steps_E
        load_E = still_EK[:, phase]
        odd = np.flatnonzero(~_multiples(load_E, self.unit_K[phase]))
        if not len(odd):
            return 1.0, steps_E
        step = float(load_E[odd].min())
        steps_E[odd] = np.where(_multiples(load_E[odd], step), np.rint(load_E[odd] / step), np.nan)
        return step, steps_E

    def _units(self, whole_P: Bools) -> Floats:
        """The load that those of all whole tables are multiples of, in the phase where whole tables take most
        of such; 0 in others."""
        load_WK = self._load_PK[whole_P]
        units = np.zeros(self._load_PK.shape[1])
        for phase in np.argsort(-load_WK.sum(axis=0), kind="stable"):
            positive = load_WK[load_WK[:, phase] > 0, phase]
            if (
                len(positive)
                and _multiples(positive, positive.min()).all()
                and len(np.unique(positive)) <= 20
            ):
                units[phase] = positive.min()
                break
        return units

    def _on_grid(self, lower_K: Floats, upper_K: Floats) -> tuple[Floats, Floats]:
        """The box's part with T on the grid: no piece is anything else."""
        unit_K = np.where(self.unit_K > 0, self.unit_K, 1.0)
        up_K, down_K = np.ceil(lower_K / unit_K - 1e-6) * unit_K, np.floor(upper_K / unit_K + 1e-6) * unit_K
        return np.where(self.unit_K > 0, up_K, lower_K), np.where(self.unit_K > 0, down_K, upper_K)

    def _classes(self, admitted_C: Bools, upper_K: Floats) -> _Classes:
        """The classes by the heaviest elements: by as many as keep the classes few."""
        elements = self._elements
        admitted_P = admitted_C[self._problem.candidate_P]
        present = np.unique(elements.element_P[admitted_P])
        weight = (elements.still_EK[present] / np.maximum(upper_K, 1e-12)).max(axis=1)
        order = np.argsort(-weight, kind="stable")
        heavy = present[order[weight[order] > _HEAVY]]
        varying = np.unique(elements.varying_P[admitted_P & (elements.varying_P >= 0)])
        has_steps = bool((elements.steps_E[present] != 0).any() or elements.odd_V[varying].any())
        steps = np.append(np.arange(_MOST_STEPS), -1) if has_steps else np.zeros(1, np.int64)
        found = None
        while found is None:
            found = self._sets(heavy, upper_K, _MOST_CLASSES // len(steps))
            heavy = heavy if found is not None else heavy[:-1]
        heavy_HG = np.array(found, np.int64).reshape(len(found), len(heavy))
        most_G = self._most_ranks(heavy, admitted_P)
        with np.errstate(divide="ignore"):
            most_HG = np.where(heavy_HG > 0, np.floor(most_G / np.maximum(heavy_HG, 1)), np.inf)
        most_H = np.minimum(most_HG.min(axis=1, initial=np.inf), self._problem.num_ranks)
        heavy_HG, most_H = np.repeat(heavy_HG, len(steps), axis=0), np.repeat(most_H, len(steps))
        load_HK = heavy_HG @ elements.still_EK[heavy]
        return _Classes(heavy, heavy_HG, load_HK, most_H, np.tile(steps, len(found)))

    def _upper(self, classes: _Classes, upper_K: Floats) -> Floats:
        """Limits [H, K] of the classes: what is off the grid, and then whole units."""
        upper_HK = np.tile(upper_K, (len(classes.steps_H), 1))
        phase = int(self.unit_K.argmax())
        unit = self.unit_K[phase]
        if unit > 0:
            base_H = classes.load_HK[:, phase] + np.maximum(classes.steps_H, 0) * self._elements.step
            on_grid_H = base_H + np.floor((upper_K[phase] - base_H) / unit + 1e-6) * unit
            upper_HK[:, phase] = np.where(classes.steps_H >= 0, on_grid_H, upper_K[phase])
        return upper_HK

    def _most_ranks(self, heavy: Ints, admitted_P: Bools) -> Floats:
        """The most ranks that can hold each heavy element."""
        elements = self._elements
        parts_E = np.zeros(len(elements.still_EK))
        np.maximum.at(parts_E, elements.element_P[admitted_P], elements.count_P[admitted_P])
        most: Floats = self._tables_Y[elements.type_E[heavy]] * parts_E[heavy]
        return most

    def _sets(self, heavy: Ints, upper_K: Floats, most: int) -> list[tuple[int, ...]] | None:
        """All multisets of heavy elements that one rank can hold; None where they are more than `most`."""
        found: list[tuple[int, ...]] = []
        type_G = self._elements.type_E[heavy]
        open_sets = [((0,) * len(heavy), 0, np.zeros(len(upper_K)))]
        while open_sets:
            counts, first, load_K = open_sets.pop()
            found.append(counts)
            if len(found) > most and len(heavy):
                return None
            for index in range(first, len(heavy)):
                more_K = load_K + self._elements.still_EK[heavy[index]]
                # A rank holds one part of a table at most.
                same = sum(n for n, kind in zip(counts, type_G, strict=True) if kind == type_G[index])
                if same < self._tables_Y[type_G[index]] and (more_K <= upper_K * _TIGHT).all():
                    more = (*counts[:index], counts[index] + 1, *counts[index + 1 :])
                    open_sets.append((more, index, more_K))
        return found

    def _program(
        self,
        layout: "_Columns",
        light: Ints,
        classes: _Classes,
        box: tuple[Floats, Floats],
        cutoff: float,
        cost_K: Floats | None,
    ) -> LinearProgram:
        lower_K, upper_K = box
        problem, num_ranks = self._problem, float(self._problem.num_ranks)
        num_classes, num_phases = classes.load_HK.shape
        candidates = layout.candidates
        upper_HK = self._upper(classes, upper_K)
        cost = np.zeros(layout.num_columns)
        cost[: len(candidates)] = problem.common_C[candidates] / self._scale
        cost[layout.first_slowest :] = 1.0
        rows = _Rows(layout.num_columns)
        rows.add_each(
            problem.type_C[candidates], np.arange(len(candidates)), 1.0, self._tables_Y, self._tables_Y
        )
        elements = self._elements
        h, k = np.arange(num_classes), np.arange(num_phases)
        rows.add(layout.first_class + h, np.ones(num_classes), num_ranks, num_ranks)
        place_C = np.full(len(problem.type_C), -1)
        place_C[candidates] = np.arange(len(candidates))
        groups = np.flatnonzero(place_C[problem.candidate_P] >= 0)
        used = place_C[problem.candidate_P[groups]]
        # Elements on classes are as many as the candidates say.
        class_G, heavy_G = np.nonzero(classes.heavy_HG)
        spread = layout.first_light + np.arange(layout.num_lights)[:, None] * num_classes + h
        split = spread[len(light) :]
        order_E = np.full(len(elements.still_EK), -1)
        order_E[classes.heavy] = np.arange(len(classes.heavy))
        order_E[light] = len(classes.heavy) + np.arange(len(light))
        num_elements = len(classes.heavy) + len(light)
        light_row = np.repeat(len(classes.heavy) + np.arange(len(light)), num_classes)
        rows.add_each(
            np.concatenate((heavy_G, light_row, order_E[elements.element_P[groups]])),
            np.concatenate((layout.first_class + class_G, spread[: len(light)].ravel(), used)),
            np.concatenate(
                (classes.heavy_HG[class_G, heavy_G], np.ones(len(light_row)), -elements.count_P[groups])
            ),
            np.zeros(num_elements),
            np.zeros(num_elements),
        )
        varying = elements.varying_P[groups]
        cut = varying >= 0
        num_varying = len(elements.varying_VK)
        rows.add_each(
            np.append(np.repeat(np.arange(num_varying), num_classes), varying[cut]),
            np.append(split.ravel(), used[cut]),
            np.append(np.ones(split.size), -np.ones(cut.sum())),
            np.zeros(num_varying),
            np.zeros(num_varying),
        )
        # No more of a table is on a class than the whole of it for every part there.
        with_element = order_E[elements.element_V]
        is_heavy = (with_element >= 0) & (with_element < len(classes.heavy))
        exact = np.flatnonzero(classes.steps_H >= 0)
        stepping = np.flatnonzero(elements.steps_E[light] != 0)
        if len(exact) < num_classes:
            rows.add_each(
                np.append(np.repeat(np.arange(len(exact)), len(stepping)), np.arange(len(exact))),
                np.append(spread[stepping][:, exact].T.ravel(), layout.first_class + exact),
                np.append(
                    np.tile(np.nan_to_num(elements.steps_E[light][stepping]), len(exact)),
                    -classes.steps_H[exact].astype(np.float64),
                ),
                np.zeros(len(exact)),
                np.zeros(len(exact)),
            )
            self._add_free(rows, layout, light, classes, spread)
        with_heavy = np.flatnonzero(is_heavy)
        count = np.arange(len(with_heavy) * num_classes)
        rows.add_each(
            np.tile(count, 2),
            np.append(split[with_heavy].ravel(), np.tile(layout.first_class + h, len(with_heavy))),
            np.append(np.ones(len(count)), -classes.heavy_HG[:, with_element[with_heavy]].T.ravel()),
            np.full(len(count), -INFINITY),
            np.zeros(len(count)),
        )
        light_LK = np.concatenate((elements.still_EK[light], elements.varying_VK))
        least_LK = np.concatenate((elements.still_EK[light], elements.still_EK[elements.element_V]))
        # What varies comes on top of its element, which is in the class's load where it is heavy.
        least_LK[len(light) :][is_heavy] = 0.0
        odd_L = np.concatenate((np.isnan(elements.steps_E[light]), elements.odd_V))
        load_columns = layout.first_load + h[:, None] * num_phases + k
        hk = h[:, None] * num_phases + k
        piece_row = np.broadcast_to(hk, (layout.num_lights, num_classes, num_phases))
        piece_column = np.broadcast_to(spread[:, :, None], piece_row.shape)
        piece_load = np.broadcast_to(light_LK[:, None, :], piece_row.shape)
        some = piece_load > 0
        class_columns = np.repeat(layout.first_class + h, num_phases)
        rows.add_each(
            np.concatenate((piece_row[some], hk.ravel(), hk.ravel())),
            np.concatenate((piece_column[some], class_columns, load_columns.ravel())),
            np.concatenate((piece_load[some], classes.load_HK.ravel(), np.full(hk.size, -1.0))),
            np.full(hk.size, -INFINITY),
            np.zeros(hk.size),
        )
        two_rows, two_columns = np.tile(hk.ravel(), 2), np.append(load_columns.ravel(), class_columns)
        ones, free = np.ones(hk.size), np.full(hk.size, INFINITY)
        most = np.minimum(upper_HK, 10 * cutoff)
        rows.add_each(two_rows, two_columns, np.append(ones, -most.ravel()), -free, 0 * free)
        low_HK = np.tile(lower_K, (num_classes, 1)).ravel()
        rows.add_each(two_rows, two_columns, np.append(ones, -low_HK), 0 * free, free)
        most_HK = np.repeat(classes.most_H, num_phases)
        rows.add_each(
            np.append(two_rows, hk.ravel()),
            np.append(two_columns, np.tile(layout.first_slowest + k, num_classes)),
            np.concatenate((ones, -low_HK, -most_HK)),
            -free,
            -low_HK * most_HK,
        )
        for phase in range(num_phases):
            columns = np.append(load_columns[:, phase], layout.first_slowest + phase)
            rows.add(columns, np.append(np.ones(num_classes), -num_ranks), -INFINITY, 0.0)
        rows.add(
            np.arange(len(candidates)),
            problem.mean_bytes_C()[candidates] / problem.memory_cap,
            -INFINITY,
            1.0,
        )
        rows.add(np.flatnonzero(cost), cost[cost != 0], -INFINITY, cutoff)
        lower, upper = np.zeros(layout.num_columns), np.full(layout.num_columns, INFINITY)
        lower[layout.first_slowest :], upper[layout.first_slowest :] = lower_K, upper_K
        full_LH = (classes.load_HK[None] + least_LK[:, None] > upper_HK * _TIGHT + 1e-12).any(axis=2)
        full_LH |= odd_L[:, None] & (classes.steps_H >= 0)
        upper[layout.first_light : layout.first_load][full_LH.ravel()] = 0.0
        if cost_K is not None:
            cost = np.zeros(layout.num_columns)
            cost[layout.first_slowest :] = cost_K
        return rows.program(cost, lower, upper)

    def _add_free(
        self, rows: "_Rows", layout: "_Columns", light: Ints, classes: _Classes, spread: Ints
    ) -> None:
        """A rank without a grid has more steps than the others, or a part of any width."""
        elements = self._elements
        weight_E = np.nan_to_num(elements.steps_E, nan=_MOST_STEPS)
        weight_E[elements.element_V[elements.odd_V]] = _MOST_STEPS
        any_E = np.where(np.isin(np.arange(len(weight_E)), elements.element_V[elements.odd_V]), weight_E, 0.0)
        free = np.flatnonzero(classes.steps_H < 0)
        weight_H = classes.heavy_HG[free] @ any_E[classes.heavy] - _MOST_STEPS
        count = np.arange(len(free))
        rows.add_each(
            np.append(np.repeat(count, len(light)), count),
            np.append(spread[: len(light)][:, free].T.ravel(), layout.first_class + free),
            np.append(np.tile(weight_E[light], len(free)), weight_H),
            np.zeros(len(free)),
            np.full(len(free), INFINITY),
        )


class _Columns:
    """Where which variables are: candidates, ranks per class, lights per class, loads per class and phase,
    T."""

    def __init__(self, candidates: Ints, num_lights: int, num_classes: int, num_phases: int) -> None:
        self.candidates = candidates
        self.num_lights = num_lights
        self.first_class = len(candidates)
        self.first_light = self.first_class + num_classes
        self.first_load = self.first_light + num_lights * num_classes
        self.first_slowest = self.first_load + num_classes * num_phases
        self.num_columns = self.first_slowest + num_phases


class _Rows:
    """Rows of a linear program, as they come."""

    def __init__(self, num_columns: int) -> None:
        self._num_columns = num_columns
        self._num_rows = 0
        self._triplets: list[tuple[Ints, Ints, Floats]] = []
        self._limits: list[tuple[Floats, Floats]] = []

    def add(self, columns: Ints, values: Floats, lower: float, upper: float) -> None:
        """One row."""
        self.add_each(np.zeros(len(columns), np.int64), columns, values, np.array([lower]), np.array([upper]))

    def add_each(
        self, rows: Ints, columns: Ints, values: Floats | float, lower: Floats, upper: Floats
    ) -> None:
        """As many rows as `lower` and `upper` have entries; `rows` counts from the first of them."""
        values = np.broadcast_to(np.asarray(values, np.float64), rows.shape)
        some = values != 0
        self._triplets.append((rows[some] + self._num_rows, columns[some], values[some]))
        self._limits.append((lower, upper))
        self._num_rows += len(lower)

    def program(self, cost: Floats, lower: Floats, upper: Floats) -> LinearProgram:
        """The program: minimise `cost`."""
        rows, columns, values = (np.concatenate(part) for part in zip(*self._triplets, strict=True))
        row_lower, row_upper = (np.concatenate(part) for part in zip(*self._limits, strict=True))
        # Several pieces of a candidate may share an element.
        place, inverse = np.unique(columns * self._num_rows + rows, return_inverse=True)
        columns, rows = np.divmod(place, self._num_rows)
        values = np.bincount(inverse, values, len(place)).astype(np.float64)
        matrix = sparse_matrix(rows, columns, values, num_rows=self._num_rows, num_columns=self._num_columns)
        return LinearProgram(cost, lower, upper, matrix, row_lower, row_upper)


def _multiples(values: Floats, unit: Floats | float) -> Bools:
    ratio = values / unit
    result: Bools = np.abs(ratio - np.rint(ratio)) < 1e-6
    return result
