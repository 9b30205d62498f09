"""A tighter relaxation for few types of tables: ranks in classes, by the heavy tables that they hold whole.

A rank that holds a heavy table has little room for anything else, in any phase, and the mean over ranks
does not know it. So ranks are divided into classes, one for each set of heavy elements that fits under the
box's upper limits together (*heavy*: an element that takes a large part of a limit). Variables: how many
ranks m_h are in each class, how many tables use each candidate, and how much of every lighter piece goes to
each class. The ranks of a class have room for m_h T together:

    m_h heavy_hk + sum_l piece_lk f_lh <= room_hk = m_h T_k,    sum_h m_h = R,    sum_h room_hk = R T_k.

The product is not linear: McCormick's envelope takes its place, which is the tighter the narrower the box
is. What varies may be cut anywhere, so every plan, with even cuts or uneven ones, is a solution. What the
ranks of a node hold together stays there, so classes are of *kinds* of nodes, which are counted, too.

Whole elements leave gaps on a rank: what the linear program would fill them with, cuts take away (see
`ClassProgram.cuts`).
"""

import numpy as np

from meshrec.planner.class_program import TIGHT, Box, Classes, ClassProgram
from meshrec.planner.elements import Elements, find_elements, on_grid
from meshrec.planner.highs import BASIC, INFINITY, Optimum, Solver
from meshrec.planner.problem import Problem
from meshrec.planner.rank_program import RankProgram
from meshrec.planner.relaxation import FEW_CANDIDATES, MARGIN, SHRUNK, MeanRelaxation, Relaxed
from meshrec.planner.slot_program import SlotProgram, by_split, heaviest_type
from meshrec.planner.slot_sizes import steps_of_sizes, sums_of_sizes
from meshrec.planner.types import Bools, Floats, Ints
from meshrec.planner.warm_start import WarmStart

_COARSE, _FINER = (0.3, 10), (0.15, 40)
"""An element is heavy if it takes more than this part of a limit; the most classes. Finer is for a closer
look."""
_MOST_PIECES = 120
_NARROW, _ABOVE = 1.25, 1 + 1e-6
_SHRUNK_OF_SLOTS = 0.05
"""Narrowing a box once more has to be worth a program of slots, which narrows it as well."""
_ROUNDS, _MOST_CUTS = 3, 30
"""How often cuts are added to a program, and how many."""


