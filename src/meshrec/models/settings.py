"""Model settings that are selected on validation data, because training data would select wrong values."""

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor, nn


class SelectedSettings(nn.Module):
    """Base class for modules with a few settings that are selected on validation data instead of trained.

    Checkpoints have the settings, as the buffer ``chosen``. If a class has ``candidates``, every evaluation
    on validation data selects the settings again.

    Args:
        initial: Value per setting, one of its candidates if the class has any.
        device: Device for the settings.
    """

    candidates: ClassVar[tuple[tuple[float, ...], ...]] = ()
    """Values that `choose` tries, ascending, per setting. Float32 must be able to represent them exactly."""
    chosen: Tensor  # float32, a value per setting; `copy_settings` replaces them by those of another model

    def __init__(self, initial: tuple[float, ...], *, device: torch.device | None = None) -> None:
        super().__init__()
        self.register_buffer("chosen", torch.tensor(initial, device=device))

    def choose(self, quality: Callable[[], float]) -> None:
        """Select the best value for one setting after the other, and store the values in ``chosen``.

        The search is hill climbing from the current values over ``candidates``.

        Args:
            quality: Function that evaluates the model with the current ``chosen``; higher is better.
        """
        for number, choices in enumerate(self.candidates):
            # Neighbors of the current value only: every candidate costs an evaluation.
            at = choices.index(float(self.chosen[number]))
            qualities: dict[int, float] = {}
            while True:
                for candidate in range(max(at - 1, 0), min(at + 2, len(choices))):
                    if candidate not in qualities:
                        self.chosen[number] = choices[candidate]
                        qualities[candidate] = quality()
                # The current one wins ties.
                best = max(qualities, key=lambda candidate: (qualities[candidate], candidate == at))
                if best == at:
                    break
                at = best
            self.chosen[number] = choices[at]


def copy_settings(source: nn.Module, target: nn.Module) -> None:
    """Copy all `SelectedSettings` to a model with the same architecture, which may rank other items."""
    copies = dict(target.named_modules())
    for name, module in source.named_modules():
        if isinstance(module, SelectedSettings):
            copy = copies[name]
            assert isinstance(copy, SelectedSettings)
            copy.chosen.copy_(module.chosen)
