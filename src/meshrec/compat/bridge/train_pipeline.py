"""TorchRec's training pipelines as plain loops: one batch after another, without overlap."""

import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

_logger = logging.getLogger("meshrec")


class TrainPipelineBase:
    """Trains ``model`` on one batch with each call of ``progress``; in eval mode it only computes.

    Args:
        model: from a batch to (losses, output).
        optimizer: of the dense part, or all of it combined.
        device: where batches go; they have a method ``to(device, non_blocking)``.
        custom_model_fwd: in place of ``model`` for the forward pass.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        custom_model_fwd: Callable[[Any], tuple[torch.Tensor, Any]] | None = None,
    ) -> None:
        self._model, self._optimizer, self._device = model, optimizer, torch.device(device)
        self._forward = model if custom_model_fwd is None else custom_model_fwd

    def progress(self, dataloader_iter: Iterator[Any]) -> Any:
        """Takes the next batch and gives the model's output.

        Raises:
            StopIteration: when there is no batch left.
        """
        batch = next(dataloader_iter).to(self._device, non_blocking=True)
        if not self._model.training:
            return self._forward(batch)[1]
        self._optimizer.zero_grad()
        losses, output = self._forward(batch)
        losses.sum().backward()
        self._optimizer.step()
        return output

    def reset(self) -> None:
        """Nothing: no batch is held back."""


class TrainPipelineSparseDist(TrainPipelineBase):
    """The same; it says once in the log that it does not overlap.

    Args:
        model, optimizer, device, custom_model_fwd: see ``TrainPipelineBase``.
        execute_all_batches, apply_jit: change nothing here.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        execute_all_batches: bool = True,
        apply_jit: bool = False,
        custom_model_fwd: Callable[[Any], tuple[torch.Tensor, Any]] | None = None,
    ) -> None:
        super().__init__(model, optimizer, device, custom_model_fwd)
        _logger.warning(
            "TrainPipelineSparseDist trains one batch after another here: the same numbers, no overlap."
        )


class EvalPipelineSparseDist(TrainPipelineBase):
    """Computes without gradients, in eval mode."""

    def progress(self, dataloader_iter: Iterator[Any]) -> Any:
        """Takes the next batch and gives the model's output.

        Raises:
            StopIteration: when there is no batch left.
            ValueError: if the model is in training mode.
        """
        if self._model.training:
            raise ValueError("the model is in training mode. Call model.eval() before evaluating it.")
        with torch.no_grad():
            return super().progress(dataloader_iter)
