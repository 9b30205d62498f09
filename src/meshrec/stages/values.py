"""The values of a batch in a stage, and their gradients."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from meshrec.stages.programs import StageFlow

Gradients = list[Tensor | None]
"""Gradients of the leaves (tensors) of a value; None for leaves without a gradient."""


class Message(NamedTuple):
    """Identifies a value of split ``k``, or its gradients, on the way between two stages.

    ``source`` is the stage that computes the value, and ``destination`` the one that uses it. Gradients go
    from ``destination`` to ``source``.
    """

    kind: Literal["value", "gradient"]
    name: str
    k: int
    source: int
    destination: int


class Exchange(ABC):
    """Carries values of splits to the stages that use them, and gradients back."""

    @abstractmethod
    def put(self, message: Message, value: Any) -> None:
        """Send a value, or the gradients of its leaves, without waiting."""

    @abstractmethod
    def get(self, message: Message) -> Any:
        """Wait for a value or gradients. Tensors of a value require gradients if they do at the sender."""


class Inputs(NamedTuple):
    """A batch: values by name, their splits by name, and the number of samples of every split."""

    whole: Mapping[str, Any]
    splits: Mapping[str, Sequence[Any]]
    sizes: Sequence[int]


class StageValues:
    """Gets the values that a stage reads, and sends those that it computes; likewise for gradients.

    Args:
        flow: values that the stage exchanges.
        inputs: the batch.
        exchange: exchange with other stages.

    Attributes:
        inputs: the batch.
        exchange: exchange with other stages.
        results: values that the model returns, with their autograd graph, by name and split.
        input_gradients: gradients of the values of the batch, by name and split.
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
        """Return the value ``name`` of split ``k``. Waits if another stage computes it."""
        if name in self._pieces:
            return self._pieces[name][k]
        if name in self.inputs.splits:
            return self.inputs.splits[name][k]
        return self.exchange.get(Message("value", name, k, self._flow.makers[name], self._flow.stage.index))

    def publish(self, name: str, k: int, value: Any) -> None:
        """Send a value that this stage has computed to the stages that read it.

        Args:
            name: name of the value.
            k: index of the split.
            value: the value.
        """
        if name in self._returned:
            self.results[name, k] = value
        for user in self._flow.users.get(name, ()):
            self.exchange.put(Message("value", name, k, self._flow.stage.index, user), value)

    def publish_lookups(self, pieces: dict[str, list[Any]]) -> None:
        """Store the splits of table lookups by value name, and send them to the stages that read them."""
        self._pieces = pieces
        for name, splits in pieces.items():
            for k, piece in enumerate(splits):
                self.publish(name, k, piece)

    def send_gradients(self, name: str, k: int, gradients: Gradients) -> None:
        """Send the gradients of a value to the stage that computed it; store those of local values.

        Args:
            name: name of the value.
            k: index of the split.
            gradients: gradients of its leaves.
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
        """Wait for the gradients of the values that this stage computed for split ``k``.

        Args:
            k: index of the split.
            result_gradients: gradients of the values that the model returns, by name.

        Returns:
            Gradients by value name, summed over all stages that read the value.
        """
        sums: dict[str, Gradients | None] = {**result_gradients}
        for name in self._flow.stage.split.gives:
            sums[name] = self._add_users_gradients(name, k, result_gradients.get(name))
        return sums

    def collect(self) -> None:
        """Wait for the gradients of table lookups that other stages read."""
        for name, pieces in self._pieces.items():
            piece_gradients = self._piece_gradients.setdefault(name, [None] * len(pieces))
            for k in range(len(pieces)):
                piece_gradients[k] = self._add_users_gradients(name, k, piece_gradients[k])

    def take_table_gradients(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return the table lookups that have gradients, and these gradients; forget the lookups."""
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
    """Add the gradients of a value leaf by leaf. None stands for 0."""
    if one is None or other is None:
        given = one if other is None else other
        return None if given is None else list(given)
    return [b if a is None else a if b is None else a + b for a, b in zip(one, other, strict=True)]


class GradientSums:
    """Sums of the gradients of a stage's parameters over splits.

    Attributes:
        num_added: number of splits added so far.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self.num_added = 0
        self._sums: Gradients = [None] * len(self.parameters)
        # Indices of sums that were allocated here, and so may be changed in place.
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
                # Autograd may return the same tensor as gradient of two parameters, so the first gradient
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
    """Operation whose backward pass returns precomputed gradients."""

    @staticmethod
    def forward(ctx: Any, gradients: Gradients, *parameters: nn.Parameter) -> Tensor:
        ctx.gradients = gradients
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        return None, *ctx.gradients
