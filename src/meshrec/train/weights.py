"""Weights put aside in memory."""

import torch
from torch import Tensor, nn


class BestWeights:
    """A copy of what this rank holds of a model, taken when it was at its best."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._kept: dict[str, Tensor] = {}

    def keep(self) -> None:
        """Copies the weights of now, in place of those kept before."""
        if not self._kept:
            self._kept = {name: torch.empty_like(tensor) for name, tensor in self._tensors().items()}
        for name, tensor in self._tensors().items():
            self._kept[name].copy_(tensor)

    def restore(self) -> bool:
        """Puts the kept weights back; False when none were kept."""
        for name, tensor in self._tensors().items() if self._kept else ():
            tensor.copy_(self._kept[name])
        return bool(self._kept)

    def _tensors(self) -> dict[str, Tensor]:
        named = (*self._model.named_parameters(), *self._model.named_buffers())
        return {name: tensor.detach() for name, tensor in named}
