"""Measurement of a model's units at several split sizes, and the choice of cuts and split size."""

import statistics
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from meshrec.distributed.awaitable import LazyAwaitable
from meshrec.pipeline.stages.choosing import StageChoice, StageCut, UnitCost, best_cut, bound
from meshrec.pipeline.stages.programs import Staging, program, shared_parameters, stage_programs
from meshrec.pipeline.stages.running import entered
from meshrec.pipeline.stages.samples import split, split_sizes
from meshrec.pipeline.stages.tracing import PartProgram, Traced

CANDIDATES = (2, 4, 8, 16, 32, 64)
"""Numbers of splits to try. More than 64 would save less than a 64th of the step, which is below the
noise.
"""
_REPEATS = 3
_IN_FLIGHT = 4
"""Number of splits whose results are kept while a stage is measured. Memory of a split is then not reused by
the next one.
"""
EXCHANGE_SECONDS = 1e-4
"""Seconds that a split costs a stage besides its operations (futures, detached tensors), measured on several
machines.

It matters only if splits take about as long as this.
"""


def choose_for(
    traced: Traced,
    taken: Mapping[str, Any],
    batch: int,
    *,
    num_stages: int,
    staging: Staging | None,
    split_size: int | Literal["auto"],
    num_threads: int,
) -> StageChoice:
    """Measure the units on a batch, and choose the stages or the number of splits, whichever is not given.

    The model's buffers and torch's random number generator are restored. Tables are looked up, but not
    updated.
    """
    fixed = None if staging is None else staging.stage_of
    if split_size == "auto":
        counts = [k for k in CANDIDATES if k <= batch] or [1]
    else:
        counts = [len(split_sizes(batch, split_size))]
    final = set(traced.output.all_input_nodes)
    programs = [program(traced, unit.nodes, final) for unit in traced.units]
    needs, shared = [unit.needs for unit in traced.units], shared_parameters(traced)
    before = [buffer.clone() for buffer in traced.model.buffers()]
    threads = torch.get_num_threads()
    choices: dict[int, _Measured] = {}
    try:
        torch.set_num_threads(num_threads)
        with torch.random.fork_rng(devices=[]):
            for count in counts:
                costs = measured(traced, programs, taken, batch, num_splits=count, num_workers=num_stages)
                cut = best_cut(costs, needs, num_stages, count, shared=shared)
                least = bound(cut, costs, num_stages, count)
                if fixed is not None:
                    cut = StageCut(fixed, seconds_of(costs, fixed, count), False)
                # The stages as they will run: what units take one by one says which cut is best, and no more.
                stages = measured_stages(stage_programs(traced, cut.stage_of), taken, batch, count)
                seconds = seconds_of(stages, range(num_stages), count)
                choices[count] = _Measured(cut.stage_of, seconds, least * seconds / cut.seconds)
    finally:
        torch.set_num_threads(threads)
        with torch.no_grad():
            for buffer, value in zip(traced.model.buffers(), before, strict=True):
                buffer.copy_(value)
    count = min(choices, key=lambda k: choices[k].seconds)
    predicted = {k: each.seconds for k, each in choices.items()}
    return StageChoice(choices[count].stage_of, count, predicted[count], choices[count].bound, predicted)


class _Measured(NamedTuple):
    """The best cut for a number of splits. ``bound``: no cut takes less."""

    stage_of: list[int]
    seconds: float
    bound: float