class ClassRelaxation:
    """See above; `allowed_C` are the candidates to choose from."""

    def __init__(self, problem: Problem, allowed_C: Bools, scale: float) -> None:
        self._problem = problem
        self._scale = scale
        self._largest_CK = problem.largest_load_CK() / scale
        self._tables_Y = np.bincount(problem.type_T)
        self._elements = find_elements(problem, allowed_C, scale)
        self.grid_K = self._elements.grid_K
        self._usual_EK = _usual(self._elements, problem.node_size)
        self._has_slots = SlotProgram.suits(problem)
        self._heaviest = heaviest_type(problem, allowed_C)
        self._work = 0
        shrunk = _SHRUNK_OF_SLOTS if self._has_slots else SHRUNK
        self._mean = MeanRelaxation(problem, allowed_C, scale, shrunk=shrunk)

    @staticmethod
    def serves(problem: Problem) -> bool:
        """Whether the problem is small enough."""
        return len(problem.type_C) <= FEW_CANDIDATES

    @property
    def work(self) -> int:
        """See `Relaxation`."""
        return self._work + self._mean.work

    def solve(
        self,
        lower_K: Floats,
        upper_K: Floats,
        admitted_C: Bools,
        cutoff: float,
        start: WarmStart | None = None,
    ) -> Relaxed | None:
        """See `Relaxation`."""
        lower_K, upper_K = on_grid(self._elements, lower_K, upper_K)
        mean = self._mean.solve(lower_K, upper_K, admitted_C, cutoff, start)
        if mean is None:
            return None
        if self._has_slots:
            return self._to_be_cut(mean)
        if not self._are_few(mean.admitted_C):
            return mean
        lower_K, upper_K = on_grid(self._elements, mean.lower_K, mean.upper_K)
        mean = mean._replace(lower_K=lower_K, upper_K=upper_K)
        return self._in_classes(mean, cutoff, *_COARSE)

    def _to_be_cut(self, known: Relaxed) -> Relaxed:
        """What is known of a box, to be cut in the largest phase where much more fits on a rank from there
        on, and until there is little freedom."""
        phase = int(known.lower_K.argmax())
        lower, upper = known.lower_K[phase], known.upper_K[phase]
        cut_at_K = known.slowest_K.copy()
        steps = steps_of_sizes(self._problem, self._elements, known.admitted_C, phase, upper)
        steps = steps[(steps > _ABOVE * lower) & (steps < upper)]
        if len(steps):
            cut_at_K[phase] = steps[np.abs(steps - known.slowest_K[phase]).argmin()]
        elif upper > _NARROW * lower:
            cut_at_K[phase] = (lower + upper) / 2
        return known._replace(cut_at_K=cut_at_K)

    def _sums(self, known: Relaxed, phase: int) -> Floats:
        limit = float(known.upper_K[phase])
        return sums_of_sizes(self._problem, self._elements, known.admitted_C, phase, limit)

    def _in_classes(
        self, known: Relaxed, cutoff: float, heavy: float, most: int, seconds: float = INFINITY
    ) -> Relaxed | None:
        """What the classes' program adds to what is known of a box: nothing, where `seconds` do not do."""
        program = self._program(Box(known.lower_K, known.upper_K, cutoff), known.admitted_C, heavy, most)
        if program is None:
            return None
        solver = Solver(program.build(), as_is=True)
        solver.set_time(seconds)
        optimum, start = self._optimum(program, solver, known.start)
        self._work += solver.work
        if optimum is None or optimum.objective == -INFINITY:
            return None if optimum is None else known
        return self._relaxed(known, program, optimum, start)

    def _relaxed(
        self,
        known: Relaxed,
        program: ClassProgram | SlotProgram,
        optimum: Optimum,
        start: WarmStart | None,
    ) -> Relaxed:
        """What is known of a box with what a program's optimum adds."""
        share_C = np.zeros(len(known.share_C))
        share_C[program.candidates] = optimum.x[: len(program.candidates)]
        slowest_K = optimum.x[program.first_slowest :]
        lower_K, upper_K, admitted_C = _within(program, optimum, known.admitted_C)
        return Relaxed(
            bound=max(known.bound, optimum.objective),
            share_C=share_C,
            slowest_K=slowest_K,
            cut_at_K=slowest_K.copy(),
            lower_K=lower_K,
            upper_K=upper_K,
            admitted_C=admitted_C,
            error_K=program.error(optimum.x),
            start=start,
        )

    def _optimum(
        self, program: ClassProgram, solver: Solver, start: WarmStart | None = None
    ) -> tuple[Optimum | None, WarmStart | None]:
        """With cuts, as long as they help; and what the next program may start from."""
        rows, cuts = program.rows([] if start is None else start.cuts)
        if cuts:
            solver.add_rows(rows)
        if start is not None:
            solver.set_basis(start.basis(program.keys(cuts)))
        optimum = solver.solve()
        for _ in range(_ROUNDS):
            found = [] if optimum is None else program.cuts(optimum.x, _MOST_CUTS)
            if not found:
                break
            cuts += found
            solver.add_rows(program.rows(found)[0])
            optimum = solver.solve()
        if optimum is None or optimum.objective == -INFINITY:
            return optimum, start
        keys, at = program.keys(cuts), solver.basis()
        in_force = [
            cut for cut, at_cut in zip(cuts, at[len(at) - len(cuts) :], strict=True) if at_cut != BASIC
        ]
        return optimum, WarmStart.of(keys, at, in_force)

    def solve_closely(self, known: Relaxed, cutoff: float, seconds: float) -> Relaxed | None:
        """See `Relaxation`: with each rank told apart, with slots of ranks, or with more classes."""
        if self._has_slots:
            return self._in_slots(known, cutoff, seconds)
        if RankProgram.serves(self._problem, known.admitted_C):
            return self._solve_ranks(known, cutoff, seconds)
        if not self._are_few(known.admitted_C):
            return self._mean.solve_closely(known, cutoff, seconds)
        return self._in_classes(known, cutoff, *_FINER, seconds)

    def _in_slots(self, known: Relaxed, cutoff: float, seconds: float) -> Relaxed | None:
        lower_K, upper_K = on_grid(self._elements, known.lower_K, known.upper_K)
        if (lower_K > upper_K).any():
            return None
        box = Box(lower_K, upper_K, cutoff)
        candidates = np.flatnonzero(known.admitted_C)
        program = SlotProgram(self._problem, self._elements, candidates, box, scale=self._scale)
        if not program.is_small:
            if not self._are_few(known.admitted_C):
                return known
            coarse = self._in_classes(known, cutoff, *_COARSE, seconds)
            return coarse and self._in_classes(coarse, cutoff, *_FINER, seconds)
        solver = Solver(program.build(self._mean.cuts(lower_K, upper_K)), as_is=True)
        solver.set_time(seconds)
        solver.set_cutoff(cutoff + MARGIN)
        optimum = solver.solve()
        self._work += solver.work
        if optimum is None or optimum.objective == -INFINITY:
            return None if optimum is None else known
        relaxed = self._relaxed(known, program, optimum, None)
        phase = int(relaxed.lower_K.argmax())
        if relaxed.error_K.argmax() == phase:
            sums = self._sums(relaxed, phase)
            sums = sums[sums > _ABOVE * relaxed.slowest_K[phase]]
            relaxed.cut_at_K[phase] = sums[0] if len(sums) else relaxed.slowest_K[phase]
        return relaxed

    def is_settled_closely(self, known: Relaxed) -> bool | None:
        """See `Relaxation`."""
        if self._has_slots:
            return bool((known.cut_at_K == known.slowest_K).all())
        return RankProgram.serves(self._problem, known.admitted_C) or None

    def divisions(self, admitted_C: Bools) -> list[Bools]:
        """See `Relaxation`: by how the heaviest table is split, where there are slots."""
        return by_split(self._problem, self._heaviest, admitted_C) if self._has_slots else []

    def _solve_ranks(self, known: Relaxed, cutoff: float, seconds: float) -> Relaxed | None:
        relaxed = self.solve(known.lower_K, known.upper_K, known.admitted_C, cutoff, known.start)
        if relaxed is None:
            return None
        candidates = np.flatnonzero(relaxed.admitted_C)
        # A box may be as narrow as what counts as equal.
        lower_K = np.maximum(relaxed.lower_K - MARGIN, 0.0)
        box = Box(lower_K, relaxed.upper_K + MARGIN, cutoff + MARGIN)
        program = RankProgram(self._problem, self._elements, candidates, box, scale=self._scale)
        is_impossible = program.is_impossible(seconds)
        self._work += program.work
        return None if is_impossible else relaxed

    def _are_few(self, admitted_C: Bools) -> bool:
        """Whether the classes' program is small enough for a box of these candidates."""
        return int(admitted_C[self._problem.candidate_P].sum()) <= _MOST_PIECES

    def _program(self, box: Box, admitted_C: Bools, heavy: float, most: int) -> ClassProgram | None:
        """The program of a box; None where a type has no candidate, or no T is on the grid."""
        admitted_C = (self._largest_CK <= box.upper_K * TIGHT).all(axis=1) & admitted_C
        covers = len(np.unique(self._problem.type_C[admitted_C])) == len(self._tables_Y)
        if (box.lower_K > box.upper_K).any() or not covers:
            return None
        classes = self._classes(admitted_C, box.upper_K, heavy, most)
        return ClassProgram(
            self._problem, self._elements, np.flatnonzero(admitted_C), classes, box, scale=self._scale
        )

    def _classes(self, admitted_C: Bools, upper_K: Floats, least: float, most: int) -> Classes:
        """The classes by the heaviest elements, those that take more than `least` of a limit: by as many as
        keep the classes few."""
        elements = self._elements
        admitted_P = admitted_C[self._problem.candidate_P]
        present = np.unique(elements.element_P[admitted_P])
        weight = (self._usual_EK[present] / np.maximum(upper_K, 1e-12)).max(axis=1)
        order = np.argsort(-weight, kind="stable")
        heavy = present[order[weight[order] > least]]
        heavy_HG = self._sets(heavy, upper_K, most)
        heavy = heavy[: heavy_HG.shape[1]]
        most_G = self._most_ranks(heavy, admitted_P)
        with np.errstate(divide="ignore"):
            most_HG = np.where(heavy_HG > 0, np.floor(most_G / np.maximum(heavy_HG, 1)), np.inf)
        most_H = np.minimum(most_HG.min(axis=1, initial=np.inf), self._problem.num_ranks)
        load_HK = heavy_HG @ elements.still_EK[heavy]
        return Classes(heavy, heavy_HG, load_HK, most_H)

    def _most_ranks(self, heavy: Ints, admitted_P: Bools) -> Floats:
        """The most ranks that can hold each heavy element."""
        elements = self._elements
        parts_E = np.zeros(len(elements.still_EK))
        np.maximum.at(parts_E, elements.element_P[admitted_P], elements.count_P[admitted_P])
        most: Floats = self._tables_Y[elements.type_E[heavy]] * parts_E[heavy]
        return most

    def _sets(self, heavy: Ints, upper_K: Floats, most: int) -> Ints:
        """All multisets [H, G] of the first G heavy elements that one rank can hold, for the most elements
        that have `most` sets or fewer."""
        sets_HG = np.zeros((1, 0), np.int64)
        load_HK = np.zeros((1, len(upper_K)))
        type_G = self._elements.type_E[heavy]
        for order, element in enumerate(heavy):
            # A rank holds one part of a table at most.
            tables = self._tables_Y[type_G[order]]
            same_H = sets_HG[:, type_G[:order] == type_G[order]].sum(axis=1)
            each_K = self._elements.still_EK[element]
            loads = each_K > 0
            fits_HK = np.floor((upper_K[loads] * TIGHT - load_HK[:, loads]) / each_K[loads])
            number_H = np.clip(fits_HK.min(axis=1, initial=tables), 0, tables - same_H).astype(np.int64)
            if number_H.sum() + len(sets_HG) > most:
                break
            index = np.repeat(np.arange(len(sets_HG)), number_H + 1)
            count = np.arange(len(index)) - np.repeat(np.cumsum(number_H + 1) - number_H - 1, number_H + 1)
            sets_HG = np.column_stack((sets_HG[index], count))
            load_HK = load_HK[index] + count[:, None] * each_K
        return sets_HG


