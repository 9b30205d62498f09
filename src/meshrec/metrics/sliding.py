"""Metrics for binary labels over sliding windows in event time, with bounded memory."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from meshrec.metrics.areas import valid_click_labels
from meshrec.metrics.binary import BinarySums
from meshrec.metrics.gathering import drop_unweighted, stack_columns
from meshrec.metrics.metric_set import NUM_SUMS, click_metrics, click_sums

# Slots per window. A window ends with the newest slot, so its length varies by one slot: under 2 %.
_NUM_SLOTS = 60
_NUM_BINS = 4096
"""Histogram bins for logits: a window takes 4 MB. See `MetricSet` for the error of AUC."""
_MAX_PENDING = 1 << 16

_Slots = dict[int, Tensor]
"""Sums of `click_sums` by slot number, float64. Slots before the window have only the first `NUM_SUMS`."""


class SlidingMetrics:
    """Metrics for binary labels over sliding windows in event time: AUC, log loss, calibration and others.

    Time is divided into slots, and a window has the newest 60 of them. The end of a window is the newest
    event on any rank. Events before the window do not count, and leave no trace in the next windows.

    Metrics are those of `metrics_from_sums`, but the normalized entropy is the log loss divided by the log
    loss of a model that always predicts the mean label of the window before. Unlike the mean label of the
    window itself, this rate is known before the events happen.

    Args:
        windows: length of the windows in seconds, by name, such as ``{"hour": 3600}``.

    Example::

        metrics = SlidingMetrics({"hour": 3600})
        logits, labels, times = torch.tensor([-1.0, 2.0]), torch.tensor([0.0, 1.0]), torch.tensor([0, 1])
        metrics.add(logits, labels, None, times)
        assert metrics.compute(lambda value: [value])["auc@hour"] == 1.0
    """

    def __init__(self, windows: Mapping[str, int]) -> None:
        self._windows = {
            name: _Window(seconds * 1_000_000 // _NUM_SLOTS) for name, seconds in windows.items()
        }
        # Columns [3, n] of `stack_columns` and times [n] of samples in no slot yet, and their number.
        self._pending: list[tuple[Tensor, Tensor]] = []
        self._num_pending = 0

    def add(self, logits: Tensor, labels: Tensor, weights: Tensor | None, times: Tensor) -> None:
        """Add samples of this rank. Not collective.

        Args:
            logits: [B].
            labels: [B], in [0, 1].
            weights: sample weights [B]; None: 1.
            times: event times in microseconds since 1970, int64 [B].

        Raises:
            ValueError: sizes differ, or a label or weight is not allowed.
        """
        self._pending.append((stack_columns(logits, labels, weights=weights).cpu(), times))
        self._num_pending += len(times)
        if self._num_pending >= _MAX_PENDING:
            self._flush()

    def compute(self, collect: Callable[[Any], list[Any]]) -> dict[str, float]:
        """Compute the metrics over all ranks, for samples until now. Collective.

        Args:
            collect: function that returns the values of all ranks, such as ``Ranks.collect``.

        Returns:
            Metrics by name and window, such as ``auc@hour``, equal on all ranks. Undefined ones are omitted.
        """
        self._flush()
        parts = collect({name: window.take() for name, window in self._windows.items()})
        metrics: dict[str, float] = {}
        for name, window in self._windows.items():
            for part in parts:
                window.merge(part[name])
            metrics |= {f"{metric}@{name}": value for metric, value in window.metrics().items()}
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """Return the windows until the last `compute`, equal on all ranks."""
        return {name: window.state_dict() for name, window in self._windows.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the windows, on any number of ranks. Windows with another name are ignored."""
        for name, window in self._windows.items():
            if name in state:
                window.load_state_dict(state[name])

    def _flush(self) -> None:
        """Add the pending samples to this rank's slots."""
        pending, self._pending, self._num_pending = self._pending, [], 0
        if not pending:
            return
        columns, times = (torch.cat(parts, dim=-1) for parts in zip(*pending, strict=True))
        # The times as a column, so that both lose the samples with weight 0.
        columns = torch.cat([times.view(torch.float64)[None], columns])
        times_n, *columns_n = drop_unweighted(columns, *valid_click_labels(columns))
        for window in self._windows.values():
            window.add(torch.stack(columns_n), times_n.contiguous().view(torch.int64))


