"""Running metrics for training: cheap per step, and exchanged between ranks only in `MetricSet.compute`."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from meshrec.metrics.areas import auc_from_ties, average_precision, none_if_nan, valid_click_labels
from meshrec.metrics.binary import BinarySums, binary_sums, metrics_from_sums
from meshrec.metrics.gathering import check_values, drop_unweighted, stack_columns

if TYPE_CHECKING:
    from torchmetrics import Metric

NUM_SUMS = len(BinarySums._fields)
"""Number of sums at the start of the result of `click_sums`, in the field order of `BinarySums`."""
# Histograms cover logits in [-16, 16]. Other logits share the outermost bins; sigmoid(16) is 1 - 1e-7.
_MAX_LOGIT = 16.0
# Samples waiting for a histogram update: 1.5 MiB of float64 logits, labels and weights.
_MAX_PENDING = 1 << 16
# How far float32 rounding can move a probability outside [0, 1].
_TOLERANCE = 1e-6


class MetricValues(NamedTuple):
    """Result of ``MetricSet.compute``: metric values by name, for the last window and for the whole run."""

    window: dict[str, float]
    """Metrics over the samples since the previous ``compute``."""
    lifetime: dict[str, float]
    """Metrics over all samples in the run."""


class _ExtraMetric(NamedTuple):
    """Two copies of a torchmetrics metric, for the window and for the whole run."""

    window: "Metric"
    """Reset by every `MetricSet.compute`."""
    lifetime: "Metric"
    """Never reset."""


class MetricSet:
    """Running metrics for binary labels: AUC, and the metrics in `metrics_from_sums`.

    `compute` returns every metric twice: for the samples since the previous `compute` (the window), and for
    the whole run (lifetime). `update` only stores tensors. After 65,536 samples, or in `compute`, they are
    added to this rank's sums, and `compute` adds up the sums of all ranks in one all-reduce. The saved state
    is equal on all ranks, and a run with another number of ranks can load it. Metrics in torchmetrics instead
    save a state per rank, and need three collectives per state.

    AUC is approximate: it is computed from logit histograms, in which a positive and a negative sample in the
    same bin count as a tie. The error is at most half the share of such pairs, about 1e-5 for logits between
    -16 and 16.

    Args:
        num_bins: number of equal histogram bins for logits from -16 to 16.
        auprc: whether to compute ``auprc``, too: the area under the precision-recall curve, from the
            histograms.
        extra: further metrics from torchmetrics, by name. They are updated with probabilities, and with
            labels truncated to integers. Samples with weight 0 are left out, and other weights are ignored.
            They synchronize ranks themselves.
        device: device for the sums.
        group: process group; None: all ranks, if a process group is initialized.

    Raises:
        ValueError: fewer than 2 bins.

    Example::

        metrics = MetricSet()
        metrics.update(torch.tensor([-1.0, 2.0]), torch.tensor([0.0, 1.0]))
        assert metrics.compute().window["auc"] == 1.0
    """

    def __init__(
        self,
        *,
        num_bins: int = 16384,
        auprc: bool = False,
        extra: Mapping[str, "Metric"] | None = None,
        device: torch.device | str = "cpu",
        group: dist.ProcessGroup | None = None,
    ) -> None:
        if num_bins < 2:
            raise ValueError(f"num_bins must be >= 2, got {num_bins}.")
        self._num_bins = num_bins
        self._auprc = auprc
        self._group = group
        # The BinarySums fields, then the positive and the negative histogram, float64: this rank's sums since
        # the last `compute`, and the sums over all ranks until then.
        self._window = torch.zeros(NUM_SUMS + 2 * num_bins, dtype=torch.float64, device=device)
        self._lifetime = torch.zeros_like(self._window)
        # Logits, labels and weights [3, n] per update, and their total sample count; emptied by _flush().
        self._pending: list[Tensor] = []
        self._num_pending = 0
        self._extra = {
            # Clones, so the caller's metric is not modified.
            name: _ExtraMetric(metric.clone().to(device), metric.clone().to(device))
            for name, metric in (extra or {}).items()
        }

    def update(self, logits: Tensor, labels: Tensor, weights: Tensor | None = None) -> None:
        """Add the samples in a batch on this rank. Not collective.

        Args:
            logits: [B] or [B, 1], floating-point.
            labels: same size, in [0, 1].
            weights: sample weights [B]; None: 1.

        Raises:
            ValueError: sizes differ, or a label or weight is not allowed.
        """
        columns = stack_columns(logits, labels, weights=weights)
        self._pending.append(drop_unweighted(columns, *valid_click_labels(columns)))
        self._num_pending += labels.numel()
        if self._num_pending >= _MAX_PENDING:
            self._flush()

    def update_probabilities(
        self, probabilities: Tensor, labels: Tensor, weights: Tensor | None = None
    ) -> None:
        """Add the samples in a batch on this rank, for a model that predicts probabilities. Not collective.

        Args:
            probabilities: [B] or [B, 1], in [0, 1] up to float32 rounding; clamped to [1e-12, 1 - 1e-12].
            labels: same size, in [0, 1].
            weights: sample weights [B]; None: 1.

        Raises:
            ValueError: sizes differ, or a probability, label or weight is not allowed.
        """
        probabilities_n = probabilities.detach().double().reshape(-1)
        inside = (probabilities_n > -_TOLERANCE) & (probabilities_n < 1 + _TOLERANCE)
        check_values(
            "probabilities",
            probabilities_n,
            inside | probabilities_n.isnan(),
            "in [0, 1]. Pass logits to update",
        )
        # A probability of exactly 0 or 1 would have an infinite logit.
        self.update(torch.logit(probabilities_n, eps=1e-12), labels, weights)

    def compute(self) -> MetricValues:
        """Compute all metrics over all ranks, and start a new window. Collective.

        Undefined metrics are omitted: AUC and AUPRC if all labels are equal, and all metrics without samples.
        With a NaN logit, all are NaN.
        """
        # Samples that were added and not summed yet.
        self._flush()
        window, self._window = self._window, torch.zeros_like(self._window)
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(window, group=self._group)
        self._lifetime += window
        computed = MetricValues(
            *(click_metrics(sums, self._num_bins, auprc=self._auprc) for sums in (window, self._lifetime))
        )
        for name, extra in self._extra.items():
            for metrics, metric in zip(computed, extra, strict=True):
                if metrics:
                    metrics[name] = float(metric.compute())
            extra.window.reset()
        return computed

    def state_dict(self) -> dict[str, Any]:
        """Return the sums for the whole run up to the last `compute`, equal on all ranks.

        Call `compute` first, to include the last samples. The state of ``extra`` metrics is not included.
        """
        return {"lifetime": self._lifetime.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the sums for the whole run, on any number of ranks, and drop the samples in the window.

        Args:
            state: result from `state_dict`.

        Raises:
            ValueError: the state has a different ``num_bins``.
        """
        sums = state["lifetime"]
        if sums.numel() == NUM_SUMS - 1 + 2 * self._num_bins:  # saved before there was a sum of negatives
            old, bins = sums[: NUM_SUMS - 1], sums[NUM_SUMS - 1 :]
            sums = torch.cat([old, old[:1] - old[1:2], bins])
        if sums.shape != self._lifetime.shape:
            raise ValueError(
                f"the saved metrics have {sums.numel()} sums, these have {self._lifetime.numel()}. Use the "
                f"num_bins they were saved with: these have {self._num_bins}."
            )
        self._lifetime.copy_(sums)
        # Checkpoints have no window, which belongs to the process that saved it.
        self._window.zero_()
        self._pending, self._num_pending = [], 0

    def _flush(self) -> None:
        """Add the pending samples to the sums of the window."""
        if not self._num_pending:
            return
        logits, labels, weights = torch.cat(self._pending, dim=1).to(self._window.device)
        self._pending, self._num_pending = [], 0
        self._window += click_sums(logits, labels, weights, self._num_bins)
        for extra in self._extra.values():
            for metric in extra:
                metric.update(torch.sigmoid(logits), labels.long())


