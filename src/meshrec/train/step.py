"""One update: forward and backward over the batches of a step, then the optimizers."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from meshrec.model_parallel import DistributedModelParallel
from meshrec.train.building import Built
from meshrec.train.losses import Loss
from meshrec.train.ranks import Ranks
from meshrec.train.watch import OutputWatch

if TYPE_CHECKING:
    from meshrec.data import Batch


class Outputs(NamedTuple):
    """Of this rank's samples, detached: the sum of their losses, logits and labels, [B] or [B, T]."""

    loss_sum: Tensor
    logits: Tensor
    labels: Tensor


class TrainStep:
    """Trains on the samples of a step as one batch, whatever ranks and accumulation they are spread over.

    The loss is the mean over all samples of all ranks; ranks may hold different numbers of them.
    """

    def __init__(self, built: Built, ranks: Ranks, loss: Loss, *, bf16: bool) -> None:
        self._built, self._ranks, self._loss, self._bf16 = built, ranks, loss, bf16
        self._watch = OutputWatch(built.model)
        self.failure: str | None = None
        """Of the last step, on this rank: why its loss is no number."""

    def __call__(self, batches: "Sequence[Batch]", num_samples: int) -> list[Outputs]:
        """``num_samples``: of all ranks and batches of this step."""
        self._built.optimizer.zero_grad()
        # DistributedDataParallel and sharded tables average over ranks.
        scale = self._ranks.size / num_samples
        outputs = []
        self.failure = None
        for number, batch in enumerate(batches):
            with nullcontext() if number == len(batches) - 1 else self._no_sync():
                self._watch.forget()
                with record_function("meshrec.forward"):
                    logits = forward(self._built.model, batch, self._ranks.device, bf16=self._bf16)
                    loss = self._loss.sum(logits, batch.labels, batch.weights)
                if self.failure is None and not bool(loss.isfinite()):
                    # The other ranks wait for this one in the backward pass: the end comes after it.
                    self.failure = self._why(batch, float(loss.detach()))
                with record_function("meshrec.backward"):
                    (loss * scale).backward()
            outputs.append(Outputs(loss.detach(), logits.detach(), batch.labels))
        with record_function("meshrec.optimizer"):
            self._built.optimizer.step()
        return outputs

    def _why(self, batch: "Batch", loss: float) -> str:
        if not bool(torch.isfinite(batch.dense).all()):
            cause = "the dense values of the batch are no numbers already"
        else:
            first = self._watch.first_bad()
            cause = (
                f"the first module whose output is no number is {first}"
                if first is not None
                else "the outputs of all modules are numbers, so look at the labels"
            )
        return f"rank {self._ranks.rank}: the loss is {loss}; {cause}"

    def _no_sync(self) -> AbstractContextManager[None]:
        model = self._built.model
        wrapped = model._dmp_wrapped_module if isinstance(model, DistributedModelParallel) else model
        if isinstance(wrapped, nn.parallel.DistributedDataParallel):
            context: AbstractContextManager[None] = wrapped.no_sync()
            return context
        return nullcontext()


def forward(model: nn.Module, batch: "Batch", device: torch.device, *, bf16: bool) -> Tensor:
    """Logits [B], or of T labels [B, T]; fp32."""
    with torch.autocast(device.type, torch.bfloat16) if bf16 else nullcontext():
        logits: Tensor = model(batch.dense, batch.sparse)
    return logits.float().squeeze(1) if logits.dim() == 2 and logits.shape[1] == 1 else logits.float()
