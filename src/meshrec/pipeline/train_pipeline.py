"""A training loop that communicates during computation, with the results of the plain loop."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from meshrec.pipeline.agreement import Uneven
from meshrec.pipeline.lookahead import Lookahead
from meshrec.pipeline.update import Update

Forward = Callable[[Any], tuple[Tensor, Any]]


class TrainPipeline:
    """Trains batch by batch, while the IDs of the next batch and the data of the one after it travel.

    Outputs, weights and optimizer state are equal, bit for bit, to those of this loop::

        for batch in loader:
            optimizer.zero_grad()
            losses, output = model(batch)
            losses.sum().backward()
            optimizer.step()

    With ``accumulate``, ``zero_grad`` comes before the first and ``step`` after the last of that many
    batches, or of the batches that are left at the end.

    Nothing is traced, so any model works. A sharded module is pipelined if its input is a KeyedJaggedTensor
    of the batch itself; otherwise it runs its plain lookup. In eval mode a batch is only computed.

    A batch must keep its tensors until it is trained. A loader that writes to the tensors of an earlier batch
    is detected, unless it writes through NumPy, which torch does not see. Random numbers that the loader
    draws in this process are drawn earlier than in the plain loop.

    Args:
        model: maps a batch to (losses, output). It has sharded modules anywhere in it.
        optimizer: the optimizer of the dense part and the tables, such as a CombinedOptimizer of both, with
            or without clipping. In a bare CombinedOptimizer, the tables step first.
        device: device to move batches to: objects with a method ``to``, and tuples, lists and mappings of
            them. None leaves them where they are.
        forward: the function to call in place of ``model`` in the forward pass.
        accumulate: number of batches per step of the optimizer.
        uneven: what to do if ranks have different numbers of batches. ``"stop"`` ends all of them after the
            last batch that all have; ``"error"`` raises ValueError there and names the ranks.
        semi_synchronous_from: number of a batch, from 0. From there on, a batch takes its embeddings before
            the update of the previous batch. This changes the results, and hides the exchange of embeddings
            as well. The first two batches are exact in any case.
        strict: raise ValueError, after the first forward pass, if a module cannot be pipelined. Otherwise a
            log line names it.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device | None = None,
        *,
        forward: Forward | None = None,
        accumulate: int = 1,
        uneven: Uneven = "stop",
        strict: bool = False,
        semi_synchronous_from: int | None = None,
    ) -> None:
        if accumulate < 1:
            raise ValueError(f"accumulate must be at least 1, got {accumulate}.")
        self._model, self._optimizer = model, optimizer
        self._forward: Forward = model if forward is None else forward
        self._accumulate, self._num_collected = accumulate, 0
        self._ahead = Lookahead(model, device=device, uneven=uneven, strict=strict)
        self._semi_synchronous_from, self._num_batches = semi_synchronous_from, 0
        self._update = Update(model, optimizer)

    def progress(self, iterator: Iterator[Any]) -> Any:
        """Train on the next batch of the iterator, and return the model's output.

        If the iterator is another one than in the last call, its batches follow those that were already read
        from that one.

        Raises:
            StopIteration: after the last batch, on every rank. A call after that starts again.
            ValueError: this batch has invalid IDs, or was written to while it was under way; or, with
                ``uneven="error"``, ranks have different numbers of batches. It is raised on every rank.
            Exception: the error of the loader, after all batches before it. Other ranks raise RuntimeError.
        """
        batch = self._ahead.next(iterator)
        if not self._model.training:
            with self._ahead.forward():
                _, output = self._forward(batch)
            self._ahead.exchange(iterator)
            self._ahead.look_up(self._update.is_stepped)
            return output
        if self._num_collected == 0:
            self._optimizer.zero_grad()
        self._num_collected += 1
        steps = self._num_collected >= self._accumulate or self._ahead.is_last
        with self._update.backward(steps=steps):
            with self._ahead.forward():
                losses, output = self._forward(batch)
            self._num_batches += 1
            if self._semi_synchronous_from is not None and self._num_batches >= self._semi_synchronous_from:
                self._ahead.look_up_before_update()
            self._ahead.exchange(iterator)
            losses.sum().backward()
        self._update.after_backward(self._ahead, steps=steps)
        if steps:
            self._num_collected = 0
        return output

    def __call__(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Train on all batches, and yield the output of each. Leaving the loop early drops the batches in
        flight.
        """
        iterator = iter(batches)
        try:
            while True:
                try:
                    output = self.progress(iterator)
                except StopIteration:
                    return
                yield output
        finally:
            self.reset()

    @property
    def has_ended(self) -> bool:
        """Whether the loader has nothing after the batches in flight."""
        return self._ahead.has_ended

    def reset(self) -> None:
        """Drop the batches in flight, and start the accumulation again. Call it on all ranks."""
        self._ahead.reset()
        self._num_collected = 0
