"""A stage's work on a batch: forward and backward passes for splits and tables.

The autograd graph is cut between stages. A stage receives detached values, and later sends back their
gradients. See `threads` (one process) and `ranks` for transport and scheduling.
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
from meshrec.stages.programs import StageFlow, StageProgram
from meshrec.stages.randomness import SplitRandomness
from meshrec.stages.samples import split
from meshrec.stages.timeline import Kind, Timeline
from meshrec.stages.values import Gradients, GradientSums, Message, StageValues

GENERATOR = "random numbers"


class StageError(RuntimeError):
    """A stage failed. The message names stage and split; ``__cause__`` is the original error."""


class Mode(NamedTuple):
    """Batch settings.

    Attributes:
        grad: whether there will be a backward pass.
        seed: seed for random operations; None: the model has none.
        autocast: enabled autocast dtype by device type, such as {"cpu": torch.bfloat16}.
    """

    grad: bool
    seed: int | None
    autocast: dict[str, torch.dtype]

    @classmethod
    def now(cls, *, grad: bool, seed: int | None) -> "Mode":
        """Return settings with this thread's autocast state, which worker threads do not inherit."""
        kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
        return cls(grad, seed, {kind: torch.get_autocast_dtype(kind) for kind in kinds})


class _SavedSplit(NamedTuple):
    """State saved for a split's backward pass.

    Attributes:
        leaves: detached leaves per input value name; None for leaves without a gradient.
        outputs: leaves per output value name, with the autograd graph.
    """

    leaves: dict[str, Gradients]
    outputs: dict[str, list[Any]]


class StageRun:
    """A stage's work on a batch.

    Call ``tables``, then ``forward`` for every split; later ``backward`` for every split in any order, then
    ``add_to_grad``, ``values.collect`` and ``tables_backward``.

    Args:
        flow: values exchanged by this stage.
        call: runs a stage program, "whole" or "split".
        values: values from the batch and other stages.
        mode: batch settings.
        timeline: records events.

    Attributes:
        values: values from the batch and other stages.
        where: current action, for error messages.
        drew: whether the stage has drawn random values; only valid if ``mode.seed`` is given.
    """

    def __init__(
        self, flow: StageFlow, call: "Caller", values: StageValues, *, mode: Mode, timeline: Timeline
    ) -> None:
        self._flow, self._call, self.values, self._mode, self._timeline = flow, call, values, mode, timeline
        self.where = "before its first split"
        self.drew = False
        # By split, from its forward until its backward pass.
        self._saved: dict[int, _SavedSplit] = {}
        # Sums over splits, until deliver() adds them to the parameters' grad. Without parameters if backward
        # accumulates directly; then it only counts the splits.
        self._sums = GradientSums([p for p in call.parameters() if p.requires_grad])

    @property
    def stage(self) -> StageProgram:
        """The stage's program."""
        return self._flow.stage

    @property
    def num_splits(self) -> int:
        """Split count."""
        return len(self.values.inputs.sizes)

    def tables(self) -> None:
        """Look up the stage's tables, if it has any, for the whole batch."""
        whole, inputs = self.stage.whole, self.values.inputs
        if whole is None:
            return
        pieces: dict[str, list[Any]] = {}
        with self._recorded("tables", -1), torch.set_grad_enabled(self._mode.grad):
            results = self._call("whole", [inputs.whole[name] for name in whole.takes])
            for name, value in zip(whole.gives, results, strict=True):
                value = value.wait() if isinstance(value, LazyAwaitable) else value
                # The lookup covers the whole batch, so tables are read and updated once.
                pieces[name] = split(value, inputs.sizes, f"the value {name!r}")
        self.values.publish_lookups(pieces)

    def forward(self, k: int) -> None:
        """Wait for split ``k``'s input values, run the split, and send the output values."""
        program, takes, values = self.stage.split, self._flow.takes, self.values
        taken = {name: values.take(name, k) for name in takes}
        with self._recorded("forward", k):
            leaves: dict[str, Gradients] = {}
            arguments = []
            for name, value in taken.items():
                argument, leaves[name] = _detached(value, self._mode.grad)
                arguments.append(make_writable(argument) if self._mode.grad else argument)
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
                self._saved[k] = _SavedSplit(leaves, outputs)
        for name, value in given.items():
            values.publish(name, k, value)

    def backward(self, k: int, result_gradients: Mapping[str, Gradients]) -> None:
        """Run split ``k``'s backward pass, and send the input value gradients.

        Args:
            k: split index.
            result_gradients: gradients for values returned by the model, by name. Gradients for values read
                by other stages are received.
        """
        if k not in self._saved:
            raise RuntimeError(
                "this batch already had its backward pass, and its saved state is freed. Run the model again "
                "(retain_graph is not supported by stages)."
            )
        arrived = self.values.receive_gradients(k, result_gradients)
        saved = self._saved.pop(k)
        with self._recorded("backward", k):
            leaves = [
                leaf for value_leaves in saved.leaves.values() for leaf in value_leaves if leaf is not None
            ]
            ends, given = _backward_pairs(saved.outputs, arrived)
            if self._call.direct:
                self._call.before_backward(last=self._sums.num_added == self.num_splits - 1)
                if ends:
                    torch.autograd.backward(ends, given)
                gradients: Sequence[Tensor | None] = [leaf.grad for leaf in leaves]
            else:
                gradients = _autograd_grad(ends, given, [*leaves, *self._sums.parameters])
            self._sums.add(gradients[len(leaves) :])
        by_leaf = iter(gradients[: len(leaves)])
        for name, value_leaves in saved.leaves.items():
            self.values.send_gradients(
                name, k, [None if leaf is None else next(by_leaf) for leaf in value_leaves]
            )

    def add_to_grad(self) -> None:
        """Add all split gradients to the parameters' ``grad``."""
        self._sums.add_to_grad()

    def tables_backward(self) -> None:
        """Run the tables' backward pass, which updates tables with a fused optimizer."""
        ends, gradients = self.values.take_table_gradients()
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
            # The split's generator state travels with its values.
            index, generator, exchange = self.stage.index, torch.Generator(device), self.values.exchange
            generator.manual_seed(split_seed(self._mode.seed, k))
            if index > 0:
                kind, state = exchange.get(Message("value", GENERATOR, k, index - 1, index))
                if kind == device.type:  # generators of other device kinds have other states
                    generator.set_state(state)
            randomness = stack.enter_context(SplitRandomness(generator))
            yield
            self.drew |= randomness.drew
            if not self._flow.is_last:
                message = Message("value", GENERATOR, k, index, index + 1)
                exchange.put(message, (device.type, generator.get_state()))

    @contextmanager
    def _recorded(self, kind: Kind, k: int) -> Iterator[None]:
        self.where = "tables" if k < 0 else f"{kind} of split {k} of {self.num_splits}"
        start = time.perf_counter()
        yield
        self._timeline.add(self.stage.index, kind, k, start)


