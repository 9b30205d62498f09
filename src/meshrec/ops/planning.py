"""Inner loop of the planner: simulated annealing that improves where table shards are placed.

Array dimensions: T tables, Y table types, C sharding candidates, P groups of equal pieces, K phases, N shards
in a plan, R ranks. `meshrec.planner.problem` explains candidates, pieces and amounts.
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
# Final temperature, relative to the mean load per rank.
_END_TEMPERATURE = 3e-4


class AnnealProblem(NamedTuple):
    """The constant part of an annealing problem: allowed candidates, and costs per candidate and piece.

    A candidate is a way to split a table. A piece is a shard in such a split. The kernel reads the fields in
    this order. `meshrec.planner.problem.Problem` documents the fields without a description here.
    """

    type_T: Ints
    """Type of each table, 0 to Y - 1. Tables with the same type have the same candidates."""
    choice_start_Y: Ints
    """Index in ``choices`` where the candidates of each type start; Y + 1 entries."""
    choices: Ints
    """Numbers of the allowed candidates: those of type 0, then those of type 1, etc."""
    scope_C: Ints
    """Which ranks the pieces of a candidate occupy: a `Scope` of `meshrec.planner.problem`."""
    uneven_C: Ints
    """1 if rows may move between any two pieces of a candidate, so that pieces become unequal."""
    piece_start_C: Ints
    count_P: Ints
    load_PK: Floats
    fixed_PK: Floats
    bytes_P: Floats
    fixed_bytes_P: Floats
    common_cost_C: Floats
    common_bytes_C: Floats
    min_amount_P: Floats
    """Smallest amount that a piece may have; 1 is the size in an even split."""
    allowed_YR: Ints
    """1 for the ranks that tables of a type may use; empty if all types may use all ranks."""
    shape_C: Ints
    """Shape number of each candidate. Equal shapes split tables with equal column counts alike."""
    columns_Y: Ints
    """Columns of a table, per type."""


class Assignment(NamedTuple):
    """A sharding plan as arrays: how each table is split (its candidate), and all shards, table by table."""

    candidate_T: Ints
    start_T: Ints
    """Index of the first shard of each table; T + 1 entries."""
    group_N: Ints
    """Piece group of each shard."""
    rank_N: Ints
    amount_N: Floats
    """Size of each shard, relative to the size in an even split."""


class Annealed(NamedTuple):
    """Result of `anneal`.

    Attributes:
        assignment: best plan seen.
        seconds: predicted step time of the plan, without latencies.
        work: how many times the kernel computed the load of a rank. Measures the effort independently of the
            machine.
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
    start_temperature: float = 0.3,
    placement_share: float = 1.0,
    exponent: int = 4,
    seed: int = 0,
) -> Annealed:
    """Improve a plan by simulated annealing.

    Random changes move, exchange, resize and re-split shards while the temperature falls. The result is the
    best plan seen, never slower than ``assignment``. Equal input gives an equal plan, unless ``seconds`` run
    out before ``max_work`` is reached. Without compiled kernels, the plan is returned unchanged.

    Args:
        assignment: initial plan, which must fit into ``memory_cap``.
        max_work: limit for ``Annealed.work``, the number of times the load of a rank is computed.
        placement_share: maximum share of the work for moves that consider all ranks, to place or split a
            table again. The other moves shift a single shard or exchange two.
        exponent: initial exponent of the norm that smooths the maximum over ranks, a power of two up to 64.
            It doubles while the temperature falls, up to 16 times the initial value and at most 256.

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
        start_temperature,
        _END_TEMPERATURE,
        placement_share,
        exponent,
        seed,
    )
    # totals holds the step time and the work, as float64.
    *arrays, totals = (tensor.numpy() for tensor in result)
    best, work = totals
    return Annealed(Assignment(*arrays), float(best), int(work))


def _unchanged(problem: list[Tensor], *arguments: object) -> tuple[Tensor, ...]:
    """Return the initial plan. The implementation without compiled kernels."""
    # The remaining arguments are numbers.
    candidates, starts, groups, ranks, amounts = (a for a in arguments if isinstance(a, Tensor))
    totals = torch.tensor([float("inf"), 0.0], dtype=torch.float64)
    # New tensors, because an operator must not return its inputs.
    return candidates.clone(), starts.clone(), groups.clone(), ranks.clone(), amounts.clone(), totals


def _fake(problem: list[Tensor], *arguments: object) -> tuple[Tensor, ...]:
    """Return the result shapes for tracing. The number of shards in the result is unknown."""
    candidates, starts, groups, ranks, amounts = (a for a in arguments if isinstance(a, Tensor))
    # Re-splitting changes how many shards there are.
    size = torch.library.get_ctx().new_dynamic_size()
    sized = [tensor.new_empty(size) for tensor in (groups, ranks, amounts)]
    return (torch.empty_like(candidates), torch.empty_like(starts), *sized, amounts.new_empty(2))


# The plain torch version returns the plan unchanged.
can_anneal: bool = has_kernels
"""Whether `anneal` improves plans. False without the compiled kernels."""

_registration = torch.library.Library("meshrec", "IMPL")
_registration.impl("plan_anneal", _unchanged, "CompositeExplicitAutograd")
torch.library.register_fake("meshrec::plan_anneal", _fake)
