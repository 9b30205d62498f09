"""Copy of a model's best weights."""

import torch
from torch import Tensor, nn

from meshrec.checkpoint import CheckpointManager
from meshrec.train.progress import Progress


class BestWeights:
    """Copy of a model at its best step. With a manager, all methods are collective.

    Args:
        model: the model to copy.
        manager: stores the copy on disk, for a resumed run to load. If None, every rank keeps its part in
            memory.
    """

    def __init__(self, model: nn.Module, manager: CheckpointManager | None = None) -> None:
        self._model, self._manager = model, manager
        # In-memory copy, if there is no manager; allocated by the first `keep`.
        self._kept: dict[str, Tensor] = {}
        # Step of the in-memory copy.
        self._step: int | None = None

    def keep(self, progress: Progress) -> None:
        """Copy the current weights, and drop the previous copy.

        Args:
            progress: progress at these weights, stored next to them on disk.

        Raises:
            CheckpointError: the weights cannot be written; raised on every rank. The previous copy remains.
        """
        if self._manager is not None:
            self._manager.save(progress.step, {"model": self._model, "progress": progress})
            self._manager.remove_after(progress.step)  # from before the run went back to a checkpoint
            return
        # Allocate once, and reuse the memory for every later best step.
        if not self._kept:
            self._kept = {name: torch.empty_like(tensor) for name, tensor in self._tensors().items()}
        for name, tensor in self._tensors().items():
            self._kept[name].copy_(tensor)
        self._step = progress.step

    def restore(self) -> int | None:
        """Load the best weights and return their step; None if there is no copy."""
        if self._manager is not None:
            return self._manager.load_latest({"model": self._model})
        for name, tensor in self._tensors().items() if self._kept else ():
            tensor.copy_(self._kept[name])
        return self._step

    def _tensors(self) -> dict[str, Tensor]:
        named = (*self._model.named_parameters(), *self._model.named_buffers())
        return {name: tensor.detach() for name, tensor in named}
