"""The values which a stage reads and computes in a batch, and the gradients for them.

A value is the result of a node in the model graph, for a split (microbatch) of the batch. It is identified by
the node's name. Its leaves are the tensors and other objects in it if it is a nested container.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from meshrec.stages.programs import StageFlow

Gradients = list[Tensor | None]
"""A gradient for every leaf of a value, in pytree order; None for leaves without a gradient."""


class Message(NamedTuple):
    """Identifier of a message between two stages.

    The message has a value for a split (microbatch), or the gradients for this value.

    Attributes:
        kind: "value", sent from ``source`` to ``destination``, or "gradient", sent from ``destination`` back
            to ``source``.
        name: value name.
        k: split index.
        source: number of the stage which computes the value.
        destination: number of the stage which reads the value.
    """

    kind: Literal["value", "gradient"]
    name: str
    k: int
    source: int
    destination: int


class Exchange(ABC):
    """Transport between stages: values go to the stages which read them, and gradients go back."""

    @abstractmethod
    def put(self, message: Message, value: Any) -> None:
        """Send a value or its gradients. Does not wait for the receiver."""

    @abstractmethod
    def get(self, message: Message) -> Any:
        """Wait for a value or its gradients, and return them.

        Tensors in the value require gradients if they do at the sender.
        """


class Inputs(NamedTuple):
    """A batch, whole and divided into splits (microbatches).

    Attributes:
        batch_values: batch values by name.
        splits: the same values for every split, by name. Values this rank's stage does not need may be
            missing.
        sizes: samples in every split.
    """

    batch_values: Mapping[str, Any]
    splits: Mapping[str, Sequence[Any]]
    sizes: Sequence[int]


class StageValues:
    """Gets the values a stage reads and sends the values it computes, and does the same for gradients.

    A value may come from the batch, from this stage's table lookups, or from another stage. Create an object
    for every batch.

    Attributes:
        inputs, exchange: see above.
        results: values computed here and returned by the model, with their autograd graph, by (value name,
            split index).
        input_gradients: gradients for batch values, by (value name, split index).
    """

    def __init__(self, flow: StageFlow, inputs: Inputs, exchange: Exchange) -> None:
        self._flow, self.inputs, self.exchange = flow, inputs, exchange
        self._returned = set(flow.output_names)
        self.results: dict[tuple[str, int], Any] = {}
        self.input_gradients: dict[tuple[str, int], Gradients] = {}
        # This stage's table lookups, by value name and split index, and the gradients for them. Set by
        # `publish_lookups` and `send_gradients`, and used by `take_lookup_gradients`.
        self._pieces: dict[str, list[Any]] = {}
        self._piece_gradients: dict[str, list[Gradients | None]] = {}

    def take(self, name: str, k: int) -> Any:
        """Return the value ``name`` for split ``k``. If another stage computes it, wait for the value."""
        if name in self._pieces:
            return self._pieces[name][k]
        if name in self.inputs.splits:
            return self.inputs.splits[name][k]
        return self.exchange.get(
            Message("value", name, k, self._flow.producer_stage[name], self._flow.stage.index)
        )

    def publish(self, name: str, k: int, value: Any) -> None:
        """Send a value computed by this stage to all other stages which read it.

        If the model returns the value, also store it in ``results``.

        Args:
            name: value name.
            k: split index.
            value: the value for the split.
        """
        if name in self._returned:
            self.results[name, k] = value
        for user in self._flow.consumer_stages.get(name, ()):
            self.exchange.put(Message("value", name, k, self._flow.stage.index, user), value)

    def publish_lookups(self, pieces: dict[str, list[Any]]) -> None:
        """Store this stage's table lookups, and send them to all other stages which read them."""
        self._pieces = pieces
        for name, splits in pieces.items():
            for k, piece in enumerate(splits):
                self.publish(name, k, piece)

    def send_gradients(self, name: str, k: int, gradients: Gradients) -> None:
        """Send the gradients for a value back to the stage which computed the value.

        Gradients for batch values and for this stage's table lookups are stored instead.

        Args:
            name: value name.
            k: split index.
            gradients: gradient for every leaf of the value.
        """
        if name in self._pieces:
            # The table update runs once, after all splits, so gradients wait here.
            piece_gradients = self._piece_gradients.setdefault(name, [None] * len(self.inputs.sizes))
            piece_gradients[k] = gradients
        elif name in self.inputs.splits:
            self.input_gradients[name, k] = gradients
        else:
            message = Message("gradient", name, k, self._flow.producer_stage[name], self._flow.stage.index)
            self.exchange.put(message, gradients)

    def receive_gradients(
        self, k: int, result_gradients: Mapping[str, Gradients]
    ) -> dict[str, Gradients | None]:
        """Wait for the gradients for all values which this stage has computed for split ``k``.

        Returns:
            Gradients by value name, summed over ``result_gradients`` and all stages which read the value.
        """
        sums: dict[str, Gradients | None] = {**result_gradients}
        for name in self._flow.stage.split_program.output_names:
            sums[name] = self._add_users_gradients(name, k, result_gradients.get(name))
        return sums

    def collect(self) -> None:
        """Wait until other stages have sent the gradients for this stage's table lookups, and sum them up."""
        for name, pieces in self._pieces.items():
            piece_gradients = self._piece_gradients.setdefault(name, [None] * len(pieces))
            for k in range(len(pieces)):
                piece_gradients[k] = self._add_users_gradients(name, k, piece_gradients[k])

    def take_lookup_gradients(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return this stage's lookup results that have a gradient, and their gradients, in the same order.

        The caller passes both lists to `torch.autograd.backward`. The stored lookup results are dropped, so
        that their memory can be freed.
        """
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
        """Wait for the gradients for a value from all other stages which read it, and add them to ``total``.

        Returns:
            The sum, or None if no stage has a gradient for the value.
        """
        index = self._flow.stage.index
        for user in self._flow.consumer_stages.get(name, ()):
            # In stage order, so that sums do not depend on which stage is faster.
            total = add_gradients(total, self.exchange.get(Message("gradient", name, k, index, user)))
        return total


def add_gradients(one: Gradients | None, other: Gradients | None) -> Gradients | None:
    """Return the sum of two gradients for the same value, leaf by leaf. None stands for 0."""
    if one is None or other is None:
        given = one if other is None else other
        return None if given is None else list(given)
    return [b if a is None else a if b is None else a + b for a, b in zip(one, other, strict=True)]


class GradientSums:
    """Sums of the gradients for a stage's parameters over the splits (microbatches) of a batch.

    Attributes:
        parameters: the stage's parameters.
        num_added: splits added so far.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self.num_added = 0
        # Sums over the splits so far; None for a parameter without a gradient yet. They live for one batch.
        self._sums: Gradients = [None] * len(self.parameters)
        # Parameter indices whose sum was allocated here, so it may be changed in place.
        self._owned: set[int] = set()

    def add(self, gradients: Sequence[Tensor | None]) -> None:
        """Add the gradients from a split, in the order of ``parameters``; None stands for 0."""
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
        """Add the sums to ``parameter.grad``. Call it once per batch."""
        # Through autograd, so that hooks such as DistributedDataParallel's run, with a single gradient per
        # batch.
        pairs = zip(self.parameters, self._sums, strict=True)
        # Parameters without a gradient keep their ``grad``.
        given = [(parameter, total) for parameter, total in pairs if total is not None]
        if given:
            parameters, gradients = zip(*given, strict=True)
            with torch.enable_grad():
                _PrecomputedGradients.apply(list(gradients), *parameters).backward()  # type: ignore[no-untyped-call]


class _PrecomputedGradients(torch.autograd.Function):
    """Autograd operation whose backward pass gives precomputed gradients to parameters.

    The result is a dummy (0-d). ``backward`` on it adds the gradients to ``parameter.grad`` through autograd,
    so that hooks on the parameters run.
    """

    @staticmethod
    def forward(ctx: Any, gradients: Gradients, *parameters: nn.Parameter) -> Tensor:
        """Store the gradients for the backward pass, and return a zero (0-d)."""
        ctx.gradients = gradients
        # A dummy result, from which ``backward`` starts.
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        """Return the stored gradients for the parameters; None for the first argument."""
        return None, *ctx.gradients
