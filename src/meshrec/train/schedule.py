"""Learning rates over time, for tables and dense parts alike."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A multiplier of every learning rate: a linear warmup from near 0, then a decay to the last step."""

    warmup_steps: int = 0
    """Steps of linear warmup."""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    """How rates fall after the warmup."""
    final: float = 0.0
    """What is left of the rates in the last step, as a fraction."""

    def __post_init__(self) -> None:
        if self.warmup_steps < 0:
            raise ValueError(f"schedule.warmup_steps is {self.warmup_steps}; it must not be negative.")
        if not 0 <= self.final <= 1:
            raise ValueError(f"schedule.final is {self.final}; it is a fraction in [0, 1].")

    def multiplier(self, step: int, num_steps: int) -> float:
        """For ``step`` of ``[0, num_steps)``."""
        if step < self.warmup_steps:
            return (step + 1) / (self.warmup_steps + 1)
        if self.decay == "constant":
            return 1.0
        done = min(1.0, (step - self.warmup_steps) / max(1, num_steps - 1 - self.warmup_steps))
        left = 1 - done if self.decay == "linear" else 0.5 * (1 + math.cos(math.pi * done))
        return self.final + (1 - self.final) * left


class LearningRates:
    """Sets the rates of optimizers ahead of a step; a function of the step alone, so it has no state.

    Args:
        optimizers: their groups' rates as they are now count as multiplier 1.
        num_steps: of the whole run.
    """

    def __init__(
        self, optimizers: Iterable[torch.optim.Optimizer], schedule: Schedule, num_steps: int
    ) -> None:
        self._groups = [(group, float(group["lr"])) for each in optimizers for group in each.param_groups]
        self._schedule, self._num_steps = schedule, num_steps

    def set(self, step: int) -> float:
        """Sets the rates for ``step``; returns the multiplier."""
        multiplier = self._schedule.multiplier(step, self._num_steps)
        for group, rate in self._groups:
            group["lr"] = rate * multiplier
        return multiplier
