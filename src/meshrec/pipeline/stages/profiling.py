"""Measures the units of a model at several split sizes, and chooses cuts and split size by what it saw."""

import statistics
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from meshrec.distributed.awaitable import LazyAwaitable
from meshrec.pipeline.stages.choosing import Choice, Cut, UnitCost, best_cut, bound
from meshrec.pipeline.stages.programs import Staging, program
from meshrec.pipeline.stages.samples import split, split_sizes
from meshrec.pipeline.stages.tracing import Program, Traced

CANDIDATES = (2, 4, 8, 16, 32, 64)
"""Numbers of splits that are tried: more than 64 leave a bubble of a 64th at most, less than noise."""
_REPEATS = 3
EXCHANGE_SECONDS = 1e-4
"""What a split costs a stage beside its operations (futures, detached tensors): seen on several machines; it
decides only where splits are of this size."""


def choose_for(
    traced: Traced,
    taken: Mapping[str, Any],
    batch: int,
    *,
    num_stages: int,
    staging: Staging | None,
    split_size: int | Literal["auto"],
    num_threads: int,
) -> Choice:
    """Measures the units on a batch, and chooses what is not given: the stages, the number of splits.

    The model's buffers and torch's random numbers are as before; tables are looked up, not updated.
    """
    fixed = None if staging is None else staging.stage_of
    if split_size == "auto":
        counts = [k for k in CANDIDATES if k <= batch] or [1]
    else:
        counts = [len(split_sizes(batch, split_size))]
    final = set(traced.output.all_input_nodes)
    programs = [program(traced, unit.nodes, final) for unit in traced.units]
    before = [buffer.clone() for buffer in traced.model.buffers()]
    threads = torch.get_num_threads()
    choices: dict[int, tuple[Cut, float]] = {}
    try:
        torch.set_num_threads(num_threads)
        with torch.random.fork_rng(devices=[]):
            for count in counts:
                costs = measured(traced, programs, taken, batch, count, num_stages)
                needs = [unit.needs for unit in traced.units]
                cut = best_cut(costs, needs, num_stages, count)
                least = bound(cut, costs, num_stages, count)
                if fixed is not None:
                    cut = Cut(fixed, seconds_of(costs, fixed, count), False)
                choices[count] = cut, least
    finally:
        torch.set_num_threads(threads)
        with torch.no_grad():
            for buffer, value in zip(traced.model.buffers(), before, strict=True):
                buffer.copy_(value)
    count = min(choices, key=lambda k: choices[k][0].seconds)
    cut, least = choices[count]
    predicted = {k: each[0].seconds for k, each in choices.items()}
    return Choice(cut.stage_of, count, cut.seconds, least, predicted)


def measured(
    traced: Traced,
    programs: Sequence[Program],
    taken: Mapping[str, Any],
    batch: int,
    num_splits: int,
    num_workers: int,
) -> list[UnitCost]:
    """Seconds of each unit for one of ``num_splits``. All workers measure at once, as they will share the
    memory later. A unit that works on the whole batch counts as if it were spread over the splits.
    """
    sizes = split_sizes(batch, -(-batch // num_splits))

    def rounds() -> list[list[UnitCost]]:
        return [_measure(traced, programs, taken, sizes) for _ in range(_REPEATS + 1)][1:]

    with ThreadPoolExecutor(num_workers) as pool:
        found = [each for job in [pool.submit(rounds) for _ in range(num_workers)] for each in job.result()]
    return [
        UnitCost(*(statistics.median(numbers) for numbers in zip(*unit, strict=True)))
        for unit in zip(*found, strict=True)
    ]


class _Timed(NamedTuple):
    result: Any
    seconds: float


def _measure(
    traced: Traced, programs: Sequence[Program], taken: Mapping[str, Any], sizes: Sequence[int]
) -> list[UnitCost]:
    values: dict[str, Any] = {}
    costs = []
    for unit, own in zip(traced.units, programs, strict=True):
        if unit.whole:
            costs.append(_measure_whole(own, taken, sizes, values))
            continue
        # From the batch the first split; the parts before made it of theirs.
        arguments = [
            values[name] if name in values else split(taken[name], sizes, f"the input {name!r}")[0]
            for name in own.takes
        ]
        flat, spec = pytree.tree_flatten(arguments)
        flat = [_as_input(leaf) for leaf in flat]
        with torch.enable_grad():
            results, forward = _timed(own.module, *pytree.tree_unflatten(flat, spec))
        values.update(zip(own.gives, results, strict=True))
        ends = [e for e in pytree.tree_leaves(results) if isinstance(e, Tensor) and e.requires_grad]
        wanted = [e for e in [*flat, *own.module.parameters()] if isinstance(e, Tensor) and e.requires_grad]
        backward = 0.0
        if ends and wanted:
            ones = [torch.ones_like(end) for end in ends]
            found, backward = _timed(torch.autograd.grad, ends, wanted, ones, allow_unused=True)
            backward += _timed(
                _add, found[sum(isinstance(e, Tensor) and e.requires_grad for e in flat) :]
            ).seconds
        costs.append(UnitCost(forward, backward))
    share = EXCHANGE_SECONDS / len(costs)
    return [UnitCost(c.forward + share, c.backward + share) for c in costs]


def _add(gradients: Sequence[Tensor | None]) -> None:
    """What adding up the gradients of splits takes."""
    for gradient in gradients:
        if gradient is not None:
            gradient += gradient


def _measure_whole(
    own: Program, taken: Mapping[str, Any], sizes: Sequence[int], values: dict[str, Any]
) -> UnitCost:
    with torch.no_grad():
        results, seconds = _timed(own.module, *(taken[name] for name in own.takes))
        for name, value in zip(own.gives, results, strict=True):
            value = value.wait() if isinstance(value, LazyAwaitable) else value
            first = split(value, sizes, f"the value {name!r}")[0]
            values[name] = pytree.tree_map(_floats_want_gradients, first)
    # The backward pass, which would update the tables, reads and writes the rows that were read.
    return UnitCost(seconds / len(sizes), 2 * seconds / len(sizes))


def _floats_want_gradients(leaf: Any) -> Any:
    return leaf.detach().requires_grad_() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf


def _as_input(leaf: Any) -> Any:
    return leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf


def _timed(function: Any, *args: Any, **kwargs: Any) -> _Timed:
    start = time.perf_counter()
    result = function(*args, **kwargs)
    return _Timed(result, time.perf_counter() - start)


def seconds_of(costs: Sequence[UnitCost], stage_of: Sequence[int], num_splits: int) -> float:
    """A step of given stages, see ``choosing``."""
    stages = range(max(stage_of) + 1)
    forward = [sum(c.forward for c, s in zip(costs, stage_of, strict=True) if s == stage) for stage in stages]
    backward = [
        sum(c.backward for c, s in zip(costs, stage_of, strict=True) if s == stage) for stage in stages
    ]
    return sum(forward) + sum(backward) + (num_splits - 1) * (max(forward) + max(backward))
