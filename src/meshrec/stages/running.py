"""Run the forward and backward passes of a stage for the splits of a batch, and for the stage's tables.

The autograd graph is cut between stages. A stage receives detached values, and later sends the gradients for
these values back to the stage that computed them. ``threads.py`` (one process) and ``rank_step.py`` (a rank
per stage) call the passes in order and transport the values.
See [Note: units, stages, splits and lanes] in ``stages/__init__.py`` for the terms.
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
"""Name under which a stage sends the state of a split's random generator to the next stage."""


class StageError(RuntimeError):
    """Error for a failed stage. The message names the stage and the split (microbatch).

    ``__cause__`` is the original exception where it was raised in this process.
    """


class Mode(NamedTuple):
    """Settings that hold for a whole batch.

    Attributes:
        grad: whether there will be a backward pass.
        seed: seed of the batch for random operations; None if the model has none.
        autocast: autocast dtype of every device type with autocast enabled, such as {"cpu": torch.bfloat16}.
    """

    grad: bool
    seed: int | None
    autocast: dict[str, torch.dtype]

    @classmethod
    def now(cls, *, grad: bool, seed: int | None) -> "Mode":
        """Return settings with the autocast state of the calling thread.

        Worker threads do not inherit this state and must set it themselves.

        Args:
            seed: seed of the batch for random operations; None if the model has none.
        """
        kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
        return cls(grad, seed, {kind: torch.get_autocast_dtype(kind) for kind in kinds})


class _SavedSplit(NamedTuple):
    """State that a stage saves between the forward and the backward pass of a split (microbatch).

    Attributes:
        leaves: detached input tensors at which the autograd graph of the stage starts, by value name. None
            for leaves that need no gradient.
        outputs: output tensors at which this autograd graph ends, by value name.
    """

    leaves: dict[str, Gradients]
    outputs: dict[str, list[Any]]