def click_sums(logits_n: Tensor, labels_n: Tensor, weights_n: Tensor, num_bins: int) -> Tensor:
    """Compute sums for n samples, from which `click_metrics` computes metrics.

    Args:
        logits_n: logits, float64.
        labels_n: labels, float64, in [0, 1].
        weights_n: sample weights, float64, above 0.
        num_bins: number of equal histogram bins for logits from -16 to 16.

    Returns:
        The fields of `BinarySums`, and the logit histograms of positive and of negative samples,
        float64 [NUM_SUMS + 2 * num_bins].
    """
    # torchmetrics' BinaryAUROC compares every sample with every threshold. For 2048 samples on one core
    # it takes 13 ms with 200 thresholds (AUC error 2e-4), and 2.6 s with 16384; this takes 0.2 ms (5e-7).
    scaled = (logits_n + _MAX_LOGIT) * (num_bins / (2 * _MAX_LOGIT))
    # A NaN logit is put into any bin: the loss shows it, see `click_metrics`.
    bins = scaled.nan_to_num(0.0).clamp(0, num_bins - 1).long()
    positive = torch.bincount(bins, weights_n * labels_n, minlength=num_bins)
    negative = torch.bincount(bins, weights_n * (1 - labels_n), minlength=num_bins)
    return torch.cat([binary_sums(logits_n, labels_n, weights_n), positive, negative])


def click_metrics(sums: Tensor, num_bins: int, *, auprc: bool = False) -> dict[str, float]:
    """Compute metrics from the sums of `click_sums` over all samples; see `MetricSet`.

    Args:
        sums: the sums, [NUM_SUMS + 2 * num_bins].
        num_bins: as for `click_sums`.
        auprc: whether to compute the area under the precision-recall curve, too.
    """
    metrics = metrics_from_sums(BinarySums(*sums[:NUM_SUMS].tolist()))
    histograms = sums[NUM_SUMS:].view(2, num_bins).cpu().numpy()
    (area,) = auc_from_ties(*histograms)
    auc = none_if_nan(area)
    if auc is None:
        return metrics
    areas = {"auc": auc} | ({"auprc": average_precision(*histograms)} if auprc else {})
    # Histograms hide NaN logits, but the loss does not.
    return (dict.fromkeys(areas, math.nan) if math.isnan(metrics["loss"]) else areas) | metrics
