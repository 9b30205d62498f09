"""One update: forward and backward over the batches of a step, then the optimizers."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from meshrec.model_parallel import DistributedModelParallel
from meshrec.train.building import Built
from meshrec.train.ranks import Ranks

if TYPE_CHECKING:
    from meshrec.data import Batch


class Outputs(NamedTuple):
    """Of this rank's samples, detached: the sum of their losses, logits [B], labels [B]."""

    loss_sum: Tensor
    logits: Tensor
    labels: Tensor


class TrainStep:
    """Trains on the samples of a step as one batch, whatever ranks and accumulation they are spread over.

    The loss is the mean of the binary cross-entropy over all samples of all ranks; ranks may hold different
    numbers of them.
    """

    def __init__(self, built: Built, ranks: Ranks, *, bf16: bool) -> None:
        self._built, self._ranks, self._bf16 = built, ranks, bf16

    def __call__(self, batches: "Sequence[Batch]", num_samples: int) -> list[Outputs]:
        """``num_samples``: of all ranks and batches of this step."""
        self._built.optimizer.zero_grad()
        # DistributedDataParallel and sharded tables average over ranks.
        scale = self._ranks.size / num_samples
        outputs = []
        for number, batch in enumerate(batches):
            with nullcontext() if number == len(batches) - 1 else self._no_sync():
                with record_function("meshrec.forward"):
                    logits = forward(self._built.model, batch, self._ranks.device, bf16=self._bf16)
                    loss = nn.functional.binary_cross_entropy_with_logits(
                        logits, batch.labels, reduction="sum"
                    )
                with record_function("meshrec.backward"):
                    (loss * scale).backward()
            outputs.append(Outputs(loss.detach(), logits.detach(), batch.labels))
        with record_function("meshrec.optimizer"):
            self._built.optimizer.step()
        return outputs

    def _no_sync(self) -> AbstractContextManager[None]:
        model = self._built.model
        wrapped = model._dmp_wrapped_module if isinstance(model, DistributedModelParallel) else model
        if isinstance(wrapped, nn.parallel.DistributedDataParallel):
            context: AbstractContextManager[None] = wrapped.no_sync()
            return context
        return nullcontext()


def forward(model: nn.Module, batch: "Batch", device: torch.device, *, bf16: bool) -> Tensor:
    """Logits [B], fp32."""
    with torch.autocast(device.type, torch.bfloat16) if bf16 else nullcontext():
        logits: Tensor = model(batch.dense, batch.sparse)
    return logits.float().reshape(-1)
