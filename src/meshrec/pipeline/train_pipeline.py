"""Training loop which overlaps communication with computation, with the same results as a plain loop."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from meshrec.pipeline.lookahead import Lookahead, Uneven
from meshrec.pipeline.update import Update

Forward = Callable[[Any], tuple[Tensor, Any]]


class TrainPipeline:
    """Training loop with lookahead: while a batch computes, ranks exchange IDs for the next batch, and the
    loader reads the batch after it.

    Outputs, weights and optimizer state are bit-identical to those from this loop::

        for batch in loader:
            optimizer.zero_grad()
            losses, output = model(batch)
            losses.sum().backward()
            optimizer.step()

    With ``accumulate=n``, ``zero_grad`` runs before the first of n batches, and ``step`` after the last. The
    last group may have fewer batches.

    The model is not traced, so any model works. The lookup of a sharded module starts early if the module's
    input is a KeyedJaggedTensor which the batch contains, at any depth: in a mapping, a sequence, a
    dataclass field, or an attribute of an object. Otherwise the module runs the plain lookup. In eval mode,
    the pipeline only computes outputs.

    The tensors in a batch must not change until the batch is trained. If the loader reuses tensors from an
    earlier batch, the pipeline raises ValueError. Writes through NumPy are not detected. If the loader draws
    random values in this process, it draws them earlier than in the plain loop.

    Args:
        model: maps a batch to (losses, output). Sharded modules may be at any depth.
        optimizer: optimizer for dense parameters and tables, such as a CombinedOptimizer, with or without
            clipping. If it is a plain CombinedOptimizer, the tables step first.
        device: device to which batches are copied; None: batches are not copied. Objects with a ``to`` method
            are copied, also if they are inside tuples, lists and mappings.
        forward: function from a batch to (losses, output), called instead of ``model``.
        accumulate: batches per optimizer step.
        uneven: what to do if ranks have different numbers of batches. ``"stop"`` ends all ranks after the
            last batch which all ranks have. ``"error"`` raises ValueError there and names the ranks.
        semi_synchronous_from: number of a batch, counted from 0. From this batch on, rows are looked up
            before the previous batch updates the tables. The embedding exchange then also overlaps with
            computation, but results differ from the plain loop. The first two batches are always exact. None:
            never.
        strict: whether to raise ValueError after the first forward pass if the lookup of some module cannot
            start early. If False, a log line names the module.
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
        # ``_num_collected``: batches trained since the last optimizer step.
        self._accumulate, self._num_collected = accumulate, 0
        self._ahead = Lookahead(model, device=device, uneven=uneven, strict=strict)
        # ``_num_batches`` counts trained batches over the lifetime of the pipeline.
        self._semi_synchronous_from, self._num_batches = semi_synchronous_from, 0
        self._update = Update(model, optimizer)

    def progress(self, iterator: Iterator[Any]) -> Any:
        """Train on the next batch, and return the model's output. Collective.

        Args:
            iterator: iterator over the batches of this rank's loader. If it is another iterator than in the
                last call, the batches already read from the previous iterator are trained first.

        Raises:
            StopIteration: after the last batch, on every rank. The following call reads from ``iterator``
                again.
            ValueError: this batch has invalid IDs, or was changed after it was read. Or ranks have different
                numbers of batches, with ``uneven="error"``. All ranks raise it.
            Exception: the loader has failed, and all earlier batches are trained. Other ranks raise
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
        """Train on all batches, and yield the model's output for each.

        If the caller stops early, batches which have been read but not trained are dropped.
        """
        iterator = iter(batches)
        try:
            while True:
                try:
                    output = self.progress(iterator)
                except StopIteration:
                    return
                yield output
        # The caller has stopped early, or an error was raised: drop batches already read.
        finally:
            self.reset()

    @property
    def has_ended(self) -> bool:
        """Whether the loader on some rank has no batch after the batches already read."""
        return self._ahead.has_ended

    def reset(self) -> None:
        """Drop all batches already read, and restart the accumulation. Call this method on all ranks."""
        self._ahead.reset()
        self._num_collected = 0
