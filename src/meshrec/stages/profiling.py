"""Measure a model's units at several split sizes, and choose the stages and the split size.

See [Note: units, stages, splits and lanes] in ``stages/__init__.py`` for the terms.
"""

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
from meshrec.stages.choosing import StageChoice, StageCut, UnitCost, best_cut, bound
from meshrec.stages.programs import Staging, program, shared_parameters, stage_programs
from meshrec.stages.running import make_writable
from meshrec.stages.samples import split, split_sizes
from meshrec.stages.tracing import PartProgram, Traced

CANDIDATES = (2, 4, 8, 16, 32, 64)
"""Split counts to try. More than 64 would save less than a 64th of the step, below the noise."""
# Rounds per measurement. The median over rounds is used; a warm-up round comes first and does not count.
_REPEATS = 3
_IN_FLIGHT = 4
"""Number of forward passes that a stage runs before their backward passes while it is measured. Training also
keeps the results of several splits in memory.
"""
EXCHANGE_SECONDS = 1e-4
"""Seconds per split and stage for futures and detached tensors, in addition to the model's operations.
Measured on several machines. It matters only for splits that take about as long.
"""


def measure_and_choose(
    traced: Traced,
    batch_values: Mapping[str, Any],
    batch: int,
    *,
    num_stages: int,
    staging: Staging | None,
    split_size: int | Literal["auto"],
    num_threads: int,
) -> StageChoice:
    """Measure every unit on a batch, and choose the stages, the number of splits (microbatches), or both.

    The training run is not changed: model buffers and torch's CPU random generator are restored, and tables
    are looked up but not updated.

    Args:
        batch_values: batch values read by units, by value name.
        staging: the stages if the user has set the cuts; None to choose them.
        split_size: samples per split if the user has set them, or "auto" to choose.

    Returns:
        The choice with the shortest predicted step over all split counts that were tried.
    """
    fixed = None if staging is None else staging.stage_of
    if split_size == "auto":
        counts = [k for k in CANDIDATES if k <= batch] or [1]
    else:
        counts = [len(split_sizes(batch, split_size))]
    final = set(traced.output.all_input_nodes)
    programs = [program(traced, unit.nodes, final) for unit in traced.units]
    needs, shared = [unit.needs for unit in traced.units], shared_parameters(traced)
    # Forward passes change buffers, such as batch norm statistics.
    before = [buffer.clone() for buffer in traced.model.buffers()]
    threads = torch.get_num_threads()
    choices: dict[int, _Measured] = {}
    try:
        torch.set_num_threads(num_threads)
        # Measuring must not change the training run: RNG, buffers and thread count are restored.
        with torch.random.fork_rng(devices=[]):
            for count in counts:
                costs = measure_units(
                    traced, programs, batch_values, batch, num_splits=count, num_workers=num_stages
                )
                cut = best_cut(costs, needs, num_stages, count, shared=shared)
                least = bound(cut, costs, num_stages, count)
                if fixed is not None:
                    cut = StageCut(fixed, step_seconds(costs, fixed, count), False)
                # Unit times rank the cuts. The stages of the best cut are measured as a whole, because
                # units measured one by one are up to 15 % off. The bound is scaled by the same error.
                stages = _measure_stages(stage_programs(traced, cut.stage_of), batch_values, batch, count)
                seconds = step_seconds(stages, range(num_stages), count)
                choices[count] = _Measured(cut.stage_of, seconds, least * seconds / cut.seconds)
    finally:
        torch.set_num_threads(threads)
        with torch.no_grad():
            for buffer, value in zip(traced.model.buffers(), before, strict=True):
                buffer.copy_(value)
    count = min(choices, key=lambda k: choices[k].seconds)
    predicted = {k: choice.seconds for k, choice in choices.items()}
    return StageChoice(choices[count].stage_of, count, predicted[count], choices[count].bound, predicted)


class _Measured(NamedTuple):
    """Result for a split count: the best cut, the seconds per step, and a lower bound over all cuts."""

    stage_of: list[int]
    seconds: float
    bound: float


