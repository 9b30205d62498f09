"""The agreement of ranks about gradients that are collected for the optimizer's step."""

import torch
from torch import nn

from meshrec.comms.collectives import all_reduce
from meshrec.comms.mesh import Axis


class GradientSignal:
    """Whether gradients were collected, and whether they are finite. All ranks agree, also those without
    tables.

    ``signal`` is a parameter for the optimizer's groups. Only its ``grad`` matters: None before the first
    backward pass and after ``zero_grad``; otherwise 0, or infinity if a gradient of some rank is not finite.
    A GradScaler, or a norm of gradients, thus comes to the same conclusion on all ranks.
    """

    def __init__(self, device: torch.device) -> None:
        self.signal = nn.Parameter(torch.zeros(1, device=device))

    def agree(self, finite: bool, axis: Axis) -> None:
        """Set the signal from the flags of all ranks of the axis. Collective."""
        signal = torch.full_like(self.signal, 0.0 if finite else torch.inf).detach()
        all_reduce(signal, axis, "finite gradients")
        self.signal.grad = signal
