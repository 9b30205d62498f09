"""Which parallelism for the dense part: copies on all ranks, parameters split over them, or stages.

Compute is measured on this machine, at the sizes that a rank would see; an exchange is latency plus bytes
over the bandwidth of a link of the hardware's profile, and nothing is taken to overlap. Tables are the
planner's concern and count nothing here.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from meshrec.modules import EmbeddingBagCollection, EmbeddingCollection
from meshrec.pipeline.stages.choosing import UnitCost, best_cut, places_of
from meshrec.pipeline.stages.profiling import CANDIDATES, measured
from meshrec.pipeline.stages.programs import program
from meshrec.pipeline.stages.samples import split
from meshrec.pipeline.stages.tracing import Program, Traced, trace
from meshrec.planner import Link
from meshrec.sparse import KeyedJaggedTensor


class Layout(NamedTuple):
    """A way to run the dense part. ``seconds``: of a step, of which the busiest rank computes ``compute`` and
    exchanges take ``exchange``; what is left is waiting for other stages."""

    name: str
    compute: float
    exchange: float
    seconds: float


@dataclass(frozen=True)
class _Problem:
    """A model and what runs it. ``parameters``: bytes by unit; ``values``: bytes of a sample's values."""

    traced: Traced
    programs: list[Program]
    taken: Mapping[str, Any]
    batch: int
    world_size: int
    link: Link
    parameters: list[int]
    values: dict[str, float]


def layouts(
    model: nn.Module, dense: Tensor, sparse: KeyedJaggedTensor, *, world_size: int, link: Link
) -> list[Layout]:
    """All layouts of a model called as ``model(dense, sparse)``, the fastest first.

    Args:
        model: its tables may be on ``meta``.
        dense, sparse: a global batch, [B, ...].
        world_size: ranks.
        link: between them.

    Raises:
        ValueError: for a batch with fewer samples than ranks, and a model that cannot be traced.
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
            for num_stages in range(2, min(world_size, len(problem.programs)) + 1):
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
    return _Problem(traced, programs, taken, batch, world_size, link, parameters, sizes)


def _unstaged(problem: _Problem) -> list[Layout]:
    compute = sum(map(sum, _costs(problem, problem.batch // problem.world_size, 1)))
    num_bytes, ranks, link = sum(problem.parameters), problem.world_size, problem.link
    reduced = _all_reduce(num_bytes, ranks, link)
    # Parameters are gathered forward and again backward, and gradients scattered.
    gathered = 3 * (link.latency + num_bytes * (ranks - 1) / ranks / link.reduce_scatter)
    return [
        Layout("data-parallel (DDP)", compute, reduced, compute + reduced),
        Layout("sharded (FSDP2)", compute, gathered, compute + gathered),
    ]


def _staged(problem: _Problem, num_stages: int) -> Layout:
    """The best number of splits and the best cut for it."""
    lanes = problem.world_size // num_stages
    own = problem.batch // lanes
    found = [_cut(problem, num_stages, k, own, lanes) for k in (1, *CANDIDATES) if k <= own]
    return min(found, key=lambda layout: layout.seconds)


def _cut(problem: _Problem, num_stages: int, num_splits: int, own: int, lanes: int) -> Layout:
    needs = [unit.needs for unit in problem.traced.units]
    costs = _costs(problem, own, num_splits)
    per_byte = own / num_splits / problem.link.all_to_all
    links = {
        place: problem.link.latency + per_byte * _crossing(problem, place) for place in places_of(needs)[0]
    }
    cut = best_cut(costs, needs, num_stages, num_splits, links)
    members = [[u for u, s in enumerate(cut.stage_of) if s == stage] for stage in range(num_stages)]
    ends = [sum(1 << u for stage in members[: end + 1] for u in stage) for end in range(num_stages - 1)]
    largest = max(sum(problem.parameters[unit] for unit in stage) for stage in members)
    reduced = _all_reduce(largest, lanes, problem.link)
    compute = num_splits * max(sum(sum(costs[unit]) for unit in stage) for stage in members)
    beside = "" if lanes == 1 else f" x {lanes} copies"
    return Layout(
        f"{num_stages} stages{beside}, {num_splits} splits",
        compute,
        reduced + 2 * sum(links[end] for end in ends),
        cut.seconds + reduced,
    )


def _costs(problem: _Problem, own: int, num_splits: int) -> list[UnitCost]:
    """Of each unit for one of the splits of ``own`` samples; tables cost nothing."""
    taken = problem.taken
    if own < problem.batch:
        sizes = [own, problem.batch - own]
        taken = {name: split(value, sizes, f"the input {name!r}")[0] for name, value in taken.items()}
    costs = measured(problem.traced, problem.programs, taken, own, num_splits, 1)
    return [
        UnitCost(0.0, 0.0) if unit.whole else cost
        for unit, cost in zip(problem.traced.units, costs, strict=True)
    ]


def _crossing(problem: _Problem, place: int) -> float:
    """Bytes per sample of the values that are made inside a place and taken outside."""
    made: set[str] = set()
    taken: set[str] = set()
    for unit, own in enumerate(problem.programs):
        if place >> unit & 1:
            made.update(own.gives)
        else:
            taken.update(own.takes)
    return sum(problem.values[name] for name in made & taken)


def _all_reduce(num_bytes: int, ranks: int, link: Link) -> float:
    """2 (n - 1) / n times the bytes, as `Link.all_reduce` counts."""
    return 0.0 if ranks == 1 else link.latency + 2 * (ranks - 1) / ranks * num_bytes / link.all_reduce


def _num_bytes(value: Any) -> int:
    return sum(leaf.nbytes for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor))


@contextmanager
def _tables_of_one_row(model: nn.Module) -> Iterator[None]:
    """While the block runs, tables of one row are in the place of the model's."""
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
