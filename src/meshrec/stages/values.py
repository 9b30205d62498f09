"""A batch's values in a stage, and the gradients."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from meshrec.stages.programs import StageFlow

Gradients = list[Tensor | None]
"""Gradients for a value's leaves (tensors); None for leaves without a gradient."""


class Message(NamedTuple):
    """Identifies a value in split ``k``, or the gradients, sent between two stages.

    ``source`` is the stage computing the value, and ``destination`` the stage using it. Gradients go from
    ``destination`` to ``source``.
    """

    kind: Literal["value", "gradient"]
    name: str
    k: int
    source: int
    destination: int


class Exchange(ABC):
    """Carries split values to the stages using them, and gradients back."""

    @abstractmethod
    def put(self, message: Message, value: Any) -> None:
        """Send a value, or the leaf gradients, without waiting."""

    @abstractmethod
    def get(self, message: Message) -> Any:
        """Wait for a value or gradients. Value tensors require gradients if they do at the sender."""


class Inputs(NamedTuple):
    """A batch: values by name, their splits by name, and the sample count per split."""

    whole: Mapping[str, Any]
    splits: Mapping[str, Sequence[Any]]
    sizes: Sequence[int]


class StageValues:
    """Gets the values a stage reads, and sends the values it computes; likewise for gradients.

    Args:
        flow: values exchanged by the stage.
        inputs: the batch.
        exchange: exchange with other stages.

    Attributes:
        inputs: the batch.
        exchange: exchange with other stages.
        results: values returned by the model, with the autograd graph, by name and split.
        input_gradients: gradients for batch values, by name and split.
    """

    def __init__(self, flow: StageFlow, inputs: Inputs, exchange: Exchange) -> None:
        self._flow, self.inputs, self.exchange = flow, inputs, exchange
        self._returned = set(flow.returned)
        self.results: dict[tuple[str, int], Any] = {}
        self.input_gradients: dict[tuple[str, int], Gradients] = {}
        # Splits of table lookups, from `publish_lookups` until `take_table_gradients`.
        self._pieces: dict[str, list[Any]] = {}
        self._piece_gradients: dict[str, list[Gradients | None]] = {}

    def take(self, name: str, k: int) -> Any:
        """Return the value ``name`` for split ``k``. Waits if another stage computes it."""
        if name in self._pieces:
            return self._pieces[name][k]
        if name in self.inputs.splits:
            return self.inputs.splits[name][k]
        return self.exchange.get(Message("value", name, k, self._flow.makers[name], self._flow.stage.index))

    def publish(self, name: str, k: int, value: Any) -> None:
        """Send a value computed by this stage to the stages reading it.

        Args:
            name: value name.
            k: split index.
            value: the value.
        """
        if name in self._returned:
            self.results[name, k] = value
        for user in self._flow.users.get(name, ()):
            self.exchange.put(Message("value", name, k, self._flow.stage.index, user), value)

    def publish_lookups(self, pieces: dict[str, list[Any]]) -> None:
        """Store table lookup splits by value name, and send them to the stages reading them."""
        self._pieces = pieces
        for name, splits in pieces.items():
            for k, piece in enumerate(splits):
                self.publish(name, k, piece)

    def send_gradients(self, name: str, k: int, gradients: Gradients) -> None:
        """Send a value's gradients to the stage which computed it; store gradients for local values.

        Args:
            name: value name.
            k: split index.
            gradients: leaf gradients.
        """
        if name in self._pieces:
            piece_gradients = self._piece_gradients.setdefault(name, [None] * len(self.inputs.sizes))
            piece_gradients[k] = gradients
        elif name in self.inputs.splits:
            self.input_gradients[name, k] = gradients
        else:
            message = Message("gradient", name, k, self._flow.makers[name], self._flow.stage.index)
            self.exchange.put(message, gradients)

    def receive_gradients(
        self, k: int, result_gradients: Mapping[str, Gradients]
    ) -> dict[str, Gradients | None]:
        """Wait for the gradients for values computed by this stage for split ``k``.

        Args:
            k: split index.
            result_gradients: gradients for values returned by the model, by name.

        Returns:
            Gradients by value name, summed over all stages reading the value.
        """
        sums: dict[str, Gradients | None] = {**result_gradients}
        for name in self._flow.stage.split.gives:
            sums[name] = self._add_users_gradients(name, k, result_gradients.get(name))
        return sums

    def collect(self) -> None:
        """Wait for the gradients for table lookups read by other stages."""
        for name, pieces in self._pieces.items():
            piece_gradients = self._piece_gradients.setdefault(name, [None] * len(pieces))
            for k in range(len(pieces)):
                piece_gradients[k] = self._add_users_gradients(name, k, piece_gradients[k])

    def take_table_gradients(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return the table lookups with gradients, and these gradients; forget the lookups."""
        pieces, self._pieces = self._pieces, {}
        pairs = [
            (leaf, gradient)
            for name, splits in pieces.items()
            for piece, gradients in zip(splits, self._piece_gradients[name], strict=True)
            for leaf, gradient in zip(pytree.tree_leaves(piece), gradients or (), strict=False)
            if gradient is not None and isinstance(leaf, Tensor) and leaf.requires_grad
        ]
        return [leaf for leaf, _ in pairs], [gradient for _, gradient in pairs]

    def _add_users_gradients(self, name: str, k: int, total: Gradients | None) -> Gradients | None:
        index = self._flow.stage.index
        for user in self._flow.users.get(name, ()):
            total = add_gradients(total, self.exchange.get(Message("gradient", name, k, index, user)))
        return total


def add_gradients(one: Gradients | None, other: Gradients | None) -> Gradients | None:
    """Add a value's gradients leaf by leaf. None stands for 0."""
    if one is None or other is None:
        given = one if other is None else other
        return None if given is None else list(given)
    return [b if a is None else a if b is None else a + b for a, b in zip(one, other, strict=True)]


class GradientSums:
    """A stage's parameter gradients, summed over splits.

    Attributes:
        num_added: split count added so far.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self.num_added = 0
        self._sums: Gradients = [None] * len(self.parameters)
        # Indices for sums allocated here, which may be changed in place.
        self._owned: set[int] = set()

    def add(self, gradients: Sequence[Tensor | None]) -> None:
        """Add a split's gradients."""
        self.num_added += 1
        for index, gradient in enumerate(gradients):
            total = self._sums[index]
            if total is None or gradient is None:
                self._sums[index] = gradient if total is None else total
            elif index in self._owned:
                total += gradient
            else:
                # Autograd may return the same tensor as gradient for two parameters, so the first gradient
                # must not be changed in place. The sum of the first two is a new tensor.
                self._sums[index] = total + gradient
                self._owned.add(index)

    def add_to_grad(self) -> None:
        """Add the sums to the parameters' ``grad``, once per batch."""
        # Through autograd, so that hooks such as DistributedDataParallel's run, with a single gradient per
        # batch.
        pairs = zip(self.parameters, self._sums, strict=True)
        given = [(parameter, total) for parameter, total in pairs if total is not None]
        if given:
            parameters, gradients = zip(*given, strict=True)
            with torch.enable_grad():
                _Deliver.apply(list(gradients), *parameters).backward()  # type: ignore[no-untyped-call]


class _Deliver(torch.autograd.Function):
    """Operation with a backward pass returning precomputed gradients."""

    @staticmethod
    def forward(ctx: Any, gradients: Gradients, *parameters: nn.Parameter) -> Tensor:
        ctx.gradients = gradients
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        return None, *ctx.gradients
