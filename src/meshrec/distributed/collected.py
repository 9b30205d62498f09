"""Agreement between ranks on gradients collected for the optimizer step."""

import torch
from torch import nn

from meshrec.comms.collectives import all_reduce
from meshrec.comms.mesh import Axis


class GradientSignal:
    """Collective flag for collected gradients: present or absent, finite or not.

    All ranks agree, including ranks without tables. ``signal`` is a parameter for the optimizer's groups.
    Only ``signal.grad`` matters: None before the first backward pass and after ``zero_grad``; otherwise 0, or
    infinity if some rank has a non-finite gradient. A GradScaler or a gradient norm thus decides alike on all
    ranks.
    """

    def __init__(self, device: torch.device) -> None:
        self.signal = nn.Parameter(torch.zeros(1, device=device))

    def agree(self, finite: bool, axis: Axis) -> None:
        """Set the signal from the flags on all ranks in the axis. Collective."""
        signal = torch.full_like(self.signal, 0.0 if finite else torch.inf).detach()
        all_reduce(signal, axis, "finite gradients")
        self.signal.grad = signal
