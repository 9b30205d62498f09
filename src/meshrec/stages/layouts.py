"""Predict the step time of a model's dense part when it is replicated (DDP), sharded (FSDP2) or staged.

A layout is one of these three ways to place the dense part on ranks. Computation is measured on this machine,
with the batch size of a rank. An exchange between ranks takes the link latency from the hardware profile,
plus bytes / bandwidth. Two overlaps are simulated: gradient all-reduce with the backward pass in
DistributedDataParallel, and the stages of a pipeline. Embedding tables count as 0 seconds, because the
planner predicts their time.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from meshrec.modules import EmbeddingBagCollection, EmbeddingCollection
from meshrec.ops.threads import at_most_threads
from meshrec.planner import Link
from meshrec.sparse import KeyedJaggedTensor
from meshrec.stages.choosing import UnitCost, best_cut, cut_positions, max_stages
from meshrec.stages.profiling import CANDIDATES, measure_units
from meshrec.stages.programs import names_of, program, shared_parameters
from meshrec.stages.rank_step import schedule
from meshrec.stages.samples import split
from meshrec.stages.tracing import PartProgram, Traced, trace

# The actions of `schedule` that compute. The others take no time in the simulation.
_STEPS = ("forward", "backward")
MESSAGE_SECONDS = 5e-4
"""CPU seconds that a stage spends on messages per split, in the forward pass and again in the backward pass.
Measured with nearly empty splits.
"""
# Default gradient bucket sizes in DistributedDataParallel, in bytes. The first is small, to be sent early.
_FIRST_BUCKET, _BUCKET = 1 << 20, 25 << 20


class DenseLayout(NamedTuple):
    """A way to place a model's dense part on ranks, and the predicted seconds per step.

    Attributes:
        name: description for the user, such as "data-parallel (DDP)".
        compute: seconds of computation on the slowest rank.
        exchange: seconds of communication, which partly overlap with computation.
        seconds: predicted step time.
        cuts: value for the `StagedOverRanks` argument ``cuts``. Empty without stages, or if the cut is not at
            the start of submodules.
        split_size: value for the `StagedOverRanks` argument ``split_size``, in samples. None without stages.
    """

    name: str
    compute: float
    exchange: float
    seconds: float
    cuts: Sequence[str] = ()
    split_size: int | None = None


@dataclass(frozen=True)
class _LayoutInputs:
    """The traced model, the batch and the machine for which layouts are compared.

    Attributes:
        traced: traced model with units; see [Note: units, stages, splits and lanes].
        programs: executable program for every unit.
        batch_values: values that units read from the global batch, by value name.
        batch: number of samples in the global batch.
        world_size: rank count.
        link: bandwidths and latency between ranks.
        parameters: parameter bytes of every unit; 0 for table lookups.
        values: bytes per sample of every value, by value name.
        shared: for every parameter used by several units, by name, the numbers of these units.
    """

    traced: Traced
    programs: list[PartProgram]
    batch_values: Mapping[str, Any]
    batch: int
    world_size: int
    link: Link
    parameters: list[int]
    values: dict[str, float]
    shared: dict[str, list[int]]


def layouts(
    model: nn.Module, dense: Tensor, sparse: KeyedJaggedTensor, *, world_size: int, link: Link
) -> list[DenseLayout]:
    """Return the DDP layout, the FSDP2 layout and a layout per possible stage count, fastest first.

    Args:
        dense: dense features of the global batch, [B, ...].

    Raises:
        ValueError: the batch has fewer samples than ranks, or the model cannot be traced.
    """
    batch = dense.shape[0]
    if batch < world_size:
        raise ValueError(f"the batch has {batch} samples for {world_size} ranks; it needs one for each.")
    # The dense part depends only on table widths, so single-row tables replace them, and all IDs become 0.
    sparse = KeyedJaggedTensor(
        sparse.keys(), torch.zeros_like(sparse.values()), sparse.weights_or_none(), sparse.lengths()
    )
    with at_most_threads(1), _tables_of_one_row(model):
        problem = _layout_inputs(trace(model), (dense, sparse), world_size, link)
        results = _unstaged(problem)
        most = max_stages([unit.needs for unit in problem.traced.units], problem.shared)
        # Stage counts that divide the number of ranks; the remaining factor is the number of lanes.
        for num_stages in range(2, min(world_size, most) + 1):
            if world_size % num_stages == 0:
                results.append(_best_staged_layout(problem, num_stages))
    return sorted(results, key=lambda layout: layout.seconds)


def _layout_inputs(traced: Traced, inputs: tuple[Any, ...], world_size: int, link: Link) -> _LayoutInputs:
    """Return the inputs of the comparison: the model, the batch, the machine, and the size of every value.

    Runs every unit once on the global batch ``inputs``, because only results show the sizes.
    """
    batch_values = dict(
        zip(traced.input_program.output_names, traced.input_program.module(*inputs), strict=True)
    )
    batch = inputs[0].shape[0]
    final = set(traced.output.all_input_nodes)
    programs = [program(traced, unit.nodes, final) for unit in traced.units]
    # Results of units, which later units take as arguments.
    values = dict(batch_values)
    with torch.no_grad():
        for part in programs:
            values.update(
                zip(part.output_names, part.module(*(values[name] for name in part.input_names)), strict=True)
            )
    parameters = [
        0 if unit.once_per_batch else sum(parameter.nbytes for parameter in part.module.parameters())
        for unit, part in zip(traced.units, programs, strict=True)
    ]
    sizes = {name: _num_bytes(value) / batch for name, value in values.items()}
    return _LayoutInputs(
        traced, programs, batch_values, batch, world_size, link, parameters, sizes, shared_parameters(traced)
    )


def _unstaged(problem: _LayoutInputs) -> list[DenseLayout]:
    """Return the DDP layout and the FSDP2 layout."""
    # Every rank computes the whole dense part on its share of the batch.
    costs = _costs(problem, problem.batch // problem.world_size, 1)
    compute = sum(map(sum, costs))
    num_bytes, ranks, link = sum(problem.parameters), problem.world_size, problem.link
    # FSDP2 all-gathers the parameters before the forward pass and keeps them until the backward pass. It then
    # reduce-scatters the gradients. Both move (ranks - 1) / ranks of the bytes.
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


def _exposed_reduce_seconds(problem: _LayoutInputs, costs: Sequence[UnitCost]) -> float:
    """Return how many seconds DDP still reduces gradients after the backward pass has ended.

    Simulates the backward pass through the units in reverse order. DDP sends a gradient bucket once the
    bucket is full. Buckets share a link, so a bucket waits until the previous bucket is sent.
    """
    ranks, link = problem.world_size, problem.link
    # Clock of the backward pass, time when the link is free, arrival of the last sent bucket (all in
    # seconds), and bytes in the current bucket.
    now = free = arrival = filled = 0.0
    # Bytes at which the current bucket is full.
    most = _FIRST_BUCKET
    for left, cost, num_bytes in zip(
        range(len(costs) - 1, -1, -1), costs[::-1], problem.parameters[::-1], strict=True
    ):
        now += cost.backward
        filled += num_bytes
        if filled >= most or (left == 0 and filled):
            # The latency does not occupy the link, so it delays only the arrival.
            free = max(free, now) + _all_reduce(filled, ranks, link) - link.latency
            arrival, filled, most = free + link.latency, 0.0, _BUCKET
    return max(0.0, arrival - now)


def _best_staged_layout(problem: _LayoutInputs, num_stages: int) -> DenseLayout:
    """Return the fastest layout with ``num_stages`` stages, after trying several split counts."""
    lanes = problem.world_size // num_stages
    lane_batch = problem.batch // lanes
    candidates = [
        _layout_for_splits(problem, num_stages, k, lane_batch, lanes)
        # Every split needs at least one sample.
        for k in (1, *CANDIDATES)
        if k <= lane_batch
    ]
    return min(candidates, key=lambda layout: layout.seconds)


def _layout_for_splits(
    problem: _LayoutInputs, num_stages: int, num_splits: int, lane_batch: int, lanes: int
) -> DenseLayout:
    """Return the layout with the best cut for given numbers of stages and splits (microbatches).

    Args:
        lane_batch: samples per batch of a lane; a lane is a copy of all stages with its own batch.
    """
    needs = [unit.needs for unit in problem.traced.units]
    costs = _costs(problem, lane_batch, num_splits)
    # Seconds per split for a value with one byte per sample.
    per_byte = lane_batch / num_splits / problem.link.all_to_all
    transfers = {position: per_byte * _crossing(problem, position) for position in cut_positions(needs)[0]}
    # The search adds the latency to every transfer, and the simulation lets it overlap.
    links = {position: problem.link.latency + seconds for position, seconds in transfers.items()}
    cut = best_cut(costs, needs, num_stages, num_splits, links, shared=problem.shared)
    members = [[u for u, s in enumerate(cut.stage_of) if s == stage] for stage in range(num_stages)]
    # Cut position at the end of every stage but the last: a bit mask of the units before the cut.
    ends = [sum(1 << u for stage in members[: end + 1] for u in stage) for end in range(num_stages - 1)]
    # Lanes reduce the gradients of all stages at the same time, so the largest stage determines the time.
    largest = max(sum(problem.parameters[unit] for unit in stage) for stage in members)
    reduced = _all_reduce(largest, lanes, problem.link)
    stages = [
        # Index 0 of a cost is forward, index 1 backward.
        UnitCost(*(sum(costs[u][direction] for u in stage_units) + MESSAGE_SECONDS for direction in (0, 1)))
        for stage_units in members
    ]
    # The formula ignores waiting, so the selected cut is simulated.
    seconds = simulate(stages, [transfers[end] for end in ends], problem.link.latency, num_splits)
    # After a step, all stages exchange the loss and failure flags; with several lanes, the lanes exchange
    # failure flags once more before their gradients.
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
    """Simulate the 1F1B `schedule`, and return the seconds from the first forward to the last backward pass.

    Args:
        transfers: for the link from every stage to the next, seconds that a split occupies the link in one
            direction. Splits that use the same link and direction wait for each other.
        latency: additional seconds until a split arrives, during which the link is free for other splits.
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
                # The first stage waits for no forward pass, and the last for no backward pass.
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


