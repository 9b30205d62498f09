"""TorchRec's training pipelines, by ``meshrec.pipeline``: nothing is traced, and the numbers are the plain
loop's.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from meshrec.pipeline import Lookahead, TrainPipeline

Forward = Callable[[Any], tuple[Tensor, Any]]


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
        custom_model_fwd: Forward | None = None,
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


class _Overlapping:
    """What the overlapping pipelines share."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        execute_all_batches: bool,
        forward: Forward | None,
        semi_synchronous_from: int | None = None,
    ) -> None:
        self._model, self._optimizer, self._device = model, optimizer, torch.device(device)
        self._custom_forward, self._semi_synchronous_from = forward, semi_synchronous_from
        self._execute_all_batches = execute_all_batches
        self._pipeline = self._made()

    def progress(self, dataloader_iter: Iterator[Any]) -> Any:
        """Trains on the next batch and gives the model's output; in eval mode it only computes.

        Raises:
            StopIteration: on every rank, when there is no batch left; the next call may bring another
                iterator.
            ValueError: for bad ids, and for batches that were written to in flight.
        """
        if not self._execute_all_batches and self._pipeline.has_ended:
            self.reset()
            raise StopIteration
        return self._pipeline.progress(dataloader_iter)

    def reset(self) -> None:
        """Drops the batches in flight; on all ranks."""
        self._pipeline.reset()

    def attach(self, model: nn.Module | None = None, sparse_dist: bool = True) -> None:
        """Goes on, with another model if one is given; that drops the batches in flight.

        ``sparse_dist``: changes nothing here.
        """
        if model is not None and model is not self._model:
            self._model = model
            self._pipeline = self._made()

    def detach(self) -> nn.Module:
        """The model, which is as it was in any case: a pipeline changes nothing in it. Batches in flight
        stay there, and ``progress`` goes on with them; a second call does the same.
        """
        return self._model

    def _made(self) -> TrainPipeline:
        return TrainPipeline(
            self._model,
            self._optimizer,
            self._device,
            forward=self._custom_forward,
            semi_synchronous_from=self._semi_synchronous_from,
        )


class TrainPipelineSparseDist(_Overlapping):
    """The next batch's ids and the data of the one after it travel while a batch computes.

    Args:
        model: from a batch to (losses, output); DistributedModelParallel, or with one inside.
        optimizer: of the dense part, or all of it combined.
        device: where batches go.
        execute_all_batches: False leaves out the batches that are in flight when the loader ends.
        apply_jit, context_type, pipeline_postproc: change nothing here. What a model does to ids before a
            lookup is done in its forward pass; such a lookup does not overlap, and a log line says so.
        custom_model_fwd: in place of ``model`` for the forward pass.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        execute_all_batches: bool = True,
        apply_jit: bool = False,
        context_type: type | None = None,
        pipeline_postproc: bool = False,
        custom_model_fwd: Forward | None = None,
    ) -> None:
        super().__init__(model, optimizer, device, execute_all_batches, custom_model_fwd)


class PrefetchTrainPipelineSparseDist(_Overlapping):
    """The same: rows lie in memory, so there is nothing to prefetch into a cache.

    Args:
        model, optimizer, device, execute_all_batches, custom_model_fwd: see ``TrainPipelineSparseDist``.
        apply_jit, pipeline_postproc: change nothing here.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        execute_all_batches: bool = True,
        apply_jit: bool = False,
        pipeline_postproc: bool = True,
        custom_model_fwd: Forward | None = None,
    ) -> None:
        super().__init__(model, optimizer, device, execute_all_batches, custom_model_fwd)


class TrainPipelineSemiSync(_Overlapping):
    """From batch ``start_batch`` on, embeddings are those of before the last batch's update: other numbers
    than the plain loop's.

    Args:
        model, optimizer, device, execute_all_batches, custom_model_fwd: see ``TrainPipelineSparseDist``.
        apply_jit, stash_gradients, pipeline_postproc: change nothing here; the dense part is exact.
        start_batch: the first such batch; at least 2.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        execute_all_batches: bool = True,
        apply_jit: bool = False,
        start_batch: int = 900,
        stash_gradients: bool = False,
        pipeline_postproc: bool = True,
        custom_model_fwd: Forward | None = None,
    ) -> None:
        super().__init__(model, optimizer, device, execute_all_batches, custom_model_fwd, start_batch)


class EvalPipelineSparseDist:
    """Computes without gradients, in eval mode; the next batch's exchanges run meanwhile.

    Args:
        model: from a batch to (losses, output).
        optimizer: not used.
        device: where batches go.
        apply_jit: changes nothing here.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        apply_jit: bool = False,
    ) -> None:
        self._model = model
        self._ahead = Lookahead(model, device=torch.device(device), uneven="stop", strict=False)

    def progress(self, dataloader_iter: Iterator[Any]) -> Any:
        """Takes the next batch and gives the model's output.

        Raises:
            StopIteration: on every rank, when there is no batch left.
            ValueError: if the model is in training mode.
        """
        if self._model.training:
            raise ValueError("the model is in training mode. Call model.eval() before evaluating it.")
        with torch.no_grad():
            batch = self._ahead.next(dataloader_iter)
            with self._ahead.forward():
                output = self._model(batch)[1]
            self._ahead.exchange(dataloader_iter)
            # Tables without a fused optimizer do not tell that somebody trains them in between.
            self._ahead.look_up(lambda module: not module.has_ordinary_gradients)
        return output

    def reset(self) -> None:
        """Drops the batches in flight; on all ranks."""
        self._ahead.reset()
