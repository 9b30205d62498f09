"""Compute scores and metrics over all ranks, for recent training steps and for evaluation data."""

from collections.abc import Callable, Iterator, Sequence
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
"""Maximum batch size for evaluations: samples per rank and step."""


class OutputWindow:
    """Collector of the model outputs of training steps, from which training metrics are computed.

    Args:
        loss: the recipe's loss, which computes the metrics.
    """

    def __init__(self, loss: Loss = DEFAULT_LOSS) -> None:
        self._loss = loss
        # Detached outputs since the last `take`, which clears them.
        self._outputs: list[Outputs] = []

    @property
    def is_empty(self) -> bool:
        """Whether the window has no outputs."""
        return not self._outputs

    def add(self, outputs: list[Outputs]) -> None:
        """Add the outputs of a training step."""
        # Without the samples, which would need much more memory.
        self._outputs += [output._replace(batch=None) for output in outputs]

    def take(self, ranks: Ranks) -> dict[str, float]:
        """Return metrics over the collected samples on all ranks, and clear the window. Collective."""
        # Clear the window first, so that an error does not count outputs twice.
        outputs, self._outputs = self._outputs, []
        logits = torch.cat([output.logits for output in outputs]).cpu()
        labels = torch.cat([output.labels for output in outputs]).cpu()
        weights = concat_weights([(output.weights, len(output.labels)) for output in outputs])
        return self._loss.metrics(logits, labels, weights, group=ranks.control)


def concat_weights(parts: Sequence[tuple[Tensor | None, int]]) -> Tensor | None:
    """Concatenate the sample weights of several batches, on the CPU."""
    if all(weights is None for weights, _ in parts):
        return None
    return torch.cat([torch.ones(size) if weights is None else weights.cpu() for weights, size in parts])


class Scored(NamedTuple):
    """Model outputs for samples, with their labels, on the CPU.

    Attributes:
        rows_B: row number of every sample in the data, [B] (see `meshrec.data.Reader.files`); None if the
            reader does not number rows.
        logits_B: model outputs, [B], or [B, T] for T tasks or classes.
        labels_B: labels, [B] or [B, T]; NaN if the data has none.
        weights_B: sample weights, [B]; None: all weights are 1.
    """

    rows_B: Tensor | None
    logits_B: Tensor
    labels_B: Tensor
    weights_B: Tensor | None = None

    @classmethod
    def concat(cls, parts: "Sequence[Scored]") -> "Scored":
        """Concatenate the samples from several batches or ranks."""
        # Readers either number all rows or none.
        rows = [part.rows_B for part in parts if part.rows_B is not None]
        return cls(
            torch.cat(rows) if rows else None,
            torch.cat([part.logits_B for part in parts]),
            torch.cat([part.labels_B for part in parts]),
            concat_weights([(part.weights_B, len(part.labels_B)) for part in parts]),
        )


def score(
    model: nn.Module,
    reader: "Reader",
    ranks: Ranks,
    *,
    batch_size: int = EVALUATION_BATCH,
    watch: "Callable[[Batch], None] | None" = None,
) -> Iterator[Scored]:
    """Compute logits for this rank's share of the samples, in reader order, a batch at a time.

    Collective: all ranks take the same number of steps. Every batch is padded to ``batch_size`` samples if it
    has fewer. Matrix libraries sum in another order at another size, and the logits must not depend on the
    number of ranks. The model is in training mode afterwards.

    Args:
        model: a model called as ``model(dense, sparse)``.
        reader: the samples, which are divided among the ranks.
        ranks: the ranks, from `join`.
        batch_size: samples per rank and step.
        watch: called with every batch before it is scored.

    Yields:
        The outputs, labels and weights of the samples in a batch, without the padding.

    Raises:
        ValueError: a batch has NaN or infinite dense values.
    """
    model.eval()
    try:
        for batch in reader.batches(batch_size, rank=ranks.rank, world_size=ranks.size):
            if watch is not None:
                watch(batch)
            if not bool(batch.dense.isfinite().all()):  # training would end with a loss that is not finite
                raise ValueError("a batch to score has dense values that are NaN or infinite. Repair them.")
            logits = padded_logits(model, batch, batch_size, ranks)
            yield Scored(batch.rows, logits, batch.labels, batch.weights)
    finally:
        model.train()


@torch.no_grad()
def padded_logits(
    model: nn.Module, batch: "Batch", batch_size: int, ranks: Ranks, *, bf16: bool = False
) -> Tensor:
    """Compute the logits for a batch after padding it to ``batch_size`` samples; return them on the CPU.

    With padding, shapes are equal on every rank, so logits do not depend on the number of ranks. The logits
    of the padding are cut off.

    Args:
        model: a model called as ``model(dense, sparse)``.
        batch: at most ``batch_size`` samples.
        batch_size: number of samples including the padding.
        ranks: the ranks, from `join`.
        bf16: whether to compute the dense part in bf16.
    """
    whole = batch.padded(batch_size).to(ranks.device)
    return forward(model, whole, ranks.device, bf16=bf16)[: len(batch)].cpu()


def evaluate(
    model: nn.Module, reader: "Reader", ranks: Ranks, *, loss: Loss = DEFAULT_LOSS
) -> dict[str, float]:
    """Evaluate a model on all samples of a reader. Collective.

    The loss determines the metrics: for clicks, those of `meshrec.metrics.binary_metrics`. The model is in
    training mode afterwards.

    Args:
        model: a model called as ``model(dense, sparse)``.
        reader: the samples, which are divided among the ranks.
        ranks: the ranks, from `join`.
        loss: the recipe's loss, which computes metrics from outputs and labels.

    Returns:
        Metrics by name, equal on all ranks.
    """
    return loss.metrics(*outputs_of(model, reader, ranks), group=ranks.control)


def outputs_of(model: nn.Module, reader: "Reader", ranks: Ranks) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return logits, labels and sample weights for this rank's share of a reader's samples. Collective.

    Args:
        model: a model called as ``model(dense, sparse)``.
        reader: the samples, which are divided among the ranks.
        ranks: the ranks, from `join`.
    """
    scored = Scored.concat(list(score(model, reader, ranks)))
    return scored.logits_B, scored.labels_B, scored.weights_B


def evaluation_batch_size(reader: "Reader") -> int:
    """Return the batch size per rank for evaluations during training.

    The size is `EVALUATION_BATCH`. If the reader has fewer samples, it is the sample count rounded up to a
    power of two. The size does not depend on the number of ranks, so neither do the logits; see `score`.
    """
    return min(EVALUATION_BATCH, 1 << max(reader.num_samples - 1, 0).bit_length())