def _costs(problem: _LayoutInputs, lane_batch: int, num_splits: int) -> list[UnitCost]:
    """Measure the seconds per split (microbatch) for every unit; table lookups count as 0 seconds."""
    batch_values = problem.batch_values
    if lane_batch < problem.batch:
        # A lane gets only this part of the batch. All lanes take equally long.
        sizes = [lane_batch, problem.batch - lane_batch]
        batch_values = {
            name: split(value, sizes, f"the input {name!r}")[0] for name, value in batch_values.items()
        }
    costs = measure_units(
        problem.traced, problem.programs, batch_values, lane_batch, num_splits=num_splits, num_workers=1
    )
    return [
        UnitCost(0.0, 0.0) if unit.once_per_batch else cost
        for unit, cost in zip(problem.traced.units, costs, strict=True)
    ]


def _crossing(problem: _LayoutInputs, position: int) -> float:
    """Return the bytes per sample which cross a cut: values computed before it and read after it.

    ``position`` is an int with bit u set for every unit u before the cut.
    """
    # Names of values computed before the position, and read after it.
    outputs_before: set[str] = set()
    inputs_after: set[str] = set()
    for unit, part in enumerate(problem.programs):
        if position >> unit & 1:
            outputs_before.update(part.output_names)
        else:
            inputs_after.update(part.input_names)
    return sum(problem.values[name] for name in outputs_before & inputs_after)


