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
from meshrec.planner.highs import INFINITY, Optimum, Solver
from meshrec.planner.problem import Problem
from meshrec.planner.rank_program import RankProgram
from meshrec.planner.relaxation import FEW_CANDIDATES, MeanRelaxation, Relaxed
from meshrec.planner.types import Bools, Floats, Ints

_HEAVY, _MOST_CLASSES = 0.3, 10
"""An element is heavy if it takes more than this part of a limit."""
_HEAVY_CLOSELY, _MOST_CLOSELY = 0.15, 40
"""The same for a closer look."""
_MOST_PIECES = 120
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
        self._work = 0
        self._mean = MeanRelaxation(problem, allowed_C, scale)

    @staticmethod
    def serves(problem: Problem) -> bool:
        """Whether the problem is small enough."""
        return len(problem.type_C) <= FEW_CANDIDATES

    @property
    def work(self) -> int:
        """See `Relaxation`."""
        return self._work + self._mean.work

    def solve(self, lower_K: Floats, upper_K: Floats, admitted_C: Bools, cutoff: float) -> Relaxed | None:
        """See `Relaxation`."""
        lower_K, upper_K = on_grid(self._elements, lower_K, upper_K)
        mean = self._mean.solve(lower_K, upper_K, admitted_C, cutoff)
        if mean is None or not self._are_few(mean.admitted_C):
            return mean
        lower_K, upper_K = on_grid(self._elements, mean.lower_K, mean.upper_K)
        program = self._program(Box(lower_K, upper_K, cutoff), mean.admitted_C, _HEAVY, _MOST_CLASSES)
        if program is None:
            return None
        solver = Solver(program.build(), presolve=False)
        optimum = self._optimum(program, solver)
        self._work += solver.work
        if optimum is None:
            return None
        if optimum.objective == -INFINITY:
            return mean._replace(lower_K=lower_K, upper_K=upper_K)
        share_C = np.zeros(len(admitted_C))
        share_C[program.candidates] = optimum.x[: len(program.candidates)]
        slowest_K = optimum.x[program.first_slowest :]
        bound = max(mean.bound, optimum.objective)
        limits = (lower_K, upper_K, mean.admitted_C)
        return Relaxed(bound, share_C, slowest_K, slowest_K, *limits, program.error(optimum.x))

    def _optimum(self, program: ClassProgram, solver: Solver) -> Optimum | None:
        """With cuts, as long as they help."""
        optimum = solver.solve()
        for _ in range(_ROUNDS):
            rows = None if optimum is None else program.cuts(optimum.x, _MOST_CUTS)
            if rows is None:
                break
            solver.add_rows(rows)
            optimum = solver.solve()
        return optimum

    def solve_closely(
        self, lower_K: Floats, upper_K: Floats, admitted_C: Bools, cutoff: float, seconds: float
    ) -> float:
        """See `Relaxation`: with each rank told apart, or with more classes."""
        if self.is_settled_closely(admitted_C):
            return self._solve_ranks(lower_K, upper_K, admitted_C, cutoff, seconds)
        if not self._are_few(admitted_C):
            return self._mean.solve_closely(lower_K, upper_K, admitted_C, cutoff, seconds)
        box = Box(lower_K, upper_K, cutoff)
        program = self._program(box, admitted_C, _HEAVY_CLOSELY, _MOST_CLOSELY)
        if program is None:
            return np.inf
        solver = Solver(program.build(), presolve=False)
        solver.set_time(seconds)
        optimum = self._optimum(program, solver)
        self._work += solver.work
        return np.inf if optimum is None else optimum.objective

    def is_settled_closely(self, admitted_C: Bools) -> bool:
        """See `Relaxation`."""
        return RankProgram.serves(self._problem, admitted_C)

    def _solve_ranks(
        self, lower_K: Floats, upper_K: Floats, admitted_C: Bools, cutoff: float, seconds: float
    ) -> float:
        relaxed = self.solve(lower_K, upper_K, admitted_C, cutoff)
        if relaxed is None:
            return np.inf
        candidates, box = np.flatnonzero(relaxed.admitted_C), Box(relaxed.lower_K, relaxed.upper_K, cutoff)
        program = RankProgram(self._problem, self._elements, candidates, box, scale=self._scale)
        bound = np.inf if program.is_impossible(seconds) else relaxed.bound
        self._work += program.work
        return bound

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
        found = None
        while found is None:
            found = self._sets(heavy, upper_K, most)
            heavy = heavy if found is not None else heavy[:-1]
        heavy_HG = np.array(found, np.int64).reshape(len(found), len(heavy))
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
                if same < self._tables_Y[type_G[index]] and (more_K <= upper_K * TIGHT).all():
                    more = (*counts[:index], counts[index] + 1, *counts[index + 1 :])
                    open_sets.append((more, index, more_K))
        return found


def _usual(elements: Elements, node_size: int) -> Floats:
    """The loads [E, K] of a rank that holds an element; a node's ranks share what varies."""
    usual_EK = elements.still_EK.copy()
    mine_V = elements.in_node_E[elements.element_V]
    usual_EK[elements.element_V[mine_V]] += elements.varying_VK[mine_V] / node_size
    return usual_EK