def _within(
    program: ClassProgram | SlotProgram, optimum: Optimum, admitted_C: Bools
) -> tuple[Floats, Floats, Bools]:
    """The part of the box with the plans that cost no more than the cutoff, and the candidates that they can
    use, by what the optimum's reduced costs say."""
    box = program.box
    room = box.cutoff + MARGIN - optimum.objective
    num_candidates = len(program.candidates)
    admitted_C = admitted_C.copy()
    admitted_C[program.candidates] &= optimum.reduced_costs[:num_candidates] <= room
    cost_K = optimum.reduced_costs[program.first_slowest :]
    with np.errstate(divide="ignore"):
        step_K = room / np.abs(cost_K) + MARGIN
    upper_K = np.where(cost_K > 0, np.minimum(box.upper_K, box.lower_K + step_K), box.upper_K)
    lower_K = np.where(cost_K < 0, np.maximum(box.lower_K, box.upper_K - step_K), box.lower_K)
    return lower_K, upper_K, admitted_C


def _usual(elements: Elements, node_size: int) -> Floats:
    """The loads [E, K] of a rank that holds an element; a node's ranks share what varies."""
    usual_EK = elements.still_EK.copy()
    mine_V = elements.in_node_E[elements.element_V]
    usual_EK[elements.element_V[mine_V]] += elements.varying_VK[mine_V] / node_size
    return usual_EK
