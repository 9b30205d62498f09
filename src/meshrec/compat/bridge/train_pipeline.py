"""TorchRec's training pipelines on ``meshrec.pipeline``. Nothing is traced, and results are those of the
plain loop.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from meshrec.compat.bridge.hints import MEMORY, take_hints
from meshrec.pipeline import Lookahead, TrainPipeline

_SPARSE_DIST = {**MEMORY, "dmp_collection_sync_interval_batches": 1, "enqueue_batch_after_forward": False}
_SEMI_SYNC = {**MEMORY, "dmp_collection_sync_interval_batches": 1, "strict": False}
_EVALUATION = {**MEMORY, "pipeline_postproc": False}

Forward = Callable[[Any], tuple[Tensor, Any]]


class TrainPipelineBase:
    """A pipeline that trains ``model`` on one batch per call of ``progress``. In eval mode it only computes.

    Args:
        model: maps a batch to (losses, output).
        optimizer: the optimizer of the dense part, or a combination of all.
        device: device to move batches to. They have a method ``to(device, non_blocking)``.
        custom_model_fwd: called in place of ``model`` in the forward pass.
        hints: options about memory and order, which change no number; see ``hints.py``.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        custom_model_fwd: Forward | None = None,
        **hints: Any,
    ) -> None:
        take_hints("TrainPipelineBase", hints, MEMORY)
        self._model, self._optimizer, self._device = model, optimizer, torch.device(device)
        self._forward = model if custom_model_fwd is None else custom_model_fwd

    def progress(self, dataloader_iter: Iterator[Any]) -> Any:
        """Train on the next batch, and return the model's output.

        Raises:
            StopIteration: there is no batch left.
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
        """Do nothing, because no batch is in flight."""


class _Overlapping:
    """The common part of the overlapping pipelines."""

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
        """Train on the next batch, and return the model's output. In eval mode, only compute it.

        Raises:
            StopIteration: there is no batch left; raised on every rank. The next call may bring another
                iterator.
            ValueError: IDs are invalid, or a batch was written to in flight.
        """
        if not self._execute_all_batches and self._pipeline.has_ended:
            self.reset()
            raise StopIteration
        return self._pipeline.progress(dataloader_iter)

    def reset(self) -> None:
        """Drop the batches in flight. Call it on all ranks."""
        self._pipeline.reset()

    def attach(self, model: nn.Module | None = None, sparse_dist: bool = True) -> None:
        """Continue, with another model if one is given. Another model drops the batches in flight.

        ``sparse_dist`` changes nothing here.
        """
        if model is not None and model is not self._model:
            self._model = model
            self._pipeline = self._made()

    def detach(self) -> nn.Module:
        """Return the model. A pipeline never changes it.

        Batches stay in flight, and ``progress`` continues with them. A second call does the same.
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
    """A pipeline that exchanges the next batch's IDs, and moves the batch after it, while a batch computes.

    Args:
        model: maps a batch to (losses, output); a DistributedModelParallel, or a model with one inside.
        optimizer: the optimizer of the dense part, or a combination of all.
        device: device to move batches to.
        execute_all_batches: False drops the batches that are in flight when the loader ends.
        apply_jit, context_type, pipeline_postproc: change nothing here. What a model does to IDs before a
            lookup runs in its forward pass; such a lookup does not overlap, and a log line says so.
        custom_model_fwd: called in place of ``model`` in the forward pass.
        hints: options about memory and order, which change no number; see ``hints.py``.
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
        **hints: Any,
    ) -> None:
        take_hints("TrainPipelineSparseDist", hints, _SPARSE_DIST)
        super().__init__(model, optimizer, device, execute_all_batches, custom_model_fwd)


class PrefetchTrainPipelineSparseDist(_Overlapping):
    """A ``TrainPipelineSparseDist``, because rows are in memory and need not be prefetched into a cache.

    Args:
        model, optimizer, device, execute_all_batches, custom_model_fwd: see ``TrainPipelineSparseDist``.
        apply_jit, pipeline_postproc: change nothing here.
        hints: options about memory and order, which change no number; see ``hints.py``.
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
        **hints: Any,
    ) -> None:
        take_hints("PrefetchTrainPipelineSparseDist", hints, MEMORY)
        super().__init__(model, optimizer, device, execute_all_batches, custom_model_fwd)


class TrainPipelineSemiSync(_Overlapping):
    """A pipeline that, from batch ``start_batch`` on, takes embeddings before the previous batch's update.

    Its results thus differ from the plain loop's.

    Args:
        model, optimizer, device, execute_all_batches, custom_model_fwd: see ``TrainPipelineSparseDist``.
        apply_jit, stash_gradients, pipeline_postproc: change nothing here; the dense part is exact.
        start_batch: the first such batch; at least 2.
        hints: options about memory and order, which change no number; see ``hints.py``.
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
        **hints: Any,
    ) -> None:
        take_hints("TrainPipelineSemiSync", hints, _SEMI_SYNC)
        super().__init__(model, optimizer, device, execute_all_batches, custom_model_fwd, start_batch)


class EvalPipelineSparseDist:
    """A pipeline that computes without gradients, in eval mode. The next batch's exchanges run meanwhile.

    Args:
        model: maps a batch to (losses, output).
        optimizer: not used.
        device: device to move batches to.
        apply_jit: changes nothing here.
        hints: options about memory and order, which change no number; see ``hints.py``.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        apply_jit: bool = False,
        **hints: Any,
    ) -> None:
        take_hints("EvalPipelineSparseDist", hints, _EVALUATION)
        self._model = model
        self._ahead = Lookahead(model, device=torch.device(device), uneven="stop", strict=False)

    def progress(self, dataloader_iter: Iterator[Any]) -> Any:
        """Compute the next batch, and return the model's output.

        Raises:
            StopIteration: there is no batch left; raised on every rank.
            ValueError: the model is in training mode.
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
        """Drop the batches in flight. Call it on all ranks."""
        self._ahead.reset()
