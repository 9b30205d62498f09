"""A training loop whose communication runs beside its computation, with the numbers of the plain loop."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from meshrec.pipeline.agreement import Uneven
from meshrec.pipeline.lookahead import Lookahead
from meshrec.pipeline.update import Update

Forward = Callable[[Any], tuple[Tensor, Any]]


class TrainPipeline:
    """Trains batch by batch, while the ids of the next batch and the data of the one after travel.

    Outputs, weights and optimizer state are those of this loop, bit for bit::

        for batch in loader:
            optimizer.zero_grad()
            losses, output = model(batch)
            losses.sum().backward()
            optimizer.step()

    with ``zero_grad`` before the first and ``step`` after the last of every ``accumulate`` batches (or of
    those that are left at the end). Nothing is traced, so that models may do what they like; a sharded module
    takes part when its input is a KeyedJaggedTensor of the batch itself, and does the plain thing otherwise.
    In eval mode a batch is computed only.

    A batch must keep its tensors until it is trained: a loader that writes into the tensors of an earlier
    batch is found out (unless it does so behind torch's back, through NumPy). Random numbers that the loader
    draws in this process come earlier than in the plain loop.

    Args:
        model: from a batch to (losses, output). Sharded modules anywhere in it.
        optimizer: of the dense part and the tables, such as a CombinedOptimizer of both, perhaps clipped. The
            tables' share of a bare CombinedOptimizer steps first.
        device: where batches go: what has a method ``to``, and tuples, lists and mappings of it. None leaves
            them where they are.
        forward: in place of ``model`` for the forward pass.
        accumulate: batches per step of the optimizer.
        uneven: when ranks have different numbers of batches: ``"stop"`` ends all after the last batch that
            all have, ``"error"`` raises ValueError there and names the ranks.
        semi_synchronous_from: the number of a batch, from 0. From there on a batch takes embeddings from
            before the update of the batch before it, which changes the numbers and hides the exchange of
            embeddings as well. The first two batches are exact in any case.
        strict: raise ValueError, after the first forward pass, where a module cannot take part. Otherwise a
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
        """Trains on the next batch of the iterator and gives the model's output.

        Another iterator than in the last call goes on behind the batches that were read from that one.

        Raises:
            StopIteration: on every rank, after the last batch; a call after that begins anew.
            ValueError: on every rank, for bad ids in this batch, for a batch that was written to while it
                was under way, and by option when ranks have different numbers of batches.
            Exception: what the loader raised, after all batches before it; on other ranks RuntimeError.
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
        """Trains on all batches; gives the output of each. Leaving the loop early drops what is in flight."""
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
        """Drops the batches in flight, and begins a step anew; on all ranks."""
        self._ahead.reset()
        self._num_collected = 0