def _all_reduce(num_bytes: float, ranks: int, link: Link) -> float:
    """Return the seconds of a ring all-reduce over ``ranks`` ranks.

    A ring over n ranks sends 2 (n - 1) / n times the tensor's bytes, and `Link.all_reduce` is the bandwidth
    for these bytes. A single rank takes 0 seconds.
    """
    return 0.0 if ranks == 1 else link.latency + 2 * (ranks - 1) / ranks * num_bytes / link.all_reduce


def _num_bytes(value: Any) -> int:
    """Return the bytes of all tensors in a nested value."""
    return sum(leaf.nbytes for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor))


@contextmanager
def _tables_of_one_row(model: nn.Module) -> Iterator[None]:
    """Within the block, replace the model's table collections by collections with one row per table."""
    tables = {
        path: child
        for path, child in model.named_modules()
        if isinstance(child, EmbeddingBagCollection | EmbeddingCollection)
    }
    try:
        for path, child in tables.items():
            _set_submodule(model, path, _with_single_rows(child))
        yield
    finally:
        for path, child in tables.items():
            _set_submodule(model, path, child)


def _with_single_rows(module: EmbeddingBagCollection | EmbeddingCollection) -> nn.Module:
    """Return a collection with the same tables, but with a single row per table."""
    if isinstance(module, EmbeddingCollection):
        return EmbeddingCollection([replace(c, num_embeddings=1) for c in module.embedding_configs()])
    configs = [replace(config, num_embeddings=1) for config in module.embedding_bag_configs()]
    return EmbeddingBagCollection(configs, module.is_weighted())


def _set_submodule(model: nn.Module, path: str, child: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, child)