def measured(
    traced: Traced,
    programs: Sequence[PartProgram],
    taken: Mapping[str, Any],
    batch: int,
    *,
    num_splits: int,
    num_workers: int,
) -> list[UnitCost]:
    """Measure the seconds of each unit for one of ``num_splits``.

    All workers measure at the same time, because they will share the memory bandwidth later. The cost of a
    unit that works on the whole batch is divided by the number of splits.
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


def measured_stages(
    staging: Staging, taken: Mapping[str, Any], batch: int, num_splits: int
) -> list[UnitCost]:
    """Measure the seconds of each stage for one of ``num_splits``, with all stages at work."""
    sizes = split_sizes(batch, -(-batch // num_splits))
    values: dict[str, Any] = {}
    whole = [UnitCost(0.0, 0.0)] * len(staging.stages)
    arguments = []
    for stage in staging.stages:
        if stage.whole is not None:
            whole[stage.index] = _measure_whole(stage.whole, taken, sizes, values)
        own = _arguments(stage.split, taken, sizes, values)
        arguments.append(own)
        with torch.enable_grad():
            values.update(zip(stage.split.gives, stage.split.module(*entered(_inputs(own))), strict=True))
    together = threading.Barrier(len(arguments))

    def rounds(index: int) -> UnitCost:
        together.wait()
        program, depth = staging.stages[index].split, min(num_splits, _IN_FLIGHT)
        found = [_measure_part(program, arguments[index], depth) for _ in range(_REPEATS + 1)][1:]
        return UnitCost(*(statistics.median(numbers) for numbers in zip(*found, strict=True)))

    with ThreadPoolExecutor(len(arguments)) as pool:
        split_costs = list(pool.map(rounds, range(len(arguments))))
    return [
        UnitCost(*(a + b + EXCHANGE_SECONDS for a, b in zip(one, other, strict=True)))
        for one, other in zip(whole, split_costs, strict=True)
    ]


def _measure_part(program: PartProgram, arguments: Sequence[Any], depth: int) -> UnitCost:
    """Return the mean of ``depth`` splits: forward one after the other, then backward in reverse order."""
    kept = []
    forward = backward = 0.0
    for _ in range(depth):
        inputs = _inputs(arguments)
        with torch.enable_grad():
            results, seconds = _timed(program.module, *entered(inputs))
        forward += seconds
        kept.append((inputs, results))
    while kept:
        backward += _measure_backward(program, *kept.pop())
    return UnitCost(forward / depth, backward / depth)


def _measure_backward(program: PartProgram, inputs: Sequence[Any], results: Sequence[Any]) -> float:
    ends = [e for e in pytree.tree_leaves(results) if isinstance(e, Tensor) and e.requires_grad]
    leaves = [e for e in pytree.tree_leaves(inputs) if isinstance(e, Tensor) and e.requires_grad]
    parameters = [p for p in program.module.parameters() if p.requires_grad]
    if not ends or not (leaves or parameters):
        return 0.0
    ones = [torch.ones_like(end) for end in ends]
    wanted = [*leaves, *parameters]
    found, seconds = _timed(torch.autograd.grad, ends, wanted, ones, allow_unused=True)
    return seconds + _timed(_add, found[len(leaves) :]).seconds


def _arguments(
    program: PartProgram, taken: Mapping[str, Any], sizes: Sequence[int], values: Mapping[str, Any]
) -> list[Any]:
    """Return the arguments of the first split: from the batch, or from the results of earlier parts."""
    return [
        values[name] if name in values else split(taken[name], sizes, f"the input {name!r}")[0]
        for name in program.takes
    ]


def _inputs(arguments: Sequence[Any]) -> list[Any]:
    """Return the arguments detached from the graph that made them."""
    return [pytree.tree_map(_as_input, argument) for argument in arguments]


class _TimedResult(NamedTuple):
    result: Any
    seconds: float


def _measure(
    traced: Traced, programs: Sequence[PartProgram], taken: Mapping[str, Any], sizes: Sequence[int]
) -> list[UnitCost]:
    values: dict[str, Any] = {}
    costs = []
    for unit, own in zip(traced.units, programs, strict=True):
        if unit.whole:
            costs.append(_measure_whole(own, taken, sizes, values))
            continue
        inputs = _inputs(_arguments(own, taken, sizes, values))
        with torch.enable_grad():
            results, forward = _timed(own.module, *entered(inputs))
        values.update(zip(own.gives, results, strict=True))
        costs.append(UnitCost(forward, _measure_backward(own, inputs, results)))
    share = EXCHANGE_SECONDS / len(costs)
    return [UnitCost(c.forward + share, c.backward + share) for c in costs]


def _add(gradients: Sequence[Tensor | None]) -> None:
    """Add each gradient to itself, which costs as much as accumulating the gradients of splits."""
    for gradient in gradients:
        if gradient is not None:
            gradient += gradient


def _measure_whole(
    own: PartProgram, taken: Mapping[str, Any], sizes: Sequence[int], values: dict[str, Any]
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
    # A copy: the same values are measured several times, and a unit may change them in place.
    return leaf.detach().clone().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf


def _timed(function: Any, *args: Any, **kwargs: Any) -> _TimedResult:
    start = time.perf_counter()
    result = function(*args, **kwargs)
    return _TimedResult(result, time.perf_counter() - start)


def seconds_of(costs: Sequence[UnitCost], stage_of: Sequence[int], num_splits: int) -> float:
    """Return the seconds of a step with given stages; the formula is in `choosing`."""
    stages = range(max(stage_of) + 1)
    forward = [sum(c.forward for c, s in zip(costs, stage_of, strict=True) if s == stage) for stage in stages]
    backward = [
        sum(c.backward for c, s in zip(costs, stage_of, strict=True) if s == stage) for stage in stages
    ]
    return sum(forward) + sum(backward) + (num_splits - 1) * (max(forward) + max(backward))
