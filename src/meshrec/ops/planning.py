"""Planner inner loop: simulated annealing for shard placements.

Arrays: T tables, Y table types, C sharding candidates, P equal-shard groups, K phases, N shards by rank,
R ranks. `meshrec.planner.problem` defines candidates, groups and amounts.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from meshrec.ops import operators
from meshrec.ops.library import has_kernels

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

# kPhases in csrc/planner/plan_state.h: the kernel keeps rank loads in a fixed-size array.
MAX_PHASES = 8
"""Maximum phase count (K)."""


class AnnealProblem(NamedTuple):
    """Constant annealing problem part: costs per candidate and group, and allowed candidates.

    The kernel reads the fields in this order.
    """

    type_T: Ints
    """Type per table, 0 to Y - 1. Tables with the same type have the same candidates."""
    choice_start_Y: Ints
    """First allowed candidate per type in `choices`; Y + 1 entries."""
    choices: Ints
    """Candidate numbers allowed for type 0, then for type 1, etc."""
    scope_C: Ints
    """Ranks usable by candidate shards: a `Scope` of `meshrec.planner.problem`."""
    uneven_C: Ints
    """1 if rows may move between any two shards."""
    piece_start_C: Ints
    count_P: Ints
    load_PK: Floats
    fixed_PK: Floats
    bytes_P: Floats
    fixed_bytes_P: Floats
    common_C: Floats
    common_bytes_C: Floats
    least_P: Floats
    """Smallest shard amount."""
    allowed_YR: Ints
    """1 for the ranks a type may use; empty if all types may use all ranks."""
    shape_C: Ints
    """Candidate shape, from 0. Candidates with equal shapes split tables with equal column counts alike."""
    columns_Y: Ints
    """Columns per table."""


class Assignment(NamedTuple):
    """Sharding plan: the candidate per table, and all shards, table by table."""

    candidate_T: Ints
    start_T: Ints
    """First shard per table; T + 1 entries."""
    group_N: Ints
    rank_N: Ints
    amount_N: Floats


class Annealed(NamedTuple):
    """Annealing result.

    Attributes:
        assignment: best plan seen.
        seconds: step time for the plan, without latencies.
        work: rank load count computed by the kernel.
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
    placement_share: float = 1.0,
    exponent: int = 4,
    seed: int = 0,
) -> Annealed:
    """Anneal a plan: move, exchange, resize and re-split shards at a falling temperature.

    The result is the best plan seen, never slower than `assignment`. Equal input gives an equal plan, unless
    `seconds` run out before `max_work`. Without compiled kernels the plan is returned unchanged.

    Args:
        problem: constant problem part.
        assignment: initial plan, which must fit into `memory_cap`.
        num_ranks: rank count.
        node_size: ranks per node.
        memory_cap: bytes per rank.
        max_work: work limit, see `Annealed`.
        seconds: time limit.
        hot: initial temperature, in mean loads per rank.
        cold: final temperature, in mean loads per rank.
        placement_share: maximum work share for moves considering all ranks, to place or split a
            table again. Remaining moves shift one shard or exchange two.
        exponent: initial exponent for the norm over ranks, a power of two up to 64. It doubles while the
            temperature falls, up to 16 times the initial value and at most 256.
        seed: random seed.

    Returns:
        The best plan seen.
    """
    result = operators.plan_anneal(
        # The kernel reads raw addresses, so arrays must be contiguous. Contiguous ones are not copied.
        [torch.from_numpy(np.ascontiguousarray(array)) for array in problem],
        *(torch.from_numpy(np.ascontiguousarray(array)) for array in assignment),
        num_ranks,
        node_size,
        memory_cap,
        max_work,
        seconds,
        hot,
        cold,
        placement_share,
        exponent,
        seed,
    )
    *arrays, totals = (tensor.numpy() for tensor in result)
    best, work = totals
    return Annealed(Assignment(*arrays), float(best), int(work))


def _unchanged(problem: list[Tensor], *arguments: object) -> tuple[Tensor, ...]:
    """Return the initial plan: the implementation without compiled kernels."""
    candidates, starts, groups, ranks, amounts = (a for a in arguments if isinstance(a, Tensor))
    totals = torch.tensor([float("inf"), 0.0], dtype=torch.float64)
    # New tensors, because an operator must not return its inputs.
    return candidates.clone(), starts.clone(), groups.clone(), ranks.clone(), amounts.clone(), totals


def _fake(problem: list[Tensor], *arguments: object) -> tuple[Tensor, ...]:
    """Return result shapes for tracing. The result shard count is unknown."""
    candidates, starts, groups, ranks, amounts = (a for a in arguments if isinstance(a, Tensor))
    size = torch.library.get_ctx().new_dynamic_size()
    sized = [tensor.new_empty(size) for tensor in (groups, ranks, amounts)]
    return (torch.empty_like(candidates), torch.empty_like(starts), *sized, amounts.new_empty(2))


can_anneal: bool = has_kernels
"""Whether `anneal` improves plans. False without the compiled kernels."""

_registration = torch.library.Library("meshrec", "IMPL")
_registration.impl("plan_anneal", _unchanged, "CompositeExplicitAutograd")
torch.library.register_fake("meshrec::plan_anneal", _fake)
