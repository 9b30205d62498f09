"""Training loop overlapping communication with computation, with the same results as the plain loop."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from meshrec.pipeline.lookahead import Lookahead, Uneven
from meshrec.pipeline.update import Update

Forward = Callable[[Any], tuple[Tensor, Any]]


class TrainPipeline:
    """Trains batch by batch, and meanwhile exchanges the next batch's IDs and reads the batch after it.

    Outputs, weights and optimizer state are bit-identical to this loop's::

        for batch in loader:
            optimizer.zero_grad()
            losses, output = model(batch)
            losses.sum().backward()
            optimizer.step()

    With ``accumulate=n``, ``zero_grad`` runs before the first and ``step`` after the last of n batches; the
    last group may have fewer.

    The model is not traced, so any model works. A sharded module is pipelined if the input is a
    KeyedJaggedTensor in the batch itself; otherwise it runs the plain lookup. In eval mode, the pipeline only
    computes outputs. Inputs are found in mapping values, sequence items, dataclass fields, and other objects'
    attributes.

    A batch's tensors must not change until the batch is trained. If the loader reuses tensors from an earlier
    batch, the pipeline raises ValueError; writes through NumPy are not detected. If the loader draws random
    values in this process, it draws them earlier than in the plain loop.

    Args:
        model: maps a batch to (losses, output). Sharded modules may be at any depth.
        optimizer: optimizer for dense parameters and tables, such as a CombinedOptimizer, with or without
            clipping. If it is a plain CombinedOptimizer, the tables step first.
        device: device to copy batches to: objects with a ``to`` method, and tuples, lists and mappings with
            these objects. None: batches are not copied.
        forward: function from a batch to (losses, output), called instead of ``model``.
        accumulate: batch count per optimizer step.
        uneven: reaction to different batch counts on different ranks. ``"stop"`` ends all ranks after
            the last common batch; ``"error"`` raises ValueError there and names the ranks.
        semi_synchronous_from: batch number, from 0. From this batch on, rows are looked up before the
            previous batch updates the tables. Results differ from the plain loop, and the embedding exchange
            is overlapped as well. The first two batches are always exact. None: never.
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
        """Train on the next batch, and return the model's output.

        Args:
            iterator: the loader's batches. If it is another iterator than in the last call, the batches
                already read from the previous iterator are trained first.

        Raises:
            StopIteration: after the last batch, on every rank. The following call reads from ``iterator``
                again.
            ValueError: this batch has invalid IDs, or was written to while in flight; or, with
                ``uneven="error"``, ranks have different batch counts. Raised on every rank.
            Exception: the loader's error, once all earlier batches are trained. Other ranks raise
                RuntimeError.
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
        # At the data's end, a group with fewer than ``accumulate`` batches also steps.
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
        """Train on all batches, and yield the outputs.

        If the caller stops early, batches in flight are dropped.
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
        """Whether a rank's loader has no batch after the batches in flight."""
        return self._ahead.has_ended

    def reset(self) -> None:
        """Drop the batches in flight, and restart the accumulation. Call this method on all ranks."""
        self._ahead.reset()
        self._num_collected = 0
