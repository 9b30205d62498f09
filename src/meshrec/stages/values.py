"""A stage's batch values, and their gradients."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from meshrec.stages.programs import StageFlow

Gradients = list[Tensor | None]
"""Gradient per leaf."""


class Message(NamedTuple):
    """Split value or its gradients. ``source`` computed the value, ``destination`` uses it."""

    kind: Literal["value", "gradient"]
    name: str
    k: int
    source: int
    destination: int


class Exchange(ABC):
    """Carries split values from the computing stage to the using stages, and gradients back."""

    @abstractmethod
    def put(self, message: Message, value: Any) -> None:
        """Send a value, or a gradient per leaf, without waiting."""

    @abstractmethod
    def get(self, message: Message) -> Any:
        """Wait for a message. Tensors in a value require a gradient if they do at the sender."""


class Inputs(NamedTuple):
    """A batch: values by name, whole and split, and samples per split."""

    whole: Mapping[str, Any]
    splits: Mapping[str, Sequence[Any]]
    sizes: Sequence[int]


class StageValues:
    """Provides the values which a stage reads, and sends those it computes; likewise for gradients.

    Args:
        flow: values exchanged by the stage.
        inputs: batch.
        exchange: exchange with other stages.

    Attributes:
        inputs: batch.
        exchange: exchange with other stages.
        results: values returned by the model, with their graph, by name and split.
        input_gradients: gradients of batch values, by name and split.
    """

    def __init__(self, flow: StageFlow, inputs: Inputs, exchange: Exchange) -> None:
        self._flow, self.inputs, self.exchange = flow, inputs, exchange
        self._returned = set(flow.returned)
        self.results: dict[tuple[str, int], Any] = {}
        self.input_gradients: dict[tuple[str, int], Gradients] = {}
        # Splits of table lookups, from `publish_pieces` until `take_table_ends`.
        self._pieces: dict[str, list[Any]] = {}
        self._piece_gradients: dict[str, list[Gradients | None]] = {}

    def take(self, name: str, k: int) -> Any:
        """Return a value of split ``k`` once it has arrived."""
        if name in self._pieces:
            return self._pieces[name][k]
        if name in self.inputs.splits:
            return self.inputs.splits[name][k]
        return self.exchange.get(Message("value", name, k, self._flow.makers[name], self._flow.stage.index))

    def publish(self, name: str, k: int, value: Any) -> None:
        """Send a computed value to the stages which read it.

        Args:
            name: value name.
            k: split index.
            value: value.
        """
        if name in self._returned:
            self.results[name, k] = value
        for user in self._flow.users.get(name, ()):
            self.exchange.put(Message("value", name, k, self._flow.stage.index, user), value)

    def publish_pieces(self, pieces: dict[str, list[Any]]) -> None:
        """Store the splits of whole-batch lookups, and send them to their readers."""
        self._pieces = pieces
        for name, splits in pieces.items():
            for k, piece in enumerate(splits):
                self.publish(name, k, piece)

    def give_back(self, name: str, k: int, gradients: Gradients) -> None:
        """Send a value's gradients to where the value came from.

        Args:
            name: value name.
            k: split index.
            gradients: a gradient per leaf.
        """
        if name in self._pieces:
            piece_gradients = self._piece_gradients.setdefault(name, [None] * len(self.inputs.sizes))
            piece_gradients[k] = gradients
        elif name in self.inputs.splits:
            self.input_gradients[name, k] = gradients
        else:
            message = Message("gradient", name, k, self._flow.makers[name], self._flow.stage.index)
            self.exchange.put(message, gradients)

    def arrived(self, k: int, result_gradients: Mapping[str, Gradients]) -> dict[str, Gradients | None]:
        """Return gradients per value computed for split ``k``, summed over all stages which read it."""
        sums: dict[str, Gradients | None] = {**result_gradients}
        for name in self._flow.stage.split.gives:
            sums[name] = self._with_users(name, k, result_gradients.get(name))
        return sums

    def collect(self) -> None:
        """Wait for the gradients of table values read by other stages."""
        for name, pieces in self._pieces.items():
            piece_gradients = self._piece_gradients.setdefault(name, [None] * len(pieces))
            for k in range(len(pieces)):
                piece_gradients[k] = self._with_users(name, k, piece_gradients[k])

    def take_table_ends(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return table values with gradients, and these gradients; drop the values."""
        pieces, self._pieces = self._pieces, {}
        pairs = [
            (leaf, gradient)
            for name, splits in pieces.items()
            for piece, gradients in zip(splits, self._piece_gradients[name], strict=True)
            for leaf, gradient in zip(pytree.tree_leaves(piece), gradients or (), strict=False)
            if gradient is not None and isinstance(leaf, Tensor) and leaf.requires_grad
        ]
        return [leaf for leaf, _ in pairs], [gradient for _, gradient in pairs]

    def _with_users(self, name: str, k: int, total: Gradients | None) -> Gradients | None:
        index = self._flow.stage.index
        for user in self._flow.users.get(name, ()):
            total = added(total, self.exchange.get(Message("gradient", name, k, index, user)))
        return total


def added(one: Gradients | None, other: Gradients | None) -> Gradients | None:
    """Add gradients leaf by leaf; None stands for 0."""
    if one is None or other is None:
        given = one if other is None else other
        return None if given is None else list(given)
    return [b if a is None else a if b is None else a + b for a, b in zip(one, other, strict=True)]


class GradientSums:
    """A stage's parameter gradients, summed over splits."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self.num_added = 0
        self._sums: Gradients = [None] * len(self.parameters)
        # Indices of sums allocated here, which may be changed in place.
        self._ours: set[int] = set()

    def add(self, gradients: Sequence[Tensor | None]) -> None:
        """Add a split's gradients."""
        self.num_added += 1
        for index, gradient in enumerate(gradients):
            total = self._sums[index]
            if total is None or gradient is None:
                self._sums[index] = gradient if total is None else total
            elif index in self._ours:
                total += gradient
            else:
                # Autograd may have returned the first gradient for another parameter too, so do not add to it
                # in place. The sum of the first two is a new tensor.
                self._sums[index] = total + gradient
                self._ours.add(index)

    def deliver(self) -> None:
        """Add the sums to the parameters' ``grad`` through autograd, once per batch.

        Hooks, such as DistributedDataParallel's, then see a single gradient for any number of splits.
        """
        pairs = zip(self.parameters, self._sums, strict=True)
        given = [(parameter, total) for parameter, total in pairs if total is not None]
        if given:
            parameters, gradients = zip(*given, strict=True)
            with torch.enable_grad():
                _Deliver.apply(list(gradients), *parameters).backward()  # type: ignore[no-untyped-call]


class _Deliver(torch.autograd.Function):
    """Operation whose backward pass returns precomputed gradients."""

    @staticmethod
    def forward(ctx: Any, gradients: Gradients, *parameters: nn.Parameter) -> Tensor:
        ctx.gradients = gradients
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        return None, *ctx.gradients