class Caller(ABC):
    """Runs a stage's programs.

    Attributes:
        direct: whether every split's backward pass adds to the parameters' ``grad``. Otherwise gradients
            are summed separately, and `StageRun.add_to_grad` adds the sum.
    """

    direct = False

    @abstractmethod
    def __call__(self, which: str, arguments: Sequence[Any]) -> Sequence[Any]:
        """Run the program "whole" or "split", and return the values."""

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters in the program "split", without tables; none if ``direct``."""
        return []

    @abstractmethod
    def before_backward(self, *, last: bool) -> None:
        """Prepare for a split's backward pass, if ``direct``.

        Args:
            last: whether the split is the last in the batch to run backward.
        """


def split_seed(seed: int, k: int) -> int:
    """Return the generator seed for split ``k``, from the batch seed."""
    return (seed + k) % (1 << 63)


class _Entry(torch.autograd.Function):
    """Identity function, after which a stage may change a value in place.

    Autograd forbids this for leaves.
    """

    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


def make_writable(value: Any) -> Any:
    """Return ``value`` with tensors which operations may change in place, although they require gradients."""
    with torch.enable_grad():
        return pytree.tree_map(
            lambda leaf: (
                _Entry.apply(leaf) if isinstance(leaf, Tensor) and leaf.requires_grad else leaf  # type: ignore[no-untyped-call]
            ),
            value,
        )


def _detached(value: Any, grad: bool) -> tuple[Any, Gradients]:
    """Detach tensors in ``value``. Return it and the leaves, with None for leaves without a gradient."""
    flat, spec = pytree.tree_flatten(value)
    leaves: Gradients = []
    for index, leaf in enumerate(flat):
        needs_gradient = grad and isinstance(leaf, Tensor) and leaf.requires_grad
        if isinstance(leaf, Tensor):
            flat[index] = leaf.detach().requires_grad_(needs_gradient)
        leaves.append(flat[index] if needs_gradient else None)
    return (pytree.tree_unflatten(flat, spec) if any(leaf is not None for leaf in leaves) else value), leaves


def _backward_pairs(
    outputs: Mapping[str, Sequence[Any]], gradients: Mapping[str, Sequence[Tensor | None] | None]
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the outputs with gradients, and these gradients, as arguments for a backward pass."""
    pairs = [
        (leaf, gradient)
        for name, leaves in outputs.items()
        for leaf, gradient in zip(leaves, gradients.get(name) or [None] * len(leaves), strict=True)
        if gradient is not None and isinstance(leaf, Tensor) and leaf.requires_grad
    ]
    return [end for end, _ in pairs], [gradient for _, gradient in pairs]


def _autograd_grad(
    ends: Sequence[Tensor], given: Sequence[Tensor], targets: Sequence[Tensor | nn.Parameter]
) -> Sequence[Tensor | None]:
    if not ends or not targets:
        return [None] * len(targets)
    return torch.autograd.grad(ends, targets, given, allow_unused=True)
