"""Estimate of item frequencies in a stream of batches, for the correction in in-batch losses.

This is algorithm 2 in Yi et al., "Sampling-bias-corrected neural modeling for large corpus item
recommendations" (2019). Here every item has an estimate, while the paper hashes items into buckets.
"""

import torch
from torch import Tensor, nn

# I items, B batch


class ItemFrequency(nn.Module):
    """Module that estimates the share of samples with an item, from the intervals between occurrences.

    If an item occurs in every n-th sample on average, the share is 1 / n. The average is the mean over the
    first ``1 / rate`` batches with the item, and a moving mean afterwards, so it follows changing data. An
    item that has not occurred in the S samples so far gets the share 1 / (S + 1), as if the next sample had
    it.

    Args:
        num_items: Items I; IDs are in [0, I).
        rate: Weight of the newest interval in the moving mean, in (0, 1]; alpha in the paper.
        device: Device for the estimates, which need 20 bytes per item.

    Raises:
        ValueError: ``num_items`` is below 1, or the rate is not in (0, 1].
    """

    num_samples: Tensor  # samples so far, int64
    last_seen: Tensor  # num_samples at the last occurrence, int64 [I]
    num_seen: Tensor  # batches with the item, int32 [I]
    distance: Tensor  # mean interval between occurrences in samples, float64 [I]

    def __init__(self, num_items: int, *, rate: float = 0.01, device: torch.device | None = None) -> None:
        super().__init__()
        if num_items < 1 or not 0 < rate <= 1:
            raise ValueError(
                f"num_items must be at least 1 and rate in (0, 1], got {num_items} items and rate {rate}."
            )
        self._rate = rate
        # Buffers, so that checkpoints keep the counts.
        self.register_buffer("num_samples", torch.zeros((), dtype=torch.int64, device=device))
        self.register_buffer("last_seen", torch.zeros(num_items, dtype=torch.int64, device=device))
        self.register_buffer("num_seen", torch.zeros(num_items, dtype=torch.int32, device=device))
        self.register_buffer("distance", torch.zeros(num_items, dtype=torch.float64, device=device))

    @torch.no_grad()
    def forward(self, ids_B: Tensor) -> Tensor:
        """Return the logarithm of every item's share of samples, float32 [B].

        In training mode, update the shares with this batch first.

        Args:
            ids_B: Item IDs in the batch.
        """
        if self.training:
            self._update(ids_B)
        # Interval of an unseen item: as if it came next.
        share = torch.where(self.num_seen[ids_B] > 0, self.distance[ids_B], self.num_samples + 1.0)
        return -share.log().float()

    def _update(self, ids_B: Tensor) -> None:
        """Update the mean interval between occurrences for all items in a batch."""
        self.num_samples += len(ids_B)
        # Unique items, because assignment by duplicate index is nondeterministic.
        items, counts = ids_B.unique(return_counts=True)
        # k occurrences in this batch divide the time since the item's last batch into k intervals.
        interval = (self.num_samples - self.last_seen[items]).double() / counts
        num_seen = self.num_seen[items] + 1
        # 1 / n gives the plain mean until n reaches 1 / rate; from then on the mean forgets.
        weight = (1.0 / num_seen).clamp(min=self._rate)
        self.distance[items] = torch.lerp(self.distance[items], interval, weight.double())
        self.last_seen[items] = self.num_samples
        self.num_seen[items] = num_seen