class StageRun:
    """Execution of a stage for a batch.

    Call ``tables`` first, then ``forward`` for every split (microbatch). For training, also call ``backward``
    for every split, in any order after the split's ``forward``. Then call ``add_to_grad``,
    ``values.collect`` and ``tables_backward``.

    Attributes:
        values: see above.
        where: description of the current pass, for error messages.
        drew: whether the stage has drawn random values. It is only set if ``mode.seed`` is not None.
    """

    def __init__(
        self, flow: StageFlow, call: "Caller", values: StageValues, *, mode: Mode, timeline: Timeline
    ) -> None:
        self._flow, self._call, self.values, self._mode, self._timeline = flow, call, values, mode, timeline
        self.where = "before its first split"
        # Updated by every forward pass.
        self.drew = False
        # By split, from its forward until its backward pass.
        self._saved: dict[int, _SavedSplit] = {}
        # Parameter gradients summed over splits, until add_to_grad() adds them to ``grad``. If the backward
        # pass accumulates into ``grad`` directly, the parameter list is empty, and it only counts splits.
        self._sums = GradientSums([p for p in call.parameters() if p.requires_grad])

    @property
    def stage(self) -> StageProgram:
        """This stage's programs."""
        return self._flow.stage

    @property
    def num_splits(self) -> int:
        """Splits in the batch."""
        return len(self.values.inputs.sizes)

    def tables(self) -> None:
        """Look up the stage's tables for the whole batch, and send the lookups split by split.

        Does nothing if the stage has no tables.
        """
        program, inputs = self.stage.batch_program, self.values.inputs
        if program is None:
            return
        pieces: dict[str, list[Any]] = {}
        with self._recorded("tables", -1), torch.set_grad_enabled(self._mode.grad):
            results = self._call("whole", [inputs.batch_values[name] for name in program.input_names])
            for name, value in zip(program.output_names, results, strict=True):
                value = value.wait() if isinstance(value, LazyAwaitable) else value
                # The lookup covers the whole batch, so tables are read and updated once.
                pieces[name] = split(value, inputs.sizes, f"the value {name!r}")
        self.values.publish_lookups(pieces)

    def forward(self, k: int) -> None:
        """Run the forward pass of split ``k``: wait for the input values, compute, and send the results."""
        program, input_names, values = self.stage.split_program, self._flow.input_names, self.values
        inputs = {name: values.take(name, k) for name in input_names}
        with self._recorded("forward", k):
            leaves: dict[str, Gradients] = {}
            arguments = []
            for name, value in inputs.items():
                argument, leaves[name] = _detached(value, self._mode.grad)
                arguments.append(make_writable(argument) if self._mode.grad else argument)
            # Values after the program's arguments are only carried to the model's output.
            num_arguments = len(program.input_names)
            tensors = [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, Tensor)]
            with self._context(k, tensors[0].device if tensors else torch.device("cpu")):
                given = dict(
                    zip(program.output_names, self._call("split", arguments[:num_arguments]), strict=True)
                )
            # Values from earlier stages which the model returns; autograd passes their gradients through.
            carried = dict(zip(input_names[num_arguments:], arguments[num_arguments:], strict=True))
            values.results.update({(name, k): value for name, value in carried.items()})
            if self._mode.grad:
                outputs = {
                    name: pytree.tree_leaves(value) for name, value in (*given.items(), *carried.items())
                }
                self._saved[k] = _SavedSplit(leaves, outputs)
        # After the block, so the recorded time does not include sending.
        for name, value in given.items():
            values.publish(name, k, value)

    def backward(self, k: int, result_gradients: Mapping[str, Gradients]) -> None:
        """Run the backward pass of split ``k``: wait for the output gradients, compute, and send the results.

        Args:
            result_gradients: gradients for the values the model returns, by value name. The gradients
                for values read by other stages are received from these stages.

        Raises:
            RuntimeError: the backward pass of the split has already run.
        """
        if k not in self._saved:
            raise RuntimeError(
                "this batch already had its backward pass, and its saved state is freed. Run the model again "
                "(retain_graph is not supported by stages)."
            )
        arrived = self.values.receive_gradients(k, result_gradients)
        saved = self._saved.pop(k)
        with self._recorded("backward", k):
            # Inputs which need a gradient, in the order of their names.
            leaves = [
                leaf for value_leaves in saved.leaves.values() for leaf in value_leaves if leaf is not None
            ]
            ends, given = _backward_pairs(saved.outputs, arrived)
            # A wrapper such as DDP needs hooks, which run only if gradients are accumulated into
            # ``grad``.
            if self._call.direct:
                self._call.before_backward(last=self._sums.num_added == self.num_splits - 1)
                if ends:
                    torch.autograd.backward(ends, given)
                gradients: Sequence[Tensor | None] = [leaf.grad for leaf in leaves]
            else:
                # Not accumulated into ``grad`` here, so that hooks run once per batch, in add_to_grad().
                gradients = _autograd_grad(ends, given, [*leaves, *self._sums.parameters])
            self._sums.add(gradients[len(leaves) :])
        # Sent in the same nesting as the values, with None for leaves without a gradient.
        by_leaf = iter(gradients[: len(leaves)])
        for name, value_leaves in saved.leaves.items():
            self.values.send_gradients(
                name, k, [None if leaf is None else next(by_leaf) for leaf in value_leaves]
            )

    def add_to_grad(self) -> None:
        """Add the parameter gradients, summed over all splits, to ``parameter.grad``."""
        self._sums.add_to_grad()

    def tables_backward(self) -> None:
        """Run the backward pass of the table lookups. Tables with a fused optimizer are updated by it."""
        ends, gradients = self.values.take_lookup_gradients()
        if ends:
            with self._recorded("tables", -1):
                torch.autograd.backward(ends, gradients)

    @contextmanager
    def _context(self, k: int, device: torch.device) -> Iterator[None]:
        """Set gradient mode, autocast and random generator for the forward pass of split ``k`` in the block.

        The generator is set only if the batch has a seed. Its state comes from the previous stage, or from
        the seed on the first stage. When the block ends, the state is sent to the next stage.
        """
        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(self._mode.grad))
            for kind, dtype in self._mode.autocast.items():
                stack.enter_context(torch.autocast(kind, dtype=dtype))
            if self._mode.seed is None:
                yield
                return
            # The split's generator state travels with its values.
            index, generator, exchange = self.stage.index, torch.Generator(device), self.values.exchange
            # The first stage starts from this state; later stages overwrite it below.
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
        """Record the block in the timeline as a pass of split ``k``; -1 is the whole batch."""
        self.where = "tables" if k < 0 else f"{kind} of split {k} of {self.num_splits}"
        start = time.perf_counter()
        yield
        self._timeline.add(self.stage.index, kind, k, start)


