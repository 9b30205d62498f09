"""Predicted step of each layout of the dense part: replicas, sharded parameters, or stages.

Computation is measured on this machine at the sizes that a rank would see. An exchange takes the latency plus
bytes over bandwidth of a link of the hardware profile. What DistributedDataParallel hides behind the backward
pass, and what stages hide behind each other, follows from a simulation of the step. Tables are the planner's
concern and cost nothing here.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from meshrec.modules import EmbeddingBagCollection, EmbeddingCollection
from meshrec.pipeline.stages.choosing import UnitCost, best_cut, most_stages, places_of
from meshrec.pipeline.stages.profiling import CANDIDATES, measured
from meshrec.pipeline.stages.programs import names_of, program, shared_parameters
from meshrec.pipeline.stages.rank_step import schedule
from meshrec.pipeline.stages.samples import split
from meshrec.pipeline.stages.tracing import PartProgram, Traced, trace
from meshrec.planner import Link
from meshrec.sparse import KeyedJaggedTensor

_STEPS = ("forward", "backward")
MESSAGE_SECONDS = 5e-4
"""Processor time of a stage's thread on a rank to send or receive one split, in each direction.

Measured with splits that hold next to nothing.
"""
# Of DistributedDataParallel, which sends the first bucket early.
_FIRST_BUCKET, _BUCKET = 1 << 20, 25 << 20


class DenseLayout(NamedTuple):
    """A layout of the dense part with its predicted step.

    ``seconds`` is the step. In it the busiest rank computes for ``compute`` seconds, and exchanges take
    ``exchange`` seconds, partly at the same time. ``cuts`` and ``split_size`` are arguments of
    `StagedOverRanks`; ``cuts`` is empty if names of submodules cannot express the cut.
    """

    name: str
    compute: float
    exchange: float
    seconds: float
    cuts: Sequence[str] = ()
    split_size: int | None = None


@dataclass(frozen=True)
class _Problem:
    """A model and the machine to run it. ``parameters``: bytes per unit; ``values``: bytes per sample of each
    value; ``shared``: names of parameters that several units use, with these.
    """

    traced: Traced
    programs: list[PartProgram]
    taken: Mapping[str, Any]
    batch: int
    world_size: int
    link: Link
    parameters: list[int]
    values: dict[str, float]
    shared: dict[str, list[int]]


def layouts(
    model: nn.Module, dense: Tensor, sparse: KeyedJaggedTensor, *, world_size: int, link: Link
) -> list[DenseLayout]:
    """Return all layouts of a model that is called as ``model(dense, sparse)``, fastest first.

    Args:
        model: the model; its tables may be on ``meta``.
        dense, sparse: a global batch, [B, ...].
        world_size: number of ranks.
        link: link between the ranks.

    Raises:
        ValueError: the batch has fewer samples than there are ranks, or the model cannot be traced.
    """
    batch = dense.shape[0]
    if batch < world_size:
        raise ValueError(f"the batch has {batch} samples for {world_size} ranks; it needs one for each.")
    # All that the dense part sees of a table is its width: one row does.
    sparse = KeyedJaggedTensor(
        sparse.keys(), torch.zeros_like(sparse.values()), sparse.weights_or_none(), sparse.lengths()
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with _tables_of_one_row(model):
            problem = _problem(trace(model), (dense, sparse), world_size, link)
            found = _unstaged(problem)
            most = most_stages([unit.needs for unit in problem.traced.units], problem.shared)
            for num_stages in range(2, min(world_size, most) + 1):
                if world_size % num_stages == 0:
                    found.append(_staged(problem, num_stages))
    finally:
        torch.set_num_threads(threads)
    return sorted(found, key=lambda layout: layout.seconds)


def _problem(traced: Traced, inputs: tuple[Any, ...], world_size: int, link: Link) -> _Problem:
    taken = dict(zip(traced.taking.gives, traced.taking.module(*inputs), strict=True))
    batch = inputs[0].shape[0]
    final = set(traced.output.all_input_nodes)
    programs = [program(traced, unit.nodes, final) for unit in traced.units]
    values = dict(taken)
    with torch.no_grad():
        for own in programs:
            values.update(zip(own.gives, own.module(*(values[name] for name in own.takes)), strict=True))
    parameters = [
        0 if unit.whole else sum(parameter.nbytes for parameter in own.module.parameters())
        for unit, own in zip(traced.units, programs, strict=True)
    ]
    sizes = {name: _num_bytes(value) / batch for name, value in values.items()}
    return _Problem(
        traced, programs, taken, batch, world_size, link, parameters, sizes, shared_parameters(traced)
    )


def _unstaged(problem: _Problem) -> list[DenseLayout]:
    costs = _costs(problem, problem.batch // problem.world_size, 1)
    compute = sum(map(sum, costs))
    num_bytes, ranks, link = sum(problem.parameters), problem.world_size, problem.link
    # Parameters are gathered before the forward pass and kept, and gradients scattered.
    gathered = 2 * (link.latency + num_bytes * (ranks - 1) / ranks / link.reduce_scatter)
    return [
        DenseLayout(
            "data-parallel (DDP)",
            compute,
            _all_reduce(num_bytes, ranks, link),
            compute + _left_over(problem, costs),
        ),
        DenseLayout("sharded (FSDP2)", compute, gathered, compute + gathered),
    ]


def _left_over(problem: _Problem, costs: Sequence[UnitCost]) -> float:
    """Return the time that DistributedDataParallel's gradient buckets take after the backward pass.

    A bucket leaves as soon as it is full.
    """
    ranks, link = problem.world_size, problem.link
    now = free = arrival = filled = 0.0
    most = _FIRST_BUCKET
    for left, cost, num_bytes in zip(
        range(len(costs) - 1, -1, -1), costs[::-1], problem.parameters[::-1], strict=True
    ):
        now += cost.backward
        filled += num_bytes
        if filled >= most or (left == 0 and filled):
            free = max(free, now) + _all_reduce(filled, ranks, link) - link.latency
            arrival, filled, most = free + link.latency, 0.0, _BUCKET
    return max(0.0, arrival - now)


def _staged(problem: _Problem, num_stages: int) -> DenseLayout:
    """Return the layout with the best number of splits and its best cut."""
    lanes = problem.world_size // num_stages
    own = problem.batch // lanes
    found = [_cut(problem, num_stages, k, own, lanes) for k in (1, *CANDIDATES) if k <= own]
    return min(found, key=lambda layout: layout.seconds)


def _cut(problem: _Problem, num_stages: int, num_splits: int, own: int, lanes: int) -> DenseLayout:
    needs = [unit.needs for unit in problem.traced.units]
    costs = _costs(problem, own, num_splits)
    per_byte = own / num_splits / problem.link.all_to_all
    transfers = {place: per_byte * _crossing(problem, place) for place in places_of(needs)[0]}
    links = {place: problem.link.latency + seconds for place, seconds in transfers.items()}
    cut = best_cut(costs, needs, num_stages, num_splits, links, shared=problem.shared)
    members = [[u for u, s in enumerate(cut.stage_of) if s == stage] for stage in range(num_stages)]
    ends = [sum(1 << u for stage in members[: end + 1] for u in stage) for end in range(num_stages - 1)]
    largest = max(sum(problem.parameters[unit] for unit in stage) for stage in members)
    reduced = _all_reduce(largest, lanes, problem.link)
    stages = [
        UnitCost(*(sum(costs[u][way] for u in own_units) + MESSAGE_SECONDS for way in (0, 1)))
        for own_units in members
    ]
    seconds = simulated(stages, [transfers[end] for end in ends], problem.link.latency, num_splits)
    # After a step all stages learn the loss, and that nobody failed.
    told = (2 if lanes == 1 else 3) * problem.link.latency
    beside = "" if lanes == 1 else f" x {lanes} copies"
    return DenseLayout(
        f"{num_stages} stages{beside}, {num_splits} splits",
        num_splits * max(map(sum, stages)),
        reduced + 2 * sum(links[end] for end in ends),
        seconds + reduced + told,
        names_of(problem.traced, cut.stage_of),
        -(-own // num_splits),
    )


def simulated(
    stages: Sequence[UnitCost], transfers: Sequence[float], latency: float, num_splits: int
) -> float:
    """Simulate `schedule`; return the seconds from the first forward to the last backward pass.

    Args:
        stages: seconds of each stage for one split.
        transfers: seconds that a split occupies the link from each stage to the next, in each direction.
        latency: latency of the links, in addition.
        num_splits: the number of splits K.
    """
    count = len(stages)
    waiting = [
        [each for each in schedule(s, count, num_splits, train=True) if each[0] in _STEPS]
        for s in range(count)
    ]
    arrived: dict[tuple[str, int, int], float] = {}
    clocks = [0.0] * count
    free = {(s, step): 0.0 for s in range(count) for step in _STEPS}
    while any(waiting):
        for stage, cost in enumerate(stages):
            while waiting[stage]:
                step, k = waiting[stage][0]
                forward = step == "forward"
                source, destination = (stage - 1, stage + 1) if forward else (stage + 1, stage - 1)
                ready = arrived.get((step, stage, k)) if 0 <= source < count else 0.0
                if ready is None:
                    break
                waiting[stage].pop(0)
                clocks[stage] = max(clocks[stage], ready) + (cost.forward if forward else cost.backward)
                if 0 <= destination < count:
                    sent = max(clocks[stage], free[stage, step]) + transfers[min(stage, destination)]
                    free[stage, step] = sent
                    arrived[step, destination, k] = sent + latency
    return max(clocks)


def _costs(problem: _Problem, own: int, num_splits: int) -> list[UnitCost]:
    """Measure each unit for one of the splits of ``own`` samples. Tables cost nothing."""
    taken = problem.taken
    if own < problem.batch:
        sizes = [own, problem.batch - own]
        taken = {name: split(value, sizes, f"the input {name!r}")[0] for name, value in taken.items()}
    costs = measured(problem.traced, problem.programs, taken, own, num_splits=num_splits, num_workers=1)
    return [
        UnitCost(0.0, 0.0) if unit.whole else cost
        for unit, cost in zip(problem.traced.units, costs, strict=True)
    ]


def _crossing(problem: _Problem, place: int) -> float:
    """Return the bytes per sample of the values that are made inside a place and read outside it."""
    made: set[str] = set()
    taken: set[str] = set()
    for unit, own in enumerate(problem.programs):
        if place >> unit & 1:
            made.update(own.gives)
        else:
            taken.update(own.takes)
    return sum(problem.values[name] for name in made & taken)


def _all_reduce(num_bytes: float, ranks: int, link: Link) -> float:
    """Return the time of a ring all-reduce: 2 (n - 1) / n times the bytes, as `Link.all_reduce` counts."""
    return 0.0 if ranks == 1 else link.latency + 2 * (ranks - 1) / ranks * num_bytes / link.all_reduce


def _num_bytes(value: Any) -> int:
    return sum(leaf.nbytes for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor))


@contextmanager
def _tables_of_one_row(model: nn.Module) -> Iterator[None]:
    """Replace the model's tables by tables of one row while the block runs."""
    found = {
        path: child
        for path, child in model.named_modules()
        if isinstance(child, EmbeddingBagCollection | EmbeddingCollection)
    }
    try:
        for path, child in found.items():
            _put(model, path, _one_row(child))
        yield
    finally:
        for path, child in found.items():
            _put(model, path, child)


def _one_row(module: EmbeddingBagCollection | EmbeddingCollection) -> nn.Module:
    if isinstance(module, EmbeddingCollection):
        return EmbeddingCollection([replace(c, num_embeddings=1) for c in module.embedding_configs()])
    configs = [replace(config, num_embeddings=1) for config in module.embedding_bag_configs()]
    return EmbeddingBagCollection(configs, module.is_weighted())


def _put(model: nn.Module, path: str, child: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, child)
