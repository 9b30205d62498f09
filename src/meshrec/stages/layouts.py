"""Predict step times for dense layouts: replicas (DDP), sharded parameters (FSDP2), or stages.

Computation is measured on this machine, with a rank's batch size. An exchange takes the link latency from the
hardware profile, plus bytes / bandwidth. The overlap between DistributedDataParallel and the backward pass,
and between stages, is simulated. Tables cost nothing here, because the planner predicts them.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from meshrec.modules import EmbeddingBagCollection, EmbeddingCollection
from meshrec.planner import Link
from meshrec.sparse import KeyedJaggedTensor
from meshrec.stages.choosing import UnitCost, best_cut, cut_positions, max_stages
from meshrec.stages.profiling import CANDIDATES, measure_units
from meshrec.stages.programs import names_of, program, shared_parameters
from meshrec.stages.rank_step import schedule
from meshrec.stages.samples import split
from meshrec.stages.tracing import PartProgram, Traced, trace

_STEPS = ("forward", "backward")
MESSAGE_SECONDS = 5e-4
"""A stage thread's CPU seconds to send or receive a split; measured with nearly empty splits."""
# DistributedDataParallel's bucket sizes. The first bucket is small, to be sent early.
_FIRST_BUCKET, _BUCKET = 1 << 20, 25 << 20


class DenseLayout(NamedTuple):
    """A layout for a model's dense part, and the predicted step.

    Attributes:
        name: description, such as "data-parallel (DDP)".
        compute: compute seconds on the slowest rank.
        exchange: exchange seconds, which partly overlap with computation.
        seconds: step time.
        cuts: `StagedOverRanks` argument ``cuts``; empty if submodule names cannot express the cut.
        split_size: `StagedOverRanks` argument ``split_size``; None without stages.
    """

    name: str
    compute: float
    exchange: float
    seconds: float
    cuts: Sequence[str] = ()
    split_size: int | None = None


@dataclass(frozen=True)
class _Problem:
    """Model and machine.

    Attributes:
        traced: traced model.
        programs: program per unit.
        taken: global batch values by name.
        batch: global batch size.
        world_size: rank count.
        link: link between ranks.
        parameters: parameter bytes per unit.
        values: bytes per sample by value.
        shared: shared parameters, with the units which use them.
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
    """Return all layouts of a model called as ``model(dense, sparse)``, fastest first.

    Args:
        model: model; tables may be on ``meta``.
        dense: global batch dense values, [B, ...].
        sparse: global batch IDs.
        world_size: rank count.
        link: link between ranks.

    Raises:
        ValueError: fewer samples than ranks, or the model cannot be traced.
    """
    batch = dense.shape[0]
    if batch < world_size:
        raise ValueError(f"the batch has {batch} samples for {world_size} ranks; it needs one for each.")
    # The dense part depends only on table widths, so single-row tables replace them.
    sparse = KeyedJaggedTensor(
        sparse.keys(), torch.zeros_like(sparse.values()), sparse.weights_or_none(), sparse.lengths()
    )
    threads = torch.get_num_threads()
    # Process-wide, so it is restored below.
    torch.set_num_threads(1)
    try:
        with _tables_of_one_row(model):
            problem = _problem(trace(model), (dense, sparse), world_size, link)
            results = _unstaged(problem)
            most = max_stages([unit.needs for unit in problem.traced.units], problem.shared)
            for num_stages in range(2, min(world_size, most) + 1):
                if world_size % num_stages == 0:
                    results.append(_staged(problem, num_stages))
    finally:
        torch.set_num_threads(threads)
    return sorted(results, key=lambda layout: layout.seconds)


def _problem(traced: Traced, inputs: tuple[Any, ...], world_size: int, link: Link) -> _Problem:
    taken = dict(zip(traced.taking.gives, traced.taking.module(*inputs), strict=True))
    batch = inputs[0].shape[0]
    final = set(traced.output.all_input_nodes)
    programs = [program(traced, unit.nodes, final) for unit in traced.units]
    values = dict(taken)
    with torch.no_grad():
        for part in programs:
            values.update(zip(part.gives, part.module(*(values[name] for name in part.takes)), strict=True))
    parameters = [
        0 if unit.whole else sum(parameter.nbytes for parameter in part.module.parameters())
        for unit, part in zip(traced.units, programs, strict=True)
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
            compute + _exposed_reduce_seconds(problem, costs),
        ),
        DenseLayout("sharded (FSDP2)", compute, gathered, compute + gathered),
    ]


def _exposed_reduce_seconds(problem: _Problem, costs: Sequence[UnitCost]) -> float:
    """Return the seconds for which DistributedDataParallel reduces gradients after the backward pass.

    Simulates the backward pass, which sends a gradient bucket once it is full.
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
    """Return the layout into ``num_stages`` stages with the best cut and split count."""
    lanes = problem.world_size // num_stages
    lane_batch = problem.batch // lanes
    cuts = [_cut(problem, num_stages, k, lane_batch, lanes) for k in (1, *CANDIDATES) if k <= lane_batch]
    return min(cuts, key=lambda layout: layout.seconds)


