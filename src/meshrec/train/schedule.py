"""Learning rate schedules, which apply to tables and dense parameters alike."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Learning rate schedule: a linear warmup from near 0, and then a decay until the last step."""

    warmup_steps: int = 0
    """Number of warmup steps."""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate decay after the warmup."""
    final: float = 0.0
    """Learning rate in the last step, as a share of the full rate, in [0, 1]."""

    def __post_init__(self) -> None:
        if self.warmup_steps < 0:
            raise ValueError(f"schedule.warmup_steps is {self.warmup_steps}; it must not be negative.")
        if not 0 <= self.final <= 1:
            raise ValueError(f"schedule.final is {self.final}; it is a fraction in [0, 1].")

    def multiplier(self, step: int, num_steps: int) -> float:
        """Return the factor by which learning rates are multiplied in a step.

        Args:
            step: step, in ``[0, num_steps)``.
            num_steps: steps in the whole run.
        """
        if step < self.warmup_steps:
            # Step 0 already trains, and the first step after the warmup has the full rate.
            return (step + 1) / (self.warmup_steps + 1)
        if self.decay == "constant":
            return 1.0
        progress = min(1.0, (step - self.warmup_steps) / max(1, num_steps - 1 - self.warmup_steps))
        # Falls from 1 to 0 during the decay.
        left = 1 - progress if self.decay == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
        return self.final + (1 - self.final) * left


class LearningRates:
    """Learning rates of optimizers, set according to a schedule.

    The rates depend on the step only, so nothing needs to be stored in checkpoints.

    Args:
        optimizers: the optimizers. Their current learning rates are the full rates.
        schedule: the schedule.
        num_steps: steps in the whole run.
    """

    def __init__(
        self, optimizers: Iterable[torch.optim.Optimizer], schedule: Schedule, num_steps: int
    ) -> None:
        # Full rates from the recipe. The factor applies to these, and not to the rates of the previous step.
        self._groups = [
            (group, float(group["lr"])) for optimizer in optimizers for group in optimizer.param_groups
        ]
        self._schedule, self._num_steps = schedule, num_steps

    def set(self, step: int) -> float:
        """Set the learning rates for a step, and return the factor relative to the full rates."""
        multiplier = self._schedule.multiplier(step, self._num_steps)
        for group, rate in self._groups:
            group["lr"] = rate * multiplier
        return multiplier
