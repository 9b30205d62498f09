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
from meshrec.pipeline.stages.programs import StageProgram, Staging
from meshrec.pipeline.stages.randomness import SplitRandomness
from meshrec.pipeline.stages.samples import split
from meshrec.pipeline.stages.timeline import Kind, Timeline

Gradients = list[Tensor | None]
"""Gradients of the leaves of a value."""


GENERATOR = "random numbers"


class StageError(RuntimeError):
    """Failure of a stage. The message names the stage and the split; ``__cause__`` is the original error."""


class Exchange(ABC):
    """Carries the values of splits from the stage that makes them to those that use them, and gradients
    back.
    """

    @abstractmethod
    def put(self, name: str, k: int, value: Any, source: int, destination: int) -> None:
        """Send a value of split ``k``, without waiting."""

    @abstractmethod
    def get(self, name: str, k: int, source: int, destination: int) -> Any:
        """Wait for the value that ``put`` sends. Tensors require a gradient here if they do at the sender."""

    @abstractmethod
    def put_gradients(self, name: str, k: int, gradients: Gradients, source: int, destination: int) -> None:
        """Send the gradients of a value back to the stage that made it, without waiting."""

    @abstractmethod
    def get_gradients(self, name: str, k: int, source: int, destination: int) -> Gradients:
        """Wait for the gradients that ``put_gradients`` sends."""


class Inputs(NamedTuple):
    """A batch: its values by name, whole and split, and the number of samples of each split."""

    whole: Mapping[str, Any]
    splits: Mapping[str, Sequence[Any]]
    sizes: Sequence[int]


class Mode(NamedTuple):
    """How to run a batch. ``grad``: keep what a backward pass needs. ``seed``: of random numbers; None: none
    are drawn.
    """

    grad: bool
    seed: int | None


class _Kept(NamedTuple):
    """State that the backward pass of a split needs: detached inputs, and outputs with their graph."""

    leaves: dict[str, Gradients]
    """Leaves of each input value; None for leaves without a gradient."""
    outputs: dict[str, list[Any]]


