"""The best weights, put aside."""

import torch
from torch import Tensor, nn

from meshrec.checkpoint import CheckpointManager
from meshrec.train.progress import Progress


class BestWeights:
    """A copy of a model, taken when it was at its best. Collective where it is kept on the disk.

    Args:
        model: what is copied.
        manager: keeps the copy, for a resumed run to find; None: this rank's part is kept in memory.
    """

    def __init__(self, model: nn.Module, manager: CheckpointManager | None = None) -> None:
        self._model, self._manager = model, manager
        self._kept: dict[str, Tensor] = {}
        self._step: int | None = None

    def keep(self, progress: Progress) -> None:
        """Copies the weights of now, in place of those kept before.

        Args:
            progress: where they are; on the disk it is kept beside them.

        Raises:
            CheckpointError: on every rank, when they cannot be written; those kept before are there still.
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
        """Puts the kept weights back, and gives their step; None when none were kept."""
        if self._manager is not None:
            return self._manager.load_latest({"model": self._model})
        for name, tensor in self._tensors().items() if self._kept else ():
            tensor.copy_(self._kept[name])
        return self._step

    def _tensors(self) -> dict[str, Tensor]:
        named = (*self._model.named_parameters(), *self._model.named_buffers())
        return {name: tensor.detach() for name, tensor in named}
