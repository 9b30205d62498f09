"""A relaxation of plans on few ranks that tells each rank apart, and counts whole pieces.

With a few pieces a rank, what loads lack to the mean is a matter of which pieces fit beside each other:
fractions of pieces do not know it, however narrow the box is. This is the program of classes (see
`rank_classes`) with a class for each rank and no heavy elements, where candidates and elements are in whole
numbers; what varies may be cut anywhere. All that is left out is which ranks share a node, and memory rank
by rank. Ranks are alike in it, so that they may be numbered by how many pieces of one type they hold, most
first: every plan is, renumbered, a solution.
"""

import numpy as np

from meshrec.planner.class_program import Box, Classes, ClassProgram
from meshrec.planner.elements import Elements
from meshrec.planner.highs import INFINITY, Rows, Solver
from meshrec.planner.problem import Problem
from meshrec.planner.types import Bools, Ints

_MOST_RANKS, _MOST_TABLES, _MOST_COLUMNS = 16, 4, 800
"""What is solved in a moment; tables per rank."""
_MOST_NODES = 20_000


class RankProgram:
    """The program of a box; loads are in units of `scale` seconds."""

    def __init__(
        self, problem: Problem, elements: Elements, candidates: Ints, box: Box, *, scale: float
    ) -> None:
        ranks, num_phases = problem.num_ranks, problem.load_PK.shape[1]
        none = np.zeros(0, np.int64)
        each = Classes(none, np.zeros((ranks, 0), np.int64), np.zeros((ranks, num_phases)), np.ones(ranks))
        self._problem, self._elements, self._candidates = problem, elements, candidates
        self._program = ClassProgram(problem, elements, candidates, each, box, scale=scale)
        self._solver = Solver(self._program.build())
        # Whether there is anything is told in half the time that it takes to tell what is best.
        self._solver.set_cost(np.zeros(self._program.num_columns))
        self._solver.add_rows(self._whole_tables())

    @staticmethod
    def suits(problem: Problem) -> bool:
        """Whether there are few ranks, with few tables each."""
        return problem.num_ranks <= _MOST_RANKS and len(problem.type_T) <= _MOST_TABLES * problem.num_ranks

    @staticmethod
    def serves(problem: Problem, admitted_C: Bools) -> bool:
        """Whether the program of a box with these candidates is small enough."""
        pieces = int(admitted_C[problem.candidate_P].sum())
        return RankProgram.suits(problem) and problem.num_ranks * pieces <= _MOST_COLUMNS

    @property
    def work(self) -> int:
        """See `Relaxation`."""
        return self._solver.work

    def is_impossible(self, seconds: float) -> bool:
        """Whether it is proven that no plan is in the box. Takes not much longer than `seconds`."""
        whole = np.zeros(self._program.num_columns, bool)
        whole[: len(self._candidates)] = True
        whole[self._program.on_light_LH] = True
        return self._solver.solve_whole(whole, seconds, most_nodes=_MOST_NODES) == np.inf

    def _whole_tables(self) -> Rows:
        """A rank holds one part of each table at most; no rank holds more of the largest type than the one
        before."""
        problem, on_LH = self._problem, self._program.on_light_LH
        type_L = self._elements.type_E[self._program.light]
        tables_Y = np.bincount(problem.type_T)
        rows = Rows(self._program.num_columns)
        for kind in np.unique(type_L):
            for column_L in on_LH[type_L == kind].T:
                rows.add(column_L, np.ones(len(column_L)), -INFINITY, float(tables_Y[kind]))
        load_C = problem.mean_load_CK()[self._candidates].sum(axis=1)
        largest = problem.type_C[self._candidates[load_C.argmax()]]
        mine_LH = on_LH[type_L == largest]
        for before_L, after_L in zip(mine_LH.T, mine_LH.T[1:], strict=False):
            sign = np.repeat((1.0, -1.0), len(after_L))
            rows.add(np.append(after_L, before_L), sign, -INFINITY, 0.0)
        return rows