class Caller(ABC):
    """Caller of the programs of a stage, which may be wrapped in DistributedDataParallel or FSDP2.

    Attributes:
        direct: whether the backward pass of a split (microbatch) adds parameter gradients to ``grad``
            directly, as a wrapper requires. If False, `StageRun` sums the gradients over splits and adds the
            sum to ``grad``.
    """

    direct = False

    @abstractmethod
    def __call__(self, which: str, arguments: Sequence[Any]) -> Sequence[Any]:
        """Run one of the two stage programs.

        Args:
            which: "whole" runs the table lookups for the whole batch. "split" runs all other units for a
                split (microbatch).
            arguments: program inputs, in the order of `PartProgram.input_names`.

        Returns:
            Program outputs, in the order of `PartProgram.output_names`.
        """

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters, except tables, whose gradients `StageRun` sums; none if ``direct``."""
        return []

    @abstractmethod
    def before_backward(self, *, last: bool) -> None:
        """Prepare the wrapper for the backward pass of a split. Called only if ``direct``.

        Args:
            last: whether this is the last backward pass of the batch, in which lanes exchange gradients.
        """


def split_seed(seed: int, k: int) -> int:
    """Return the seed of the random generator for split (microbatch) ``k``, given the seed of the batch."""
    # Seeds are signed 64-bit integers.
    return (seed + k) % (1 << 63)


class _WritableIdentity(torch.autograd.Function):
    """Identity function whose result may be changed in place.

    Autograd forbids in-place changes of a leaf that requires a gradient, and a stage's inputs are leaves.
    """

    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        """Return ``leaf`` as a tensor that shares its memory and is not an autograd leaf."""
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        """Return the gradient for the result unchanged, as the gradient for ``leaf``."""
        return grads[0]


def make_writable(value: Any) -> Any:
    """Return ``value`` with tensors which may be changed in place although they require gradients."""
    with torch.enable_grad():
        return pytree.tree_map(
            lambda leaf: (
                _WritableIdentity.apply(leaf) if isinstance(leaf, Tensor) and leaf.requires_grad else leaf  # type: ignore[no-untyped-call]
            ),
            value,
        )


def _detached(value: Any, grad: bool) -> tuple[Any, Gradients]:
    """Detach the tensors in ``value`` from the autograd graph of the stage which computed them.

    Returns:
        The detached value, and the leaves, with None for leaves that need no gradient.
    """
    flat, spec = pytree.tree_flatten(value)
    leaves: Gradients = []
    for index, leaf in enumerate(flat):
        needs_gradient = grad and isinstance(leaf, Tensor) and leaf.requires_grad
        if isinstance(leaf, Tensor):
            flat[index] = leaf.detach().requires_grad_(needs_gradient)
        leaves.append(flat[index] if needs_gradient else None)
    # Without gradients, the value itself is passed on.
    return (pytree.tree_unflatten(flat, spec) if any(leaf is not None for leaf in leaves) else value), leaves


def _backward_pairs(
    outputs: Mapping[str, Sequence[Any]], gradients: Mapping[str, Sequence[Tensor | None] | None]
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the output tensors that have a gradient and, in the same order, these gradients.

    Args:
        gradients: gradients for these leaves, by value name. None or a missing name stands for no gradient.
    """
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
    """Return the gradients for ``targets``, given the gradients ``given`` for the tensors ``ends``.

    Unlike ``torch.autograd.grad``, this function accepts empty lists. The gradient for a target that does not
    contribute to ``ends`` is None.
    """
    if not ends or not targets:
        return [None] * len(targets)
    # Some parameters may be unused in this split.
    return torch.autograd.grad(ends, targets, given, allow_unused=True)
