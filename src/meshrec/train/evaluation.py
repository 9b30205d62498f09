"""Metrics over all ranks: of the training steps since the last line, and of validation data."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from meshrec.train.losses import BinaryCrossEntropy, Loss
from meshrec.train.ranks import Ranks
from meshrec.train.step import Outputs, forward

if TYPE_CHECKING:
    from meshrec.data import Batch, Reader

DEFAULT_LOSS = BinaryCrossEntropy()
EVALUATION_BATCH = 4096
"""Samples per rank and step of an evaluation."""


class Window:
    """Outputs of the steps since the last line of metrics."""

    def __init__(self, loss: Loss = DEFAULT_LOSS) -> None:
        self._loss = loss
        self._outputs: list[Outputs] = []

    @property
    def is_empty(self) -> bool:
        """Whether there are no outputs."""
        return not self._outputs

    def add(self, outputs: list[Outputs]) -> None:
        """Add the outputs of a step."""
        self._outputs += outputs

    def take(self, ranks: Ranks) -> dict[str, float]:
        """Return the loss's metrics over all ranks' samples, and start again. Collective."""
        outputs, self._outputs = self._outputs, []
        logits = torch.cat([each.logits for each in outputs]).cpu()
        labels = torch.cat([each.labels for each in outputs]).cpu()
        return self._loss.metrics(logits, labels, group=ranks.control)


class Scored(NamedTuple):
    """The model's outputs for one batch of a reader, on this rank, on the CPU.

    ``rows_B`` are row numbers of the samples (see `meshrec.data.Reader.files`), or None if the reader has
    none. ``labels_B`` are NaN if the data has no labels.
    """

    rows_B: Tensor | None
    logits_B: Tensor
    labels_B: Tensor


def score(
    model: nn.Module,
    reader: "Reader",
    ranks: Ranks,
    *,
    batch_size: int = EVALUATION_BATCH,
    bf16: bool = False,
    watch: "Callable[[Batch], None] | None" = None,
) -> Iterator[Scored]:
    """Compute the model's logits for this rank's part of ``reader``, in the reader's order.

    Every rank computes batches of ``batch_size`` samples, with the last one padded: matrix libraries sum in
    another order for other sizes, and logits must not depend on the number of ranks.

    Collective: all ranks take the same number of steps. The model is in training mode afterwards.

    Args:
        watch: is called with each batch.

    Raises:
        ValueError: the dense values of a batch are NaN or infinite.
    """
    model.eval()
    try:
        for batch in reader.batches(batch_size, rank=ranks.rank, world_size=ranks.size):
            if watch is not None:
                watch(batch)
            if not bool(batch.dense.isfinite().all()):  # training would end with a loss that is not finite
                raise ValueError("a batch to score has dense values that are NaN or infinite. Repair them.")
            whole = batch.padded(batch_size).to(ranks.device)
            with torch.no_grad():
                logits = forward(model, whole, ranks.device, bf16=bf16)
            yield Scored(batch.rows, logits[: len(batch)].cpu(), batch.labels)
    finally:
        model.train()


def evaluate(
    model: nn.Module, reader: "Reader", ranks: Ranks, *, bf16: bool = False, loss: Loss = DEFAULT_LOSS
) -> dict[str, float]:
    """Return the loss's metrics on all of ``reader``; for clicks those of `meshrec.metrics.binary_metrics`.

    Collective. The model is in training mode afterwards.

    Args:
        model: a model that is called as ``model(dense, sparse)``.
        reader: the samples, which are divided among the ranks.
        ranks: the ranks, from `join`.
        bf16: compute the dense part in bfloat16.
        loss: computes the metrics from outputs and labels.

    Returns:
        The metrics by name, equal on all ranks.
    """
    return loss.metrics(*outputs_of(model, reader, ranks, bf16=bf16), group=ranks.control)


def outputs_of(
    model: nn.Module, reader: "Reader", ranks: Ranks, *, bf16: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the logits and the labels of this rank's part of ``reader``. Collective."""
    found = list(score(model, reader, ranks, bf16=bf16))
    return torch.cat([each.logits_B for each in found]), torch.cat([each.labels_B for each in found])