def measure_units(
    traced: Traced,
    programs: Sequence[PartProgram],
    batch_values: Mapping[str, Any],
    batch: int,
    *,
    num_splits: int,
    num_workers: int,
) -> list[UnitCost]:
    """Measure the forward and backward seconds per split (microbatch) for every unit.

    If a unit runs once per batch, the time is divided by the split count. Several threads run the same
    measurement at the same time, because stages also share memory bandwidth in training.

    Args:
        batch_values: batch values read by units, by value name.
        num_workers: number of threads that measure at the same time.

    Returns:
        Cost of every unit, as the median over threads and repetitions.
    """
    # Rounded up, so there are at most ``num_splits`` splits.
    sizes = split_sizes(batch, -(-batch // num_splits))

    def measure_repeatedly() -> list[list[UnitCost]]:
        """Return all unit costs, measured ``_REPEATS`` times after a warm-up round."""
        return [_measure_all_units(traced, programs, batch_values, sizes) for _ in range(_REPEATS + 1)][1:]

    with ThreadPoolExecutor(num_workers) as pool:
        rounds_of_all = [
            result
            for job in [pool.submit(measure_repeatedly) for _ in range(num_workers)]
            for result in job.result()
        ]
    return [
        UnitCost(*(statistics.median(seconds) for seconds in zip(*unit, strict=True)))
        for unit in zip(*rounds_of_all, strict=True)
    ]


def _measure_stages(
    staging: Staging, batch_values: Mapping[str, Any], batch: int, num_splits: int
) -> list[UnitCost]:
    """Measure the forward and backward seconds per split (microbatch) for every stage.

    All stages run at the same time during the measurement, as in training.

    Returns:
        Cost of every stage, including `EXCHANGE_SECONDS` and the stage's share of the table lookups.
    """
    sizes = split_sizes(batch, -(-batch // num_splits))
    # Results for the first split by value name, which later stages get as arguments.
    values: dict[str, Any] = {}
    whole = [UnitCost(0.0, 0.0)] * len(staging.stages)
    arguments = []
    for stage in staging.stages:
        if stage.batch_program is not None:
            whole[stage.index] = _measure_whole(stage.batch_program, batch_values, sizes, values)
        stage_arguments = _arguments(stage.split_program, batch_values, sizes, values)
        arguments.append(stage_arguments)
        with torch.enable_grad():
            values.update(
                zip(
                    stage.split_program.output_names,
                    stage.split_program.module(*make_writable(_detached(stage_arguments))),
                    strict=True,
                )
            )
    together = threading.Barrier(len(arguments))

    def measure_split(index: int) -> UnitCost:
        """Return the cost per split of stage ``index``, as the median over ``_REPEATS`` rounds."""
        # All stages start together, because they will share memory bandwidth in training.
        together.wait()
        program, depth = staging.stages[index].split_program, min(num_splits, _IN_FLIGHT)
        # The first round warms up, and is not counted.
        costs = [_measure_part(program, arguments[index], depth) for _ in range(_REPEATS + 1)][1:]
        return UnitCost(*(statistics.median(seconds) for seconds in zip(*costs, strict=True)))

    with ThreadPoolExecutor(len(arguments)) as pool:
        split_costs = list(pool.map(measure_split, range(len(arguments))))
    return [
        UnitCost(*(a + b + EXCHANGE_SECONDS for a, b in zip(one, other, strict=True)))
        for one, other in zip(whole, split_costs, strict=True)
    ]


def _measure_part(program: PartProgram, arguments: Sequence[Any], depth: int) -> UnitCost:
    """Return the mean forward and backward seconds per split (microbatch) of a stage's program.

    Runs ``depth`` forward passes, then the backward passes in reverse order, as `ThreadedBatch` does.
    """
    pending = []
    forward = backward = 0.0
    for _ in range(depth):
        inputs = _detached(arguments)
        with torch.enable_grad():
            results, seconds = _timed(program.module, *make_writable(inputs))
        forward += seconds
        pending.append((inputs, results))
    # Last in, first out, as stages run their backward passes.
    while pending:
        backward += _measure_backward(program, *pending.pop())
    return UnitCost(forward / depth, backward / depth)


def _measure_backward(program: PartProgram, inputs: Sequence[Any], results: Sequence[Any]) -> float:
    """Run a backward pass from ``results`` to ``inputs`` and the program's parameters; return the seconds.

    The time includes adding the parameter gradients to a sum. Returns 0 if no tensor requires a gradient.
    """
    ends = [e for e in pytree.tree_leaves(results) if isinstance(e, Tensor) and e.requires_grad]
    leaves = [e for e in pytree.tree_leaves(inputs) if isinstance(e, Tensor) and e.requires_grad]
    parameters = [p for p in program.module.parameters() if p.requires_grad]
    if not ends or not (leaves or parameters):
        return 0.0
    # Any gradient takes the same time.
    ones = [torch.ones_like(end) for end in ends]
    targets = [*leaves, *parameters]
    gradients, seconds = _timed(torch.autograd.grad, ends, targets, ones, allow_unused=True)
    # From the second split on, training adds the parameter gradients to the sum over earlier splits.
    return seconds + _timed(_accumulate_into_self, gradients[len(leaves) :]).seconds


def _arguments(
    program: PartProgram, batch_values: Mapping[str, Any], sizes: Sequence[int], values: Mapping[str, Any]
) -> list[Any]:
    """Return the program's arguments for the first split (microbatch)."""
    return [
        values[name] if name in values else split(batch_values[name], sizes, f"the input {name!r}")[0]
        for name in program.input_names
    ]


def _detached(arguments: Sequence[Any]) -> list[Any]:
    """Return copies of a program's arguments, detached from the autograd graph.

    Every tensor keeps its ``requires_grad``.
    """
    return [pytree.tree_map(_as_input, argument) for argument in arguments]


class _TimedResult(NamedTuple):
    """Result of a function call, and the wall-clock seconds that the call took."""

    result: Any
    seconds: float


def _measure_all_units(
    traced: Traced, programs: Sequence[PartProgram], batch_values: Mapping[str, Any], sizes: Sequence[int]
) -> list[UnitCost]:
    """Run the first split (microbatch) once through all units, and return the seconds of every unit."""
    values: dict[str, Any] = {}
    costs = []
    for unit, part in zip(traced.units, programs, strict=True):
        if unit.once_per_batch:
            costs.append(_measure_whole(part, batch_values, sizes, values))
            continue
        inputs = _detached(_arguments(part, batch_values, sizes, values))
        with torch.enable_grad():
            results, forward = _timed(part.module, *make_writable(inputs))
        values.update(zip(part.output_names, results, strict=True))
        costs.append(UnitCost(forward, _measure_backward(part, inputs, results)))
    # The stages are not known yet, so spread the exchange time of a single stage over all units.
    share = EXCHANGE_SECONDS / len(costs)
    return [UnitCost(c.forward + share, c.backward + share) for c in costs]


def _accumulate_into_self(gradients: Sequence[Tensor | None]) -> None:
    """Add every gradient to itself in place; None is skipped.

    In training, gradients are added to a sum over earlier splits (microbatches). This addition takes equally
    long, so it is timed instead.
    """
    for gradient in gradients:
        if gradient is not None:
            gradient += gradient


def _measure_whole(
    part: PartProgram, batch_values: Mapping[str, Any], sizes: Sequence[int], values: dict[str, Any]
) -> UnitCost:
    """Measure a program which runs once per batch, such as a table lookup, instead of once per microbatch.

    Returns:
        Seconds per batch divided by the split count. The backward time is estimated as twice the forward
        time, because a measured backward pass would update the tables.
    """
    with torch.no_grad():
        results, seconds = _timed(part.module, *(batch_values[name] for name in part.input_names))
        for name, value in zip(part.output_names, results, strict=True):
            # A sharded table returns a lazy result, whose exchange between ranks is not measured.
            value = value.wait() if isinstance(value, LazyAwaitable) else value
            first = split(value, sizes, f"the value {name!r}")[0]
            values[name] = pytree.tree_map(_floats_want_gradients, first)
    # The table update reads and writes the rows that the lookup has read, hence the estimate of 2.
    return UnitCost(seconds / len(sizes), 2 * seconds / len(sizes))


def _floats_want_gradients(leaf: Any) -> Any:
    """Return a detached floating-point tensor that requires a gradient; return other leaves unchanged."""
    return leaf.detach().requires_grad_() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf


def _as_input(leaf: Any) -> Any:
    """Return a detached copy of a tensor, which keeps ``requires_grad``; return other leaves unchanged."""
    # Copied, because values are measured repeatedly and a unit may change them in place.
    return leaf.detach().clone().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf


def _timed(function: Any, *args: Any, **kwargs: Any) -> _TimedResult:
    """Call ``function`` with the arguments, and return the result and the seconds that the call took."""
    start = time.perf_counter()
    result = function(*args, **kwargs)
    return _TimedResult(result, time.perf_counter() - start)


def step_seconds(costs: Sequence[UnitCost], stage_of: Sequence[int], num_splits: int) -> float:
    """Return the predicted seconds per step for a cut, without the time on links between stages.

    The formula is at the top of ``choosing.py``.

    Args:
        costs: seconds per split (microbatch) for every unit.
        stage_of: stage number for every unit.
        num_splits: splits per batch.
    """
    stages = range(max(stage_of) + 1)
    forward = [sum(c.forward for c, s in zip(costs, stage_of, strict=True) if s == stage) for stage in stages]
    backward = [
        sum(c.backward for c, s in zip(costs, stage_of, strict=True) if s == stage) for stage in stages
    ]
    return sum(forward) + sum(backward) + (num_splits - 1) * (max(forward) + max(backward))
