"""What the ranks must agree on while gradients are collected for the optimizer's step."""

import torch
from torch import nn

from meshrec.comms.collectives import all_reduce
from meshrec.plan.mesh import Axis


class GradientSignal:
    """Whether gradients were collected, and whether they are finite: the same on every rank, also on those
    that hold nothing.

    ``signal``: a parameter for the optimizer's groups, of which only ``grad`` counts: None before the first
    backward pass and after ``zero_grad``, else 0, or infinite where a gradient of some rank is not finite.
    A GradScaler, and a norm of gradients, so come to one conclusion on all ranks.
    """

    def __init__(self, device: torch.device) -> None:
        self.signal = nn.Parameter(torch.zeros(1, device=device))

    def agree(self, finite: bool, axis: Axis) -> None:
        """Sets the signal from what every rank of the axis says. Collective."""
        signal = torch.full_like(self.signal, 0.0 if finite else torch.inf).detach()
        all_reduce(signal, axis, "finite gradients")
        self.signal.grad = signal
