"""The values of a batch in one stage, and their gradients."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from meshrec.pipeline.stages.programs import StageFlow

Gradients = list[Tensor | None]
"""Gradients of the leaves of a value."""


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


class StageValues:
    """Finds the values that a stage reads, and hands on those that it makes; the same for gradients.

    Args:
        flow: the values that the stages exchange.
        inputs: the batch.
        exchange: exchange with other stages.

    Attributes:
        inputs: the batch.
        exchange: exchange with other stages.
        results: values that the model returns, with their graph, by name and split.
        input_gradients: gradients of the batch's values, by name and split.
    """

    def __init__(self, flow: StageFlow, inputs: Inputs, exchange: Exchange) -> None:
        self._flow, self.inputs, self.exchange = flow, inputs, exchange
        self._returned = set(flow.returned)
        self.results: dict[tuple[str, int], Any] = {}
        self.input_gradients: dict[tuple[str, int], Gradients] = {}
        self._pieces: dict[str, list[Any]] = {}
        self._piece_gradients: dict[str, list[Gradients | None]] = {}

    def take(self, name: str, k: int) -> Any:
        """Return a value of split ``k``, as soon as it has arrived."""
        if name in self._pieces:
            return self._pieces[name][k]
        if name in self.inputs.splits:
            return self.inputs.splits[name][k]
        return self.exchange.get(name, k, self._flow.makers[name], self._flow.stage.index)

    def publish(self, name: str, k: int, value: Any) -> None:
        """Send a value that the stage has made to the stages that read it."""
        if name in self._returned:
            self.results[name, k] = value
        for user in self._flow.users.get(name, ()):
            self.exchange.put(name, k, value, self._flow.stage.index, user)

    def publish_pieces(self, pieces: dict[str, list[Any]]) -> None:
        """Split values that were looked up for the whole batch, and send the pieces to their readers."""
        self._pieces = pieces
        for name, own in pieces.items():
            for k, piece in enumerate(own):
                self.publish(name, k, piece)

    def give_back(self, name: str, k: int, gradients: Gradients) -> None:
        """Send the gradients of a value to where the value came from."""
        if name in self._pieces:
            own = self._piece_gradients.setdefault(name, [None] * len(self.inputs.sizes))
            own[k] = gradients
        elif name in self.inputs.splits:
            self.input_gradients[name, k] = gradients
        else:
            flow = self._flow
            self.exchange.put_gradients(name, k, gradients, flow.makers[name], flow.stage.index)

    def arrived(self, k: int, result_gradients: Mapping[str, Gradients]) -> dict[str, Gradients | None]:
        """Return the summed gradients of each value that the stage made for split ``k``, from all stages that
        read it.
        """
        found: dict[str, Gradients | None] = {**result_gradients}
        for name in self._flow.stage.split.gives:
            found[name] = self._with_others(name, k, result_gradients.get(name))
        return found

    def collect(self) -> None:
        """Wait for the gradients of table values that other stages read."""
        for name, pieces in self._pieces.items():
            own = self._piece_gradients.setdefault(name, [None] * len(pieces))
            for k in range(len(pieces)):
                own[k] = self._with_others(name, k, own[k])

    def take_table_ends(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return the table values that have a gradient, and these gradients; forget the values."""
        pieces, self._pieces = self._pieces, {}
        pairs = [
            (leaf, gradient)
            for name, own in pieces.items()
            for piece, gradients in zip(own, self._piece_gradients[name], strict=True)
            for leaf, gradient in zip(pytree.tree_leaves(piece), gradients or (), strict=False)
            if gradient is not None and isinstance(leaf, Tensor) and leaf.requires_grad
        ]
        return [leaf for leaf, _ in pairs], [gradient for _, gradient in pairs]

    def _with_others(self, name: str, k: int, total: Gradients | None) -> Gradients | None:
        index = self._flow.stage.index
        for user in self._flow.users.get(name, ()):
            total = added(total, self.exchange.get_gradients(name, k, index, user))
        return total


def added(one: Gradients | None, other: Gradients | None) -> Gradients | None:
    """Add the gradients of a value's leaves; None stands for 0."""
    if one is None or other is None:
        given = one if other is None else other
        return None if given is None else list(given)
    return [b if a is None else a if b is None else a + b for a, b in zip(one, other, strict=True)]


class GradientSums:
    """The gradients of a stage's parameters, summed over the splits of a batch."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self.num_added = 0
        self._sums: Gradients = [None] * len(self.parameters)
        self._ours: set[int] = set()

    def add(self, gradients: Sequence[Tensor | None]) -> None:
        """Add the gradients of one split."""
        self.num_added += 1
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

    def deliver(self) -> None:
        """Add the sums to the parameters' ``grad`` by way of autograd, once per batch.

        Hooks, such as those of DistributedDataParallel, then see one gradient whatever the number of splits.
        """
        pairs = zip(self.parameters, self._sums, strict=True)
        given = [(parameter, total) for parameter, total in pairs if total is not None]
        if given:
            parameters, gradients = zip(*given, strict=True)
            with torch.enable_grad():
                _Deliver.apply(list(gradients), *parameters).backward()  # type: ignore[no-untyped-call]


class _Deliver(torch.autograd.Function):
    """An operation whose backward pass returns gradients that were computed before."""

    @staticmethod
    def forward(ctx: Any, gradients: Gradients, *parameters: nn.Parameter) -> Tensor:
        ctx.gradients = gradients
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        return None, *ctx.gradients
