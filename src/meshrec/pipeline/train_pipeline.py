"""Training loop with communication during computation, and the plain loop's results."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from meshrec.pipeline.lookahead import Lookahead, Uneven
from meshrec.pipeline.update import Update

Forward = Callable[[Any], tuple[Tensor, Any]]


class TrainPipeline:
    """Trains batch by batch, while the next batch's IDs and the following batch's data travel.

    Outputs, weights and optimizer state equal this loop's, bit for bit::

        for batch in loader:
            optimizer.zero_grad()
            losses, output = model(batch)
            losses.sum().backward()
            optimizer.step()

    With ``accumulate``, ``zero_grad`` comes before the first and ``step`` after the last of that many
    batches, or of the batches left at the end.

    Nothing is traced, so any model works. A sharded module is pipelined if its input is a KeyedJaggedTensor
    from the batch itself; otherwise it runs the plain lookup. In eval mode a batch is only computed. The
    parts of a batch are mapping values, sequence items, dataclass fields, and attributes of other objects.

    A batch's tensors must stay until it is trained. A loader that writes to an earlier batch's tensors is
    detected, unless it writes through NumPy, which torch does not see. Random values drawn by the loader in
    this process come earlier than in the plain loop.

    Args:
        model: maps a batch to (losses, output). It has sharded modules anywhere in it.
        optimizer: optimizer for the dense part and the tables, such as a CombinedOptimizer, with or without
            clipping. In a bare CombinedOptimizer, the tables step first.
        device: device to move batches to: objects with a ``to`` method, and tuples, lists and mappings with
            such objects. None leaves them where they are.
        forward: function to call instead of ``model`` in the forward pass.
        accumulate: batches per optimizer step.
        uneven: reaction to different numbers of batches on different ranks. ``"stop"`` ends all ranks after
            the last common batch; ``"error"`` raises ValueError there and names the ranks.
        semi_synchronous_from: batch number, from 0. From there on, a batch takes embeddings before the
            previous batch's update. This changes the results, and hides the embedding exchange as well. The
            first two batches are exact in any case.
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
        """Train on the iterator's next batch, and return the model's output.

        If the iterator differs from the last call's, batches already read from the previous iterator come
        first.

        Raises:
            StopIteration: after the last batch, on every rank. A call after that starts again.
            ValueError: this batch has invalid IDs, or was written to while in flight; or, with
                ``uneven="error"``, ranks have different numbers of batches. Raised on every rank.
            Exception: the loader's error, after all earlier batches. Other ranks raise RuntimeError.
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
        # A final partial accumulation also steps.
        steps = self._num_collected >= self._accumulate or self._ahead.is_last
        with self._update.backward(steps=steps):
            with self._ahead.forward():
                losses, output = self._forward(batch)
            self._num_batches += 1
            if self._semi_synchronous_from is not None and self._num_batches >= self._semi_synchronous_from:
                # Before ``backward``, whose fused updates change the tables.
                self._ahead.look_up_before_update()
            self._ahead.exchange(iterator)
            losses.sum().backward()
        self._update.after_backward(self._ahead, steps=steps)
        if steps:
            self._num_collected = 0
        return output

    def __call__(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Train on all batches and yield the outputs. Leaving the loop early drops the batches in flight."""
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
        """Drop the batches in flight and restart the accumulation. Call this on all ranks."""
        self._ahead.reset()
        self._num_collected = 0
