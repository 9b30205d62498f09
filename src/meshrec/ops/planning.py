"""The planner's inner loop: simulated annealing over where pieces of tables go.

Arrays: T tables, Y types, C candidates, P groups of equal pieces, K phases, N pieces by rank; what a
candidate, a group and an amount are, `meshrec.planner.problem` says.
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
    """What does not change: costs of candidates and groups, and which candidates are allowed."""

    type_T: Ints
    choice_start_Y: Ints
    """First of each type's allowed candidates in `choices`; Y + 1 entries."""
    choices: Ints
    scope_C: Ints
    uneven_C: Ints
    """1 where rows may move from any part to any other."""
    piece_start_C: Ints
    count_P: Ints
    load_PK: Floats
    fixed_PK: Floats
    bytes_P: Floats
    fixed_bytes_P: Floats
    common_C: Floats
    common_bytes_C: Floats
    least_P: Floats
    """The smallest amount that a piece may have."""
    allowed_YR: Ints
    """1 for the ranks that a type may use; empty when all types may use all."""
    shape_C: Ints
    """Candidates of one shape split tables of as many columns alike: 0, 1, ..."""
    columns_Y: Ints
    """Columns of a type's tables."""


class Assignment(NamedTuple):
    """A plan: the candidate of each table, and its pieces by rank, table by table."""

    candidate_T: Ints
    start_T: Ints
    """First piece of each table; T + 1 entries."""
    group_N: Ints
    rank_N: Ints
    amount_N: Floats


class Annealed(NamedTuple):
    """The best plan seen, its seconds without latencies, and the work done (ranks whose load was
    computed)."""

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
    """Moves, exchanges, resizes and re-splits pieces at a falling temperature, from `hot` to `cold` (in mean
    loads of a rank), and returns the best plan seen; never one that is slower than `assignment`, which must
    fit into `memory_cap` bytes per rank. `place_share`: the largest part of the work that looks at all ranks,
    to place or split a table anew; the rest moves one piece or exchanges two.
    `exponent`: of the norm over ranks at first, a power of two up to 64; as it cools it is doubled, up to 16
    times what it was, at most 256.

    The same input gives the same plan unless `seconds` run out before `max_work`. Without compiled kernels
    the plan comes back as it is.
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
"""Whether `anneal` does anything: the compiled kernels are there."""

_registration = torch.library.Library("meshrec", "IMPL")
_registration.impl("plan_anneal", _unchanged, "CompositeExplicitAutograd")
torch.library.register_fake("meshrec::plan_anneal", _fake)
