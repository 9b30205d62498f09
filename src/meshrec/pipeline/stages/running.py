"""The work of one stage on a batch: forward and backward of each split, and of its tables.

The autograd graph is cut between stages: a stage receives detached values, and later sends back their
gradients. How values travel, and in which order a stage works, is decided in `threads` (one process) and
`ranks`.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from meshrec.distributed.awaitable import LazyAwaitable
from meshrec.pipeline.stages.programs import StageFlow, StageProgram
from meshrec.pipeline.stages.randomness import SplitRandomness
from meshrec.pipeline.stages.samples import split
from meshrec.pipeline.stages.timeline import Kind, Timeline
from meshrec.pipeline.stages.values import Gradients, GradientSums, StageValues

GENERATOR = "random numbers"


class StageError(RuntimeError):
    """Failure of a stage. The message names the stage and the split; ``__cause__`` is the original error."""


class Mode(NamedTuple):
    """The way to run a batch."""

    grad: bool
    """Whether to keep what a backward pass needs."""
    seed: int | None
    """Seed of random numbers; None: none are drawn."""
    autocast: dict[str, torch.dtype]
    """The type of each kind of device that autocast is on for."""

    @classmethod
    def now(cls, *, grad: bool, seed: int | None) -> "Mode":
        """Return a mode with the caller's autocast, which worker threads do not see by themselves."""
        kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
        return cls(grad, seed, {kind: torch.get_autocast_dtype(kind) for kind in kinds})


class _Kept(NamedTuple):
    """State that the backward pass of a split needs: detached inputs, and outputs with their graph."""

    leaves: dict[str, Gradients]
    """Leaves of each input value; None for leaves without a gradient."""
    outputs: dict[str, list[Any]]


class StageRun:
    """One batch in one stage.

    Call ``tables``, then ``forward`` for each split; later ``backward`` for each split in any order, then
    ``deliver``, ``values.collect`` and ``tables_backward``.

    Args:
        flow: the values that this stage exchanges with the others.
        call: runs a program of the stage, "whole" or "split".
        values: the batch, and the values of other stages.
        mode: how to run the batch.
        timeline: records what is done.

    Attributes:
        values: the values of the batch in this stage.
        where: what the stage does now, for messages.
        drew: whether the stage drew random numbers; known if ``mode.seed`` is given.
    """

    def __init__(
        self, flow: StageFlow, call: "Caller", values: StageValues, *, mode: Mode, timeline: Timeline
    ) -> None:
        self._flow, self._call, self.values, self._mode, self._timeline = flow, call, values, mode, timeline
        self.where = "before its first split"
        self.drew = False
        self._kept: dict[int, _Kept] = {}
        self._sums = GradientSums([] if call.direct else [p for p in call.parameters() if p.requires_grad])

    @property
    def stage(self) -> StageProgram:
        """The program of the stage."""
        return self._flow.stage

    @property
    def num_splits(self) -> int:
        """Number of splits of the batch."""
        return len(self.values.inputs.sizes)

    def tables(self) -> None:
        """Look up the stage's tables for the whole batch, if it has any."""
        whole, inputs = self.stage.whole, self.values.inputs
        if whole is None:
            return
        pieces: dict[str, list[Any]] = {}
        with self._recorded("tables", -1), torch.set_grad_enabled(self._mode.grad):
            results = self._call("whole", [inputs.whole[name] for name in whole.takes])
            for name, value in zip(whole.gives, results, strict=True):
                value = value.wait() if isinstance(value, LazyAwaitable) else value
                pieces[name] = split(value, inputs.sizes, f"the value {name!r}")
        self.values.publish_pieces(pieces)

    def forward(self, k: int) -> None:
        """Run split ``k`` as soon as its inputs have arrived."""
        program, takes, values = self.stage.split, self._flow.takes, self.values
        taken = {name: values.take(name, k) for name in takes}
        with self._recorded("forward", k):
            leaves: dict[str, Gradients] = {}
            arguments = []
            for name, value in taken.items():
                argument, leaves[name] = _detached(value, self._mode.grad)
                arguments.append(entered(argument) if self._mode.grad else argument)
            num_arguments = len(program.takes)
            tensors = [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, Tensor)]
            with self._context(k, tensors[0].device if tensors else torch.device("cpu")):
                given = dict(zip(program.gives, self._call("split", arguments[:num_arguments]), strict=True))
            carried = dict(zip(takes[num_arguments:], arguments[num_arguments:], strict=True))
            values.results.update({(name, k): value for name, value in carried.items()})
            if self._mode.grad:
                outputs = {
                    name: pytree.tree_leaves(value) for name, value in (*given.items(), *carried.items())
                }
                self._kept[k] = _Kept(leaves, outputs)
        for name, value in given.items():
            values.publish(name, k, value)

    def backward(self, k: int, result_gradients: Mapping[str, Gradients]) -> None:
        """Run the backward pass of split ``k``, from gradients of returned values and of values that other
        stages used.
        """
        if k not in self._kept:
            raise RuntimeError(
                "this batch has had its backward pass: its stages kept nothing. Run the model again "
                "(retain_graph is not supported by stages)."
            )
        arrived = self.values.arrived(k, result_gradients)
        kept = self._kept.pop(k)
        with self._recorded("backward", k):
            leaves = [leaf for each in kept.leaves.values() for leaf in each if leaf is not None]
            ends, given = _ends(kept.outputs, arrived)
            if self._call.direct:
                self._call.before_backward(last=self._sums.num_added == self.num_splits - 1)
                if ends:
                    torch.autograd.backward(ends, given)
                found: Sequence[Tensor | None] = [leaf.grad for leaf in leaves]
            else:
                found = _gradients(ends, given, [*leaves, *self._sums.parameters])
            self._sums.add(found[len(leaves) :])
        by_leaf = iter(found[: len(leaves)])
        for name, each in kept.leaves.items():
            self.values.give_back(name, k, [None if leaf is None else next(by_leaf) for leaf in each])

    def deliver(self) -> None:
        """Add the gradients of all splits to the parameters' ``grad``."""
        self._sums.deliver()

    def tables_backward(self) -> None:
        """Run the backward pass of the tables, which updates tables with a fused optimizer."""
        ends, gradients = self.values.take_table_ends()
        if ends:
            with self._recorded("tables", -1):
                torch.autograd.backward(ends, gradients)

    @contextmanager
    def _context(self, k: int, device: torch.device) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(self._mode.grad))
            for kind, dtype in self._mode.autocast.items():
                stack.enter_context(torch.autocast(kind, dtype=dtype))
            if self._mode.seed is None:
                yield
                return
            # A split's generator goes from stage to stage with it.
            index, generator, exchange = self.stage.index, torch.Generator(device), self.values.exchange
            generator.manual_seed(split_seed(self._mode.seed, k))
            if index > 0:
                kind, state = exchange.get(GENERATOR, k, index - 1, index)
                if kind == device.type:  # numbers of another kind of device would differ anyway
                    generator.set_state(state)
            randomness = stack.enter_context(SplitRandomness(generator))
            yield
            self.drew |= randomness.drew
            if not self._flow.is_last:
                exchange.put(GENERATOR, k, (device.type, generator.get_state()), index, index + 1)

    @contextmanager
    def _recorded(self, kind: Kind, k: int) -> Iterator[None]:
        self.where = "tables" if k < 0 else f"{kind} of split {k} of {self.num_splits}"
        start = time.perf_counter()
        yield
        self._timeline.add(self.stage.index, kind, k, start)


