"""The inner loop of the planner: simulated annealing of the places of pieces of tables.

Arrays: T tables, Y types, C candidates, P groups of equal pieces, K phases, N pieces by rank.
`meshrec.planner.problem` defines candidates, groups and amounts.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from meshrec.ops.library import has_kernels

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

MOST_PHASES = 8


class AnnealProblem(NamedTuple):
    """The constant part: the costs of candidates and groups, and the allowed candidates."""

    type_T: Ints
    choice_start_Y: Ints
    """First of each type's allowed candidates in `choices`; Y + 1 entries."""
    choices: Ints
    scope_C: Ints
    uneven_C: Ints
    """1 if rows may move from any part to any other."""
    piece_start_C: Ints
    count_P: Ints
    load_PK: Floats
    fixed_PK: Floats
    bytes_P: Floats
    fixed_bytes_P: Floats
    common_C: Floats
    common_bytes_C: Floats
    least_P: Floats
    """The smallest amount of a piece."""
    allowed_YR: Ints
    """1 for the ranks that a type may use; empty if all types may use all ranks."""
    shape_C: Ints
    """Number of the candidate's shape, from 0. Candidates of one shape split tables with equally many columns
    alike.
    """
    columns_Y: Ints
    """Number of columns of a type's tables."""


class Assignment(NamedTuple):
    """A plan: the candidate of each table, and its pieces by rank, table by table."""

    candidate_T: Ints
    start_T: Ints
    """First piece of each table; T + 1 entries."""
    group_N: Ints
    rank_N: Ints
    amount_N: Floats


class Annealed(NamedTuple):
    """The best plan seen, its seconds without latencies, and the work done: the number of rank loads
    computed.
    """

    assignment: Assignment
    seconds: float
    work: int


def anneal(
    problem: AnnealProblem,
    assignment: Assignment,
    *,
    num_ranks: int,
    node_size: int,
    memory_cap: float,
    max_work: int,
    seconds: float,
    hot: float = 0.3,
    cold: float = 3e-4,
    place_share: float = 1.0,
    exponent: int = 4,
    seed: int = 0,
) -> Annealed:
    """Anneal a plan: move, exchange, resize and re-split pieces at a falling temperature.

    The result is the best plan seen, and never slower than `assignment`. The same input gives the same plan,
    unless `seconds` run out before `max_work`. Without compiled kernels the plan is returned unchanged.

    Args:
        problem: the constant part of the problem.
        assignment: the first plan, which must fit into `memory_cap`.
        num_ranks: number of ranks.
        node_size: ranks per node.
        memory_cap: bytes per rank.
        max_work: limit of the work, see `Annealed`.
        seconds: limit of the time.
        hot: first temperature, in mean loads of a rank.
        cold: last temperature, in mean loads of a rank.
        place_share: largest share of the work that considers all ranks, to place or split a table again. The
            rest moves one piece or exchanges two.
        exponent: first exponent of the norm over ranks, a power of two up to 64. While the temperature falls,
            it is doubled up to 16 times its value, at most to 256.
        seed: seed of the random numbers.
    """
    result = torch.ops.meshrec.plan_anneal(
        [torch.from_numpy(np.ascontiguousarray(array)) for array in problem],
        *(torch.from_numpy(np.ascontiguousarray(array)) for array in assignment),
        num_ranks,
        node_size,
        memory_cap,
        max_work,
        seconds,
        hot,
        cold,
        place_share,
        exponent,
        seed,
    )
    *arrays, figures = (tensor.numpy() for tensor in result)
    best, work = figures
    return Annealed(Assignment(*arrays), float(best), int(work))


def _unchanged(problem: list[Tensor], *arguments: object) -> tuple[Tensor, ...]:
    candidates, starts, groups, ranks, amounts = (a for a in arguments if isinstance(a, Tensor))
    figures = torch.tensor([float("inf"), 0.0], dtype=torch.float64)
    return candidates.clone(), starts.clone(), groups.clone(), ranks.clone(), amounts.clone(), figures


def _fake(problem: list[Tensor], *arguments: object) -> tuple[Tensor, ...]:
    candidates, starts, groups, ranks, amounts = (a for a in arguments if isinstance(a, Tensor))
    size = torch.library.get_ctx().new_dynamic_size()
    sized = [tensor.new_empty(size) for tensor in (groups, ranks, amounts)]
    return (torch.empty_like(candidates), torch.empty_like(starts), *sized, amounts.new_empty(2))


can_anneal: bool = has_kernels
"""Whether `anneal` does anything, which needs the compiled kernels."""

_registration = torch.library.Library("meshrec", "IMPL")
_registration.impl("plan_anneal", _unchanged, "CompositeExplicitAutograd")
torch.library.register_fake("meshrec::plan_anneal", _fake)