def _cut(problem: _Problem, num_stages: int, num_splits: int, lane_batch: int, lanes: int) -> DenseLayout:
    needs = [unit.needs for unit in problem.traced.units]
    costs = _costs(problem, lane_batch, num_splits)
    per_byte = lane_batch / num_splits / problem.link.all_to_all
    transfers = {position: per_byte * _crossing(problem, position) for position in cut_positions(needs)[0]}
    links = {position: problem.link.latency + seconds for position, seconds in transfers.items()}
    cut = best_cut(costs, needs, num_stages, num_splits, links, shared=problem.shared)
    members = [[u for u, s in enumerate(cut.stage_of) if s == stage] for stage in range(num_stages)]
    ends = [sum(1 << u for stage in members[: end + 1] for u in stage) for end in range(num_stages - 1)]
    largest = max(sum(problem.parameters[unit] for unit in stage) for stage in members)
    reduced = _all_reduce(largest, lanes, problem.link)
    stages = [
        UnitCost(*(sum(costs[u][direction] for u in stage_units) + MESSAGE_SECONDS for direction in (0, 1)))
        for stage_units in members
    ]
    seconds = simulate(stages, [transfers[end] for end in ends], problem.link.latency, num_splits)
    # After a step, all stages exchange the loss and failure flags.
    agreement = (2 if lanes == 1 else 3) * problem.link.latency
    beside = "" if lanes == 1 else f" x {lanes} copies"
    return DenseLayout(
        f"{num_stages} stages{beside}, {num_splits} splits",
        num_splits * max(map(sum, stages)),
        reduced + 2 * sum(links[end] for end in ends),
        seconds + reduced + agreement,
        names_of(problem.traced, cut.stage_of),
        -(-lane_batch // num_splits),
    )


def simulate(
    stages: Sequence[UnitCost], transfers: Sequence[float], latency: float, num_splits: int
) -> float:
    """Simulate `schedule`, and return the seconds from the first forward to the last backward pass.

    Args:
        stages: cost per stage and split.
        transfers: for every link between stages, seconds occupied by a split in a single direction.
        latency: additional link latency in seconds.
        num_splits: split count.
    """
    count = len(stages)
    waiting = [
        [action for action in schedule(s, count, num_splits, train=True) if action[0] in _STEPS]
        for s in range(count)
    ]
    # Arrival time by (direction, receiving stage, split), clock per stage, and the time when a link is
    # free.
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
                # Not sent yet: continue with the other stages, whose progress will send it.
                if ready is None:
                    break
                waiting[stage].pop(0)
                clocks[stage] = max(clocks[stage], ready) + (cost.forward if forward else cost.backward)
                if 0 <= destination < count:
                    sent = max(clocks[stage], free[stage, step]) + transfers[min(stage, destination)]
                    free[stage, step] = sent
                    arrived[step, destination, k] = sent + latency
    return max(clocks)


def _costs(problem: _Problem, lane_batch: int, num_splits: int) -> list[UnitCost]:
    """Measure every unit on a split of ``lane_batch`` samples. Tables cost nothing."""
    taken = problem.taken
    if lane_batch < problem.batch:
        sizes = [lane_batch, problem.batch - lane_batch]
        taken = {name: split(value, sizes, f"the input {name!r}")[0] for name, value in taken.items()}
    costs = measure_units(
        problem.traced, problem.programs, taken, lane_batch, num_splits=num_splits, num_workers=1
    )
    return [
        UnitCost(0.0, 0.0) if unit.whole else cost
        for unit, cost in zip(problem.traced.units, costs, strict=True)
    ]


def _crossing(problem: _Problem, position: int) -> float:
    """Return the bytes per sample for values computed before a cut position and read after it."""
    given: set[str] = set()
    taken: set[str] = set()
    for unit, part in enumerate(problem.programs):
        if position >> unit & 1:
            given.update(part.gives)
        else:
            taken.update(part.takes)
    return sum(problem.values[name] for name in given & taken)


def _all_reduce(num_bytes: float, ranks: int, link: Link) -> float:
    """Return the ring all-reduce time: 2 (n - 1) / n times the bytes, as `Link.all_reduce` counts."""
    return 0.0 if ranks == 1 else link.latency + 2 * (ranks - 1) / ranks * num_bytes / link.all_reduce


def _num_bytes(value: Any) -> int:
    return sum(leaf.nbytes for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor))


@contextmanager
def _tables_of_one_row(model: nn.Module) -> Iterator[None]:
    """Replace the model's tables by single-row tables within the block."""
    tables = {
        path: child
        for path, child in model.named_modules()
        if isinstance(child, EmbeddingBagCollection | EmbeddingCollection)
    }
    try:
        for path, child in tables.items():
            _set_submodule(model, path, _one_row(child))
        yield
    finally:
        for path, child in tables.items():
            _set_submodule(model, path, child)


def _one_row(module: EmbeddingBagCollection | EmbeddingCollection) -> nn.Module:
    if isinstance(module, EmbeddingCollection):
        return EmbeddingCollection([replace(c, num_embeddings=1) for c in module.embedding_configs()])
    configs = [replace(config, num_embeddings=1) for config in module.embedding_bag_configs()]
    return EmbeddingBagCollection(configs, module.is_weighted())


def _set_submodule(model: nn.Module, path: str, child: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, child)