class _Window:
    """Sliding window.

    Args:
        slot: length of a slot in microseconds.
    """

    def __init__(self, slot: int) -> None:
        self._slot = slot
        # Sums over all ranks until the last `merge`, and this rank's sums since the last `take`.
        self._slots: _Slots = {}
        self._local: _Slots = {}

    def add(self, columns: Tensor, times: Tensor) -> None:
        """Add samples of this rank.

        Args:
            columns: logits, labels and weights, float64 [3, n].
            times: event times in microseconds, int64 [n].
        """
        if not len(times):
            return
        slots = times // self._slot
        first = max(max(self._slots, default=0), int(slots.max())) - 2 * _NUM_SLOTS + 1
        for slot in slots.unique().tolist():
            if slot >= first:
                logits, labels, weights = columns[:, slots == slot]
                sums = click_sums(logits, labels, weights, _NUM_BINS)
                self._local[slot] = sums if slot not in self._local else self._local[slot] + sums
        _drop_old(self._local)

    def take(self) -> _Slots:
        """Return this rank's sums since the last call."""
        taken, self._local = self._local, {}
        return taken

    def merge(self, part: _Slots) -> None:
        """Add the sums of a rank."""
        for slot, sums in part.items():
            before = self._slots.get(slot)
            num = len(sums) if before is None else min(len(sums), len(before))
            self._slots[slot] = sums[:num] if before is None else before[:num] + sums[:num]
        _drop_old(self._slots)

    def metrics(self) -> dict[str, float]:
        """Compute the metrics of the window; empty without samples."""
        newest = max(self._slots, default=0)
        now = [sums for slot, sums in self._slots.items() if slot > newest - _NUM_SLOTS]
        if not now:
            return {}
        # In the order of slots, so that the result does not depend on the order in which they were added.
        total = torch.stack(now).sum(0)
        metrics = {**click_metrics(total, _NUM_BINS), "samples": float(total[0])}
        metrics.pop("normalized_entropy", None)
        earlier = [sums for slot, sums in self._slots.items() if slot <= newest - _NUM_SLOTS]
        if earlier and "loss" in metrics:
            entropy = _entropy(BinarySums(*total[:NUM_SUMS].tolist()), torch.stack(earlier).sum(0))
            if entropy:
                metrics["normalized_entropy"] = metrics["loss"] / entropy
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """Return the sums over all ranks."""
        slots = sorted(self._slots)
        sums = torch.cat([torch.zeros(0, dtype=torch.float64), *(self._slots[slot] for slot in slots)])
        # Most bins are empty.
        index = sums.nonzero().squeeze(1)
        return {
            "slot": self._slot,
            "slots": slots,
            "sizes": [len(self._slots[slot]) for slot in slots],
            "index": index,
            "values": sums[index],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the sums, unless they are of slots of another length."""
        self._local = {}
        if state["slot"] == self._slot:
            sums = torch.zeros(sum(state["sizes"]), dtype=torch.float64)
            sums[state["index"]] = state["values"]
            parts = (part.clone() for part in sums.split(state["sizes"]))
            self._slots = dict(zip(state["slots"], parts, strict=True))


def _drop_old(slots: _Slots) -> None:
    """Drop the slots before the two newest windows, and the histograms of those before the newest window."""
    newest = max(slots, default=0)
    for slot in sorted(slots):
        if slot <= newest - 2 * _NUM_SLOTS:
            del slots[slot]
        elif slot <= newest - _NUM_SLOTS:
            slots[slot] = slots[slot][:NUM_SUMS].clone()
        else:
            break


def _entropy(sums: BinarySums, earlier: Tensor) -> float | None:
    """Return the log loss of a model that predicts an earlier mean label; None if it is 0 or 1."""
    before = BinarySums(*earlier[:NUM_SUMS].tolist())
    if not before.labels > 0 or not before.negatives > 0:
        return None
    rate, negative_rate = before.labels / before.weight, before.negatives / before.weight
    return -(sums.labels * math.log(rate) + sums.negatives * math.log(negative_rate)) / sums.weight
