"""Streaming estimate of how often each item occurs in the data.

After Yi et al., "Sampling-bias-corrected neural modeling for large corpus item recommendations" (2019),
algorithm 2, with one counter per item where the paper hashes items into buckets.
"""

import torch
from torch import Tensor, nn

# I items, B batch


class ItemFrequency(nn.Module):
    """Share of the samples that belong to each item, estimated from the distance between its occurrences.

    The distance is the plain mean of an item's first occurrences and a moving mean afterwards, so that the
    estimate follows data that changes. An item that was never seen counts as if it came next.

    Args:
        num_items: number of items I; IDs lie in [0, I).
        rate: weight of the newest distance in the moving mean, in (0, 1]; the paper's alpha.
        device: device of the estimates, which take 20 bytes per item.

    Raises:
        ValueError: there is no item, or the rate is not in (0, 1].
    """

    num_samples: Tensor
    last_seen: Tensor
    num_seen: Tensor
    distance: Tensor

    def __init__(self, num_items: int, *, rate: float = 0.01, device: torch.device | None = None) -> None:
        super().__init__()
        if num_items < 1 or not 0 < rate <= 1:
            raise ValueError(
                f"num_items must be at least 1 and rate in (0, 1], got {num_items} items and rate {rate}."
            )
        self._rate = rate
        self.register_buffer("num_samples", torch.zeros((), dtype=torch.int64, device=device))
        self.register_buffer("last_seen", torch.zeros(num_items, dtype=torch.int64, device=device))
        self.register_buffer("num_seen", torch.zeros(num_items, dtype=torch.int32, device=device))
        self.register_buffer("distance", torch.zeros(num_items, dtype=torch.float64, device=device))

    @torch.no_grad()
    def forward(self, ids_B: Tensor) -> Tensor:
        """Return the log of each item's share of the samples, [B] in float32. In training mode, count the
        batch first.
        """
        if self.training:
            self._see(ids_B)
        share = torch.where(self.num_seen[ids_B] > 0, self.distance[ids_B], self.num_samples + 1.0)
        return -share.log().float()

    def _see(self, ids_B: Tensor) -> None:
        self.num_samples += len(ids_B)
        items, counts = ids_B.unique(return_counts=True)
        # An item that is in a batch k times came k times since the last batch that had it.
        newest = (self.num_samples - self.last_seen[items]).double() / counts
        seen = self.num_seen[items] + 1
        weight = (1.0 / seen).clamp(min=self._rate)
        self.distance[items] = torch.lerp(self.distance[items], newest, weight.double())
        self.last_seen[items] = self.num_samples
        self.num_seen[items] = seen