class Caller(ABC):
    """Runs the programs of a stage with the modules that the stage holds.

    If ``direct``, backward passes accumulate into the parameters' ``grad`` themselves, split by split.
    Otherwise gradients are summed beside them, and `StageRun.deliver` hands them over.
    """

    direct = False

    @abstractmethod
    def __call__(self, which: str, arguments: Sequence[Any]) -> Sequence[Any]:
        """Return the values that the program "whole" or "split" gives."""

    @abstractmethod
    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters of the program "split". Parameters of tables are not included."""

    @abstractmethod
    def before_backward(self, *, last: bool) -> None:
        """Prepare for the backward pass of a split, if ``direct``.

        Args:
            last: whether it is the last split of the batch to run backward.
        """


def split_seed(seed: int, k: int) -> int:
    """Return the seed of the generator of split ``k``, in a batch whose seed is ``seed``."""
    return (seed + k) % (1 << 63)


class _Entry(torch.autograd.Function):
    """Lets a stage write in place to what another stage gave it, which autograd forbids for a leaf."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


def entered(value: Any) -> Any:
    """Return ``value`` with tensors in the place of its leaves, which operations may change in place."""
    with torch.enable_grad():
        return pytree.tree_map(
            lambda leaf: (
                _Entry.apply(leaf) if isinstance(leaf, Tensor) and leaf.requires_grad else leaf  # type: ignore[no-untyped-call]
            ),
            value,
        )


def _detached(value: Any, grad: bool) -> tuple[Any, Gradients]:
    """Return ``value`` with detached leaves in place of its tensors, and the leaves that require a
    gradient.
    """
    flat, spec = pytree.tree_flatten(value)
    leaves: Gradients = []
    for index, leaf in enumerate(flat):
        wanted = grad and isinstance(leaf, Tensor) and leaf.requires_grad
        if isinstance(leaf, Tensor):
            flat[index] = leaf.detach().requires_grad_(wanted)
        leaves.append(flat[index] if wanted else None)
    return (pytree.tree_unflatten(flat, spec) if any(leaf is not None for leaf in leaves) else value), leaves


def _ends(
    outputs: Mapping[str, Sequence[Any]], gradients: Mapping[str, Sequence[Tensor | None] | None]
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the outputs that have a gradient, and these gradients: the start of a backward pass."""
    pairs = [
        (leaf, gradient)
        for name, leaves in outputs.items()
        for leaf, gradient in zip(leaves, gradients.get(name) or [None] * len(leaves), strict=True)
        if gradient is not None and isinstance(leaf, Tensor) and leaf.requires_grad
    ]
    return [end for end, _ in pairs], [gradient for _, gradient in pairs]


def _gradients(
    ends: Sequence[Tensor], given: Sequence[Tensor], wanted: Sequence[Tensor | nn.Parameter]
) -> Sequence[Tensor | None]:
    if not ends or not wanted:
        return [None] * len(wanted)
    return torch.autograd.grad(ends, wanted, given, allow_unused=True)
