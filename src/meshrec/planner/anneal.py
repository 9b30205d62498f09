"""Convert between search states and the arrays of the compiled annealing loop."""

from collections.abc import Sequence

import numpy as np

from meshrec.ops.planning import MAX_PHASES, Annealed, AnnealProblem, Assignment, anneal, can_anneal
from meshrec.planner.problem import Problem, Scope
from meshrec.planner.state import TablePlacement
from meshrec.planner.types import Ints

# Smallest size of an uneven piece, relative to the even split.
LEAST_AMOUNT = 1e-3


class Annealer:
    """Simulated annealing of plans for one problem, in the compiled loop ``ops.planning.anneal``.

    Args:
        admitted_Y: indices of the allowed candidates, per table type. A candidate is a way to split a table;
            a type is a set of identical tables.
    """

    def __init__(self, problem: Problem, admitted_Y: Sequence[Ints]) -> None:
        self._problem = problem
        # Converted once, because a start is annealed many times.
        self._arrays = _arrays(problem, admitted_Y)

    @staticmethod
    def supports(problem: Problem) -> bool:
        """Return whether the compiled loop is available and supports as many phases as the problem has."""
        return can_anneal and problem.load_PK.shape[1] <= MAX_PHASES

    def improve(
        self,
        placements_T: Sequence[TablePlacement],
        *,
        max_work: int,
        seconds: float,
        start_temperature: float,
        seed: int,
        placement_share: float = 1.0,
        exponent: int = 4,
    ) -> tuple[list[TablePlacement], int]:
        """Anneal a plan; see ``ops.planning.anneal``.

        Args:
            max_work: work limit, as counted by the compiled loop.
            start_temperature: initial temperature, as a fraction of a rank's mean load.
            placement_share: maximum fraction of the work for moves which place a whole table again.

        Returns:
            Placement per table in a plan that is at least as fast, and the work spent.
        """
        annealed: Annealed = anneal(
            self._arrays,
            _assignment(placements_T),
            num_ranks=self._problem.num_ranks,
            node_size=self._problem.node_size,
            memory_cap=float(self._problem.memory_cap),
            max_work=max_work,
            seconds=seconds,
            start_temperature=start_temperature,
            placement_share=placement_share,
            exponent=exponent,
            seed=seed,
        )
        return _table_placements(annealed.assignment), annealed.work


def _assignment(placements_T: Sequence[TablePlacement]) -> Assignment:
    """Convert placements per table to flat arrays for the compiled loop."""
    lengths = [len(placement.rank_N) for placement in placements_T]
    return Assignment(
        np.array([placement.candidate for placement in placements_T], np.int64),
        np.concatenate(([0], np.cumsum(lengths))).astype(np.int64),
        np.concatenate([placement.group_N for placement in placements_T]).astype(np.int64),
        np.concatenate([placement.rank_N for placement in placements_T]).astype(np.int64),
        np.concatenate([placement.amount_N for placement in placements_T]).astype(np.float64),
    )


def _table_placements(assignment: Assignment) -> list[TablePlacement]:
    """Convert the compiled loop's flat arrays back to placements per table."""
    placements_T = []
    for table, candidate in enumerate(assignment.candidate_T):
        mine = slice(int(assignment.start_T[table]), int(assignment.start_T[table + 1]))
        placements_T.append(
            TablePlacement(
                int(candidate), assignment.group_N[mine], assignment.rank_N[mine], assignment.amount_N[mine]
            )
        )
    return placements_T


def _arrays(problem: Problem, admitted_Y: Sequence[Ints]) -> AnnealProblem:
    """Convert a problem and the allowed candidates per type to the arrays which the compiled loop reads."""
    layouts = problem.layouts_C
    by_rows_C = [layout.row_parts > 1 or layout.scope is Scope.NODES for layout in layouts]
    uneven_C = np.array(
        [by and len(layout.widths) == 1 for by, layout in zip(by_rows_C, layouts, strict=True)]
    )
    shape_by_layout = {layout: shape for shape, layout in enumerate(dict.fromkeys(layouts))}
    # Any candidate of a type shows the table's column count.
    first_Y = problem.type_C.searchsorted(np.arange(len(admitted_Y)))
    # An empty array means that all types may use all ranks.
    masked = any(mask is not None for mask in problem.ranks_Y)
    full = np.ones(problem.num_ranks, bool)
    return AnnealProblem(
        type_T=problem.type_T,
        choice_start_Y=np.concatenate(([0], np.cumsum([len(choices) for choices in admitted_Y]))),
        choices=np.concatenate(admitted_Y).astype(np.int64),
        scope_C=np.array([int(layout.scope) for layout in layouts], np.int64),
        uneven_C=uneven_C.astype(np.int64),
        piece_start_C=problem.piece_start_C.astype(np.int64),
        count_P=problem.count_P,
        load_PK=problem.load_PK,
        # The scaling part, load - fixed, must not be negative.
        fixed_PK=np.minimum(problem.fixed_PK, problem.load_PK),
        bytes_P=problem.bytes_P,
        fixed_bytes_P=problem.fixed_bytes_P,
        common_cost_C=problem.common_cost_C,
        common_bytes_C=problem.common_bytes_C,
        min_amount_P=np.minimum(np.maximum(LEAST_AMOUNT, 2 / problem.rows_P), 1.0),
        allowed_YR=(
            np.stack([full if mask is None else mask for mask in problem.ranks_Y]).astype(np.int64).ravel()
            if masked
            else np.zeros(0, np.int64)
        ),
        shape_C=np.array([shape_by_layout[layout] for layout in layouts], np.int64),
        columns_Y=np.array([sum(layouts[first].widths) for first in first_Y], np.int64),
    )
