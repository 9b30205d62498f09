"""Learning-rate schedules, which apply to tables and dense parameters alike."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Multiplier for all learning rates: a linear warmup from near 0, then a decay until the last step."""

    warmup_steps: int = 0
    """Number of warmup steps."""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate decay after the warmup."""
    final: float = 0.0
    """Share of the learning rates in the last step, in [0, 1]."""

    def __post_init__(self) -> None:
        if self.warmup_steps < 0:
            raise ValueError(f"schedule.warmup_steps is {self.warmup_steps}; it must not be negative.")
        if not 0 <= self.final <= 1:
            raise ValueError(f"schedule.final is {self.final}; it is a fraction in [0, 1].")

    def multiplier(self, step: int, num_steps: int) -> float:
        """Return the multiplier for ``step`` in ``[0, num_steps)``."""
        if step < self.warmup_steps:
            # Step 0 already trains, and the first step after the warmup has the full rate.
            return (step + 1) / (self.warmup_steps + 1)
        if self.decay == "constant":
            return 1.0
        progress = min(1.0, (step - self.warmup_steps) / max(1, num_steps - 1 - self.warmup_steps))
        left = 1 - progress if self.decay == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
        return self.final + (1 - self.final) * left


class LearningRates:
    """Sets the learning rates of optimizers to a function of the step alone, so a resume needs no state.

    Args:
        optimizers: the optimizers. Current learning rates correspond to multiplier 1.
        schedule: the schedule.
        num_steps: number of steps in the whole run.
    """

    def __init__(
        self, optimizers: Iterable[torch.optim.Optimizer], schedule: Schedule, num_steps: int
    ) -> None:
        # Base rates from the recipe. The multiplier applies to these, so the rates depend on the step alone.
        self._groups = [
            (group, float(group["lr"])) for optimizer in optimizers for group in optimizer.param_groups
        ]
        self._schedule, self._num_steps = schedule, num_steps

    def set(self, step: int) -> float:
        """Set the learning rates for ``step``; return the multiplier."""
        multiplier = self._schedule.multiplier(step, self._num_steps)
        for group, rate in self._groups:
            group["lr"] = rate * multiplier
        return multiplier
