"""TorchRec's training pipelines on ``meshrec.pipeline``. Nothing is traced; results equal a plain loop's."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from meshrec.compat.bridge.hints import MEMORY, take_hints
from meshrec.pipeline import Lookahead, TrainPipeline

# TorchRec's defaults. A different value is logged once, and changes nothing: batches are copied by the
# calling thread on a separate stream.
_COPIES = {**MEMORY, "async_inplace_copy": False}
# TorchRec's options without effect here, for every kind of pipeline, with their default values.
_SPARSE_DIST = {**_COPIES, "dmp_collection_sync_interval_batches": 1, "enqueue_batch_after_forward": False}
_SEMI_SYNC = {**MEMORY, "dmp_collection_sync_interval_batches": 1, "strict": False}
_EVALUATION = {**MEMORY, "pipeline_postproc": False}

Forward = Callable[[Any], tuple[Tensor, Any]]


class TrainPipelineBase:
    """Training pipeline with a batch per ``progress`` call. In eval mode, it only runs the forward pass.

    Args:
        model: maps a batch to (losses, output).
        optimizer: dense optimizer, or a combination of all optimizers.
        device: device for batches, which have a method ``to(device, non_blocking)``.
        custom_model_fwd: forward function to call instead of ``model``.
        hints: memory and ordering options without an effect on results; see ``hints.py``.
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
            StopIteration: the iterator is exhausted.
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
    """Common base of the pipelines that overlap a batch's compute with the communication of later batches.

    Such a pipeline wraps MeshRec's pipeline in TorchRec's methods.
    """

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
        # Replaced by `attach` if the model changes.
        self._pipeline = self._new_pipeline()

    def progress(self, dataloader_iter: Iterator[Any]) -> Any:
        """Train on the next batch, and return the model's output. In eval mode, only run the forward pass.

        Raises:
            StopIteration: the data has ended, on every rank. The next call may pass another iterator.
            ValueError: IDs are invalid, or a batch was modified in flight.
        """
        # The data has ended with batches still in flight. Dropping them keeps all ranks at the same step.
        if not self._execute_all_batches and self._pipeline.has_ended:
            self.reset()
            raise StopIteration
        return self._pipeline.progress(dataloader_iter)

    def reset(self) -> None:
        """Drop the batches in flight. Call it on all ranks."""
        self._pipeline.reset()

    def attach(self, model: nn.Module | None = None, sparse_dist: bool = True) -> None:
        """Resume, optionally with another model. Another model drops the batches in flight.

        ``sparse_dist`` is ignored.
        """
        if model is not None and model is not self._model:
            self._model = model
            self._pipeline = self._new_pipeline()

    def detach(self) -> nn.Module:
        """Return the model, which a pipeline never changes.

        Batches stay in flight, and ``progress`` continues with them. Repeated calls do the same.
        """
        return self._model

    def _new_pipeline(self) -> TrainPipeline:
        """Return a MeshRec pipeline with this object's options."""
        return TrainPipeline(
            self._model,
            self._optimizer,
            self._device,
            forward=self._custom_forward,
            semi_synchronous_from=self._semi_synchronous_from,
        )


class TrainPipelineSparseDist(_Overlapping):
    """Training pipeline. Overlaps compute with the next ID exchange and the copy of the batch after it.

    Args:
        model: maps a batch to (losses, output); a DistributedModelParallel, or a model that contains one.
        optimizer: dense optimizer, or a combination of all optimizers.
        device: device for batches.
        execute_all_batches: False drops the batches in flight when the data ends.
        apply_jit, context_type, pipeline_postproc: ignored. ID preprocessing inside the model runs in the
            forward pass; such a lookup does not overlap, and a log line says so.
        custom_model_fwd: forward function to call instead of ``model``.
        hints: memory and ordering options without an effect on results; see ``hints.py``.
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
    """Same as ``TrainPipelineSparseDist``: rows are in memory, so no cache needs prefetching.

    Args:
        model, optimizer, device, execute_all_batches, custom_model_fwd: see ``TrainPipelineSparseDist``.
        apply_jit, pipeline_postproc: ignored.
        hints: memory and ordering options without an effect on results; see ``hints.py``.
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
        take_hints("PrefetchTrainPipelineSparseDist", hints, _COPIES)
        super().__init__(model, optimizer, device, execute_all_batches, custom_model_fwd)


class TrainPipelineSemiSync(_Overlapping):
    """Training pipeline. From ``start_batch`` on, reads embeddings before the previous batch's update.

    Results therefore differ from a plain loop's.

    Args:
        model, optimizer, device, execute_all_batches, custom_model_fwd: see ``TrainPipelineSparseDist``.
        apply_jit, stash_gradients, pipeline_postproc: ignored; the dense part is exact.
        start_batch: first semi-synchronous batch; at least 2.
        hints: memory and ordering options without an effect on results; see ``hints.py``.
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
    """Evaluation pipeline without gradients. Overlaps compute with the next batch's exchanges.

    Args:
        model: maps a batch to (losses, output).
        optimizer: ignored.
        device: device for batches.
        apply_jit: ignored.
        hints: memory and ordering options without an effect on results; see ``hints.py``.
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
        """Evaluate the next batch, and return the model's output.

        Raises:
            StopIteration: the data has ended, on every rank.
            ValueError: the model is in training mode.
        """
        if self._model.training:
            raise ValueError("the model is in training mode. Call model.eval() before evaluating it.")
        with torch.no_grad():
            batch = self._ahead.next(dataloader_iter)
            with self._ahead.forward():
                output = self._model(batch)[1]
            # After the forward pass is queued, so that the exchange overlaps with the forward kernels.
            self._ahead.exchange(dataloader_iter)
            # Looking up early is safe only for tables that count their updates. Ordinary gradients are
            # applied by a dense optimizer, which the table does not notice, and rows read early would be
            # stale.
            self._ahead.look_up(lambda module: not module.has_ordinary_gradients)
        return output

    def reset(self) -> None:
        """Drop the batches in flight. Call it on all ranks."""
        self._ahead.reset()
