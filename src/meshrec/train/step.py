"""One update: forward and backward over the batches of a step, then the optimizers."""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from meshrec.pipeline import Lookahead, Update
from meshrec.train.building import Built
from meshrec.train.losses import Loss, squeezed, sum_of_members
from meshrec.train.ranks import Ranks
from meshrec.train.watch import OutputWatch

if TYPE_CHECKING:
    from meshrec.data import Batch


class Outputs(NamedTuple):
    """Detached outputs of this rank's samples: the sum of their losses, logits and labels, [B] or [B, T]."""

    loss_sum: Tensor
    logits: Tensor
    labels: Tensor


class TrainStep:
    """Training step that treats all samples of a step as one batch, across ranks and accumulated batches.

    The loss is the mean over all samples of all ranks, which may hold different numbers of them.
    """

    def __init__(self, built: Built, ranks: Ranks, loss: Loss, *, bf16: bool, pipeline: bool = False) -> None:
        self._built, self._ranks, self._loss, self._bf16 = built, ranks, loss, bf16
        self._watch = OutputWatch(built.model)
        self._update = Update(built.model, built.optimizer)
        self._ahead: Lookahead | None = None
        if pipeline:
            self._ahead = Lookahead(built.model, device=ranks.device, uneven="error", strict=False)
        self.failure: str | None = None
        """Why the loss of this rank's last step was NaN or infinite; None if it was finite."""

    def __call__(self, batches: "Iterator[Batch]", num_batches: int, num_samples: int) -> list[Outputs]:
        """Train on the next ``num_batches``, which have ``num_samples`` samples over all ranks.

        Raises:
            StopIteration: there are fewer batches.
        """
        self._built.optimizer.zero_grad()
        # DistributedDataParallel and sharded tables average over ranks.
        scale = self._ranks.size / num_samples
        outputs = []
        self.failure = None
        ahead = self._ahead
        for number in range(num_batches):
            steps = number == num_batches - 1
            batch = self._next(batches)
            with self._update.backward(steps=steps, late=ahead is not None):
                self._watch.forget()
                with record_function("meshrec.forward"), nullcontext() if ahead is None else ahead.forward():
                    logits = forward(self._built.model, batch, self._ranks.device, bf16=self._bf16)
                    loss = sum_of_members(self._loss, logits, batch.labels, batch.weights)
                if self.failure is None and not bool(loss.isfinite()):
                    # The other ranks wait for this one in the backward pass: the end comes after it.
                    self.failure = self._why(batch, float(loss.detach()))
                if ahead is not None:
                    ahead.exchange(batches)
                with record_function("meshrec.backward"):
                    (loss * scale).backward()
            logits = logits.detach()
            whole = squeezed(logits.mean(2)) if logits.dim() == 3 else logits
            outputs.append(Outputs(loss.detach(), whole, batch.labels))
            if ahead is not None and not steps:
                self._update.after_backward(ahead, steps=False)
        with record_function("meshrec.optimizer"):
            if ahead is None:
                self._built.optimizer.step()
            else:
                self._update.after_backward(ahead, steps=True)
        return outputs

    @property
    def is_pipelined(self) -> bool:
        """Whether exchanges run while a batch computes."""
        return self._ahead is not None

    def reset(self) -> None:
        """Drop the batches in flight, because the next ones come from another iterator."""
        if self._ahead is not None:
            self._ahead.reset()

    def _next(self, batches: "Iterator[Batch]") -> "Batch":
        if self._ahead is None:
            return next(batches).to(self._ranks.device, non_blocking=True)
        batch: Batch = self._ahead.next(batches)
        return batch

    def _why(self, batch: "Batch", loss: float) -> str:
        if not bool(torch.isfinite(batch.dense).all()):
            cause = "the batch already has dense values that are NaN or infinite"
        else:
            first = self._watch.first_bad()
            cause = (
                f"the first module with NaN or infinity in its output is {first}"
                if first is not None
                else "the outputs of all modules are finite, so look at the labels"
            )
        return f"rank {self._ranks.rank}: the loss is {loss}; {cause}"


def forward(model: nn.Module, batch: "Batch", device: torch.device, *, bf16: bool) -> Tensor:
    """Return fp32 logits [B], or [B, T] for T labels; of an ensemble in training [B, T, M]."""
    with torch.autocast(device.type, torch.bfloat16) if bf16 else nullcontext():
        logits: Tensor = model(batch.dense, batch.sparse)
    return squeezed(logits.float())
