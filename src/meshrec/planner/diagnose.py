"""Explain why no plan fits into memory: how much is missing, and which changes would make a plan fit."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from meshrec.plan.sharding_plan import ShardingType
from meshrec.plan.text import size_text
from meshrec.planner.bound import LowerBound
from meshrec.planner.construct import fitting_plan, most_even_plan
from meshrec.planner.enumerators import build_problem
from meshrec.planner.estimators import CostModel
from meshrec.planner.problem import Problem
from meshrec.planner.types import ParameterConstraints, Table, Topology

# Maximum number of nodes to suggest, as a multiple of the current number.
_MOST_NODES = 64


def diagnose(
    tables: Sequence[Table],
    topology: Topology,
    *,
    batch_size: int,
    constraints: Mapping[str, ParameterConstraints],
) -> str:
    """Return an error message for tables that fit into memory under no plan.

    The message has the missing memory, the largest tables, and the remedies after which a plan fits: row-wise
    sharding, fp16 weights, or more ranks.

    Args:
        tables, topology, batch_size, constraints: as for `optimize`.
    """
    # Without replication, every rank holds the smallest part of the tables.
    request = _Request(tables, replace(topology, replicate=(1,)), batch_size, constraints)
    lines = _shortage(request)
    largest = sorted(tables, key=lambda table: -table.num_bytes)[:5]
    listing = ", ".join(f"{table.name} {size_text(table.num_bytes)}" for table in largest)
    lines.append(f"The largest tables with optimizer state: {listing}.")
    remedies = [_row_wise(request, largest), _half_precision(request, largest), _more_ranks(request)]
    working = [remedy for remedy in remedies if remedy is not None]
    if working:
        lines.append("It would fit with one of: " + "; ".join(working) + ".")
    else:
        lines.append(
            f"Neither other sharding types, nor fp16, nor {_MOST_NODES} times the nodes suffice: reduce "
            "the reserve, the batch size, or the tables."
        )
    return "\n".join(lines)


class _Request(NamedTuple):
    """Tables to place, and the machine."""

    tables: Sequence[Table]
    topology: Topology
    batch_size: int
    constraints: Mapping[str, ParameterConstraints]

    def problem(self) -> Problem:
        """Return the planning problem."""
        model = CostModel(self.tables, self.topology, batch_size=self.batch_size)
        return build_problem(model, self.constraints)


def _fits(request: _Request) -> bool:
    """Return whether a quick search finds a plan that fits into memory; False for invalid constraints."""
    if request.topology.memory_cap <= 0:
        return False
    try:
        problem = request.problem()
    except ValueError:
        return False
    # A short search, because many remedies are tried.
    return fitting_plan(problem, seconds=0.3) is not None


def _shortage(request: _Request) -> list[str]:
    """Return the first lines of the error message.

    The lines tell whether it is proven that no plan fits. They also tell how many bytes the fullest rank
    lacks in the most even plan found.
    """
    topology = request.topology
    cap = topology.memory_cap
    if cap <= 0:
        return [
            "no plan fits into memory.",
            f"A rank has {size_text(topology.profile.memory)}; the dense model takes "
            f"{size_text(topology.dense_bytes)} and the reserve {topology.reserve:.0%}: nothing is left for "
            "tables.",
        ]
    # Without a memory limit there always is a plan, whose sizes the message can name.
    unlimited = replace(topology, hbm_cap=1 << 60, ddr_cap=1 << 60, dense_bytes=0)
    problem = request._replace(topology=unlimited).problem()
    # With the limit, an infinite lower bound proves that no plan fits.
    problem = problem._replace(memory_cap=cap)
    is_proven = LowerBound(problem, problem.can_fit_C()).value == np.inf
    state = most_even_plan(problem)
    bytes_R = state.bytes_R + state.common_bytes
    rank = int(bytes_R.argmax())
    over = int(np.count_nonzero(bytes_R > cap))
    return [
        "no plan fits into memory."
        if is_proven
        else "no plan was found that fits into memory, although infeasibility is not proven.",
        f"In the most even plan found, rank {rank} needs "
        f"{size_text(bytes_R[rank])} and has {size_text(cap)} (of {size_text(topology.profile.memory)}, less "
        f"the dense model {size_text(topology.dense_bytes)} and a reserve of {topology.reserve:.0%}): "
        f"{size_text(max(bytes_R[rank] - cap, 0.0))} are missing, and {over} of {len(bytes_R)} ranks are "
        "over.",
    ]


def _row_wise(request: _Request, largest: Sequence[Table]) -> str | None:
    """Suggest row-wise sharding for tables whose constraints forbid it; None if no plan fits even then.

    Allows row-wise sharding for the largest such table, then for the two largest, and so on, until a plan
    fits.

    ``largest`` has the largest tables, in descending order.

    Returns:
        Suggestion with the names of the tables whose constraints were relaxed.
    """
    changed = dict(request.constraints)
    names = []
    for table in largest:
        old = request.constraints.get(table.name)
        if old is None or (ShardingType.ROW_WISE in old.allowed_types and old.ranks is None):
            continue
        # Sorted, because the order of a set differs between processes.
        kinds = sorted(old.allowed_types | {ShardingType.ROW_WISE}, key=lambda kind: kind.value)
        changed[table.name] = replace(old, sharding_types=kinds, ranks=None)
        names.append(table.name)
        if _fits(request._replace(constraints=changed)):
            return f"row-wise sharding on {', '.join(names)}"
    return None


def _half_precision(request: _Request, largest: Sequence[Table]) -> str | None:
    """Suggest fp16 weights; None if no plan fits even then.

    Tries fp16 weights for the largest table, then for the two largest tables, and so on, until a plan fits.
    If no plan fits with all ``largest`` tables in fp16, tries fp16 weights for all tables.

    ``largest`` has the largest tables, in descending order.

    Returns:
        Suggestion with the names of the converted tables, or with the words "all tables".
    """
    changed = list(request.tables)
    names = []
    for table in largest:
        if table.weight_bytes <= 2:
            continue
        changed = [replace(t, weight_bytes=2) if t.name == table.name else t for t in changed]
        names.append(table.name)
        if _fits(request._replace(tables=changed)):
            return f"fp16 weights for {', '.join(names)}"
    changed = [replace(table, weight_bytes=min(2, table.weight_bytes)) for table in request.tables]
    return "fp16 weights for all tables" if _fits(request._replace(tables=changed)) else None


def _more_ranks(request: _Request) -> str | None:
    """Suggest the smallest rank count with which a plan fits.

    Ranks are added in whole nodes. The global batch stays the same, so there are fewer samples per rank. The
    search doubles the node count, and gives up beyond `_MOST_NODES` times the present count.

    Returns:
        The suggestion, or None if no plan was found.
    """
    # The global batch, which stays the same.
    topology = request.topology
    samples = request.batch_size * topology.world_size
    step = topology.local_size

    def enough(nodes: int) -> bool:
        """Return whether a plan fits on this many nodes."""
        ranks = nodes * step
        bigger = replace(topology, world_size=ranks, local_world_size=step)
        return _fits(request._replace(topology=bigger, batch_size=max(1, samples // ranks)))

    # Double the nodes until a plan fits, then bisect between the last two counts.
    low = topology.world_size // step
    high = low
    while not enough(high):
        low, high = high, high * 2
        if high > _MOST_NODES * (topology.world_size // step):
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return f"{high * step} ranks instead of {topology.world_size}"