class StageRun:
    """One batch in one stage.

    Call ``tables``, then ``forward`` for each split; later ``backward`` for each split in any order, then
    ``deliver``, ``collect`` and ``tables_backward``.

    Args:
        call: runs a program of the stage, "whole" or "split".
        exchange: exchange with other stages.
        timeline: records what is done.
        carried: values of other stages that this stage receives only to return them.
    """

    def __init__(
        self,
        staging: Staging,
        stage: StageProgram,
        call: "Caller",
        inputs: Inputs,
        exchange: Exchange,
        *,
        mode: Mode,
        timeline: Timeline,
        carried: Sequence[str] = (),
    ) -> None:
        self.stage, self.where = stage, "before its first split"
        self.results: dict[tuple[str, int], Any] = {}
        """Values that the model returns, with their graph, by name and split."""
        self.input_gradients: dict[tuple[str, int], Gradients] = {}
        self._call, self._inputs, self._exchange, self._mode = call, inputs, exchange, mode
        self._last = len(staging.stages) - 1
        self.drew = False
        """Whether the stage drew random numbers; known if ``mode.seed`` is given."""
        self._timeline = timeline
        self._makers = staging.makers()
        self._final = {node.name for node in staging.output.all_input_nodes}
        self._users = staging.users()
        for name in carried:
            self._users.setdefault(name, []).append(len(staging.stages) - 1)
        self._takes = [*stage.split.takes, *(name for name in carried if stage.index == self._last)]
        self._kept: dict[int, _Kept] = {}
        self._num_backward = 0
        self._pieces: dict[str, list[Any]] = {}
        self._piece_gradients: dict[str, list[Gradients | None]] = {}
        self._parameters = [] if call.direct else [p for p in call.parameters() if p.requires_grad]
        self._sums: Gradients = [None] * len(self._parameters)
        self._ours: set[int] = set()
        self._autocast = (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"))

    @property
    def num_splits(self) -> int:
        """Number of splits of the batch."""
        return len(self._inputs.sizes)

    def tables(self) -> None:
        """Look up the stage's tables for the whole batch, if it has any."""
        whole = self.stage.whole
        if whole is None:
            return
        with self._recorded("tables", -1), torch.set_grad_enabled(self._mode.grad):
            results = self._call("whole", [self._inputs.whole[name] for name in whole.takes])
            for name, value in zip(whole.gives, results, strict=True):
                value = value.wait() if isinstance(value, LazyAwaitable) else value
                self._pieces[name] = split(value, self._inputs.sizes, f"the value {name!r}")
        for name, pieces in self._pieces.items():
            for k, piece in enumerate(pieces):
                self._publish(name, k, piece)

    def forward(self, k: int) -> None:
        """Run split ``k`` as soon as its inputs have arrived."""
        program = self.stage.split
        taken = {name: self._take(name, k) for name in self._takes}
        with self._recorded("forward", k):
            leaves: dict[str, Gradients] = {}
            arguments = []
            for name, value in taken.items():
                argument, leaves[name] = _detached(value, self._mode.grad)
                arguments.append(entered(argument) if self._mode.grad else argument)
            num_arguments = len(program.takes)
            with self._context(k):
                given = dict(zip(program.gives, self._call("split", arguments[:num_arguments]), strict=True))
            carried = dict(zip(self._takes[num_arguments:], arguments[num_arguments:], strict=True))
            self.results.update({(name, k): value for name, value in carried.items()})
            if self._mode.grad:
                outputs = {
                    name: pytree.tree_leaves(value) for name, value in (*given.items(), *carried.items())
                }
                self._kept[k] = _Kept(leaves, outputs)
        for name, value in given.items():
            self._publish(name, k, value)

    def backward(self, k: int, result_gradients: Mapping[str, Gradients]) -> None:
        """Run the backward pass of split ``k``, from gradients of returned values and of values that other
        stages used.
        """
        if k not in self._kept:
            raise RuntimeError(
                "this batch has had its backward pass: its stages kept nothing. Run the model again "
                "(retain_graph is not supported by stages)."
            )
        arrived = self.arrived(k, result_gradients)
        kept = self._kept.pop(k)
        self._num_backward += 1
        with self._recorded("backward", k):
            leaves = [leaf for each in kept.leaves.values() for leaf in each if leaf is not None]
            ends, given = _ends(kept.outputs, arrived)
            if self._call.direct:
                self._call.before_backward(last=self._num_backward == self.num_splits)
                if ends:
                    torch.autograd.backward(ends, given)
                found: Sequence[Tensor | None] = [leaf.grad for leaf in leaves]
            else:
                found = _gradients(ends, given, [*leaves, *self._parameters])
            self._add(found[len(leaves) :])
        by_leaf = iter(found[: len(leaves)])
        for name, each in kept.leaves.items():
            self._give_back(name, k, [None if leaf is None else next(by_leaf) for leaf in each])

    def arrived(self, k: int, result_gradients: Mapping[str, Gradients]) -> dict[str, Gradients | None]:
        """Return the summed gradients of each value that the stage gave for split ``k``. Waits for other
        stages.
        """
        index = self.stage.index
        found: dict[str, Gradients | None] = {**result_gradients}
        for name in self.stage.split.gives:
            total = result_gradients.get(name)
            for user in self._users.get(name, ()):
                total = _added(total, self._exchange.get_gradients(name, k, index, user))
            found[name] = total
        return found

    def deliver(self) -> None:
        """Add the gradients of all splits to the parameters' ``grad`` by way of autograd, once per batch.

        Hooks, such as those of DistributedDataParallel, then see one gradient whatever the number of splits.
        """
        pairs = zip(self._parameters, self._sums, strict=True)
        given = [(parameter, total) for parameter, total in pairs if total is not None]
        if given:
            parameters, gradients = zip(*given, strict=True)
            with torch.enable_grad():
                _Deliver.apply(list(gradients), *parameters).backward()  # type: ignore[no-untyped-call]

    def collect(self) -> None:
        """Wait for the gradients of table values that other stages used."""
        for name, pieces in self._pieces.items():
            own = self._piece_gradients.setdefault(name, [None] * len(pieces))
            for user in self._users.get(name, ()):
                for k in range(len(pieces)):
                    own[k] = _added(own[k], self._exchange.get_gradients(name, k, self.stage.index, user))

    def tables_backward(self) -> None:
        """Run the backward pass of the tables, which updates tables with a fused optimizer."""
        outputs, gradients = [], []
        for name, pieces in self._pieces.items():
            for piece, own in zip(pieces, self._piece_gradients[name], strict=True):
                for leaf, gradient in zip(pytree.tree_leaves(piece), own or (), strict=False):
                    if gradient is not None and isinstance(leaf, Tensor) and leaf.requires_grad:
                        outputs.append(leaf)
                        gradients.append(gradient)
        if outputs:
            with self._recorded("tables", -1):
                torch.autograd.backward(outputs, gradients)
        self._pieces.clear()

    def _add(self, gradients: Sequence[Tensor | None]) -> None:
        for index, gradient in enumerate(gradients):
            own = self._sums[index]
            if own is None or gradient is None:
                self._sums[index] = gradient if own is None else own
            elif index in self._ours:
                own += gradient
            else:
                # Autograd may have given the first gradient to another parameter too: nothing is added to it
                # in place. The sum of the first two is a new tensor, which is ours.
                self._sums[index] = own + gradient
                self._ours.add(index)

    def _take(self, name: str, k: int) -> Any:
        if name in self._pieces:
            return self._pieces[name][k]
        if name in self._inputs.splits:
            return self._inputs.splits[name][k]
        return self._exchange.get(name, k, self._makers[name], self.stage.index)

    def _publish(self, name: str, k: int, value: Any) -> None:
        if name in self._final:
            self.results[name, k] = value
        for user in self._users.get(name, ()):
            self._exchange.put(name, k, value, self.stage.index, user)

    def _give_back(self, name: str, k: int, gradients: Gradients) -> None:
        if name in self._pieces:
            self._piece_gradients.setdefault(name, [None] * self.num_splits)[k] = gradients
        elif name in self._inputs.splits:
            self.input_gradients[name, k] = gradients
        else:
            self._exchange.put_gradients(name, k, gradients, self._makers[name], self.stage.index)

    @contextmanager
    def _context(self, k: int) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(self._mode.grad))
            enabled, dtype = self._autocast
            if enabled:
                stack.enter_context(torch.autocast("cpu", dtype=dtype))
            if self._mode.seed is None:
                yield
                return
            # A split's generator goes from stage to stage with it.
            index, generator = self.stage.index, torch.Generator()
            if index == 0:
                generator.manual_seed(split_seed(self._mode.seed, k))
            else:
                generator.set_state(self._exchange.get(GENERATOR, k, index - 1, index))
            randomness = stack.enter_context(SplitRandomness(generator))
            yield
            self.drew |= randomness.drew
            if index < self._last:
                self._exchange.put(GENERATOR, k, generator.get_state(), index, index + 1)

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
        """Prepare for the backward pass of a split, if ``direct``. ``last``: it is the last one of the
        batch.
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


def _added(one: Sequence[Tensor | None] | None, other: Sequence[Tensor | None] | None) -> Gradients | None:
    if one is None or other is None:
        given = one if other is None else other
        return None if given is None else list(given)
    return [b if a is None else a if b is None else a + b for a, b in zip(one, other, strict=True)]


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


class _Deliver(torch.autograd.Function):
    """An operation whose backward pass returns gradients that were computed before."""

    @staticmethod
    def forward(ctx: Any, gradients: Gradients, *parameters: nn.Parameter) -> Tensor:
        ctx.gradients = gradients
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        return None, *ctx.gradients
