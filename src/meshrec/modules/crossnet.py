"""Cross networks: products of features, one degree more with each layer.

Wang et al.: "DCN V2: Improved deep & cross network" (2021), equations 1 and 2.
"""

import torch
from torch import Tensor, nn


class CrossNet(nn.Module):
    """``x_{l+1} = x_0 * (W_l x_l + b_l) + x_l`` with square W_l.

    Args:
        in_features: columns of input and output.
        num_layers: how many crosses.
        device: where the parameters live.
    """

    def __init__(self, in_features: int, num_layers: int, device: torch.device | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(in_features, in_features, device=device) for _ in range(num_layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        """[B, in_features] -> [B, in_features]."""
        crossed = x
        for layer in self.layers:
            crossed = x * layer(crossed) + crossed
        return crossed


class LowRankCrossNet(nn.Module):
    """``x_{l+1} = x_0 * (W_l (V_l x_l) + b_l) + x_l`` with V_l from ``in_features`` to ``low_rank`` and W_l
    back.

    Args:
        in_features: columns of input and output.
        num_layers: how many crosses.
        low_rank: columns in between.
        device: where the parameters live.
    """

    def __init__(
        self, in_features: int, num_layers: int, low_rank: int = 1, device: torch.device | None = None
    ) -> None:
        super().__init__()
        if low_rank < 1:
            raise ValueError(f"low_rank must be 1 or more, got {low_rank}.")
        self.down = nn.ModuleList(
            nn.Linear(in_features, low_rank, bias=False, device=device) for _ in range(num_layers)
        )
        self.up = nn.ModuleList(nn.Linear(low_rank, in_features, device=device) for _ in range(num_layers))
        for layer in [*self.down, *self.up]:
            assert isinstance(layer, nn.Linear)
            if not layer.weight.is_meta:
                nn.init.xavier_normal_(layer.weight)

    def forward(self, x: Tensor) -> Tensor:
        """[B, in_features] -> [B, in_features]."""
        crossed = x
        for down, up in zip(self.down, self.up, strict=True):
            crossed = x * up(down(crossed)) + crossed
        return crossed
