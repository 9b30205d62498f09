"""A copy of a model's best weights."""

import torch
from torch import Tensor, nn

from meshrec.checkpoint import CheckpointManager
from meshrec.checkpoint.stored import StoredCheckpoints
from meshrec.train.progress import Progress


class BestWeights:
    """A copy of a model at its best step. With a manager, all methods are collective.

    Args:
        model: the model to copy.
        manager: stores the copy on disk, where a resumed run finds it. If none, each rank keeps its part in
            memory.
    """

    def __init__(
        self, model: nn.Module, manager: CheckpointManager | StoredCheckpoints | None = None
    ) -> None:
        self._model, self._manager = model, manager
        self._kept: dict[str, Tensor] = {}
        self._step: int | None = None

    def keep(self, progress: Progress) -> None:
        """Copy the current weights, in place of those kept before.

        Args:
            progress: progress at these weights, stored beside them on disk.

        Raises:
            CheckpointError: the weights cannot be written; raised on every rank. The weights kept before
                remain.
        """
        if self._manager is not None:
            self._manager.save(progress.step, {"model": self._model, "progress": progress})
            self._manager.remove_after(progress.step)  # from before the run went back to a checkpoint
            return
        if not self._kept:
            self._kept = {name: torch.empty_like(tensor) for name, tensor in self._tensors().items()}
        for name, tensor in self._tensors().items():
            self._kept[name].copy_(tensor)
        self._step = progress.step

    def restore(self) -> int | None:
        """Load the kept weights, and return their step; None if none were kept."""
        if self._manager is not None:
            return self._manager.load_latest({"model": self._model})
        for name, tensor in self._tensors().items() if self._kept else ():
            tensor.copy_(self._kept[name])
        return self._step

    def _tensors(self) -> dict[str, Tensor]:
        named = (*self._model.named_parameters(), *self._model.named_buffers())
        return {name: tensor.detach() for name, tensor in named}
