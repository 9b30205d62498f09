"""TorchRec's staged pipeline: a batch passes a sequence of stages before the model."""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from meshrec.distributed import LazyAwaitable, ShardedEmbeddingBagCollection, ShardedEmbeddingCollection
from meshrec.pipeline.in_flight import BatchInFlight, Collection, Path, object_at, path_to
from meshrec.sparse import KeyedJaggedTensor

# Batches whose exchange has started. Limited, because the model may never read a batch.
_MAX_BATCHES = 4


@dataclass
class PipelineStage:
    """Pipeline stage.

    Attributes:
        name: stage name.
        runnable: maps a batch to a batch.
        stream: CUDA stream for the stage; None on the CPU.
        fill_callback: called after every run of the stage while ``progress`` fills an empty pipeline.
        data_exhausted_callback: called once when the data ends.
    """

    name: str
    runnable: Callable[[Any], Any]
    stream: Any = None
    fill_callback: Callable[[], None] | None = None
    data_exhausted_callback: Callable[[], None] | None = None


class StagedTrainPipeline:
    """Pipeline that returns fully staged batches while newer batches are in earlier stages::

        while (batch := pipeline.progress(iterator)) is not None:
            losses, output = model(batch)
            ...

    Args:
        pipeline_stages: stages in order.
        debug_mode: ignored.
        compute_stream: CUDA stream that waits for the stages; None: the current stream.
        on_flush_end: called when a flush has emptied the pipeline; see ``set_flush``.
    """

    def __init__(
        self,
        pipeline_stages: list[PipelineStage],
        debug_mode: bool = False,
        compute_stream: Any = None,
        on_flush_end: Callable[[], None] | None = None,
    ) -> None:
        if not pipeline_stages:
            raise ValueError("pipeline_stages is empty: give at least one stage.")
        self._stages, self._compute_stream, self._on_flush_end = pipeline_stages, compute_stream, on_flush_end
        # Entry k: the batch that has passed stage k and waits for the next, or None.
        self._passed: list[Any] = [None] * len(pipeline_stages)
        # Ended: set when the iterator runs out, cleared once progress() has returned None. Flushes: from
        # set_flush until the pipeline is empty.
        self._has_ended, self._flushes = False, False

    def progress(self, dataloader_iter: Iterator[Any]) -> Any:
        """Return the next staged batch; None after the last batch. Later calls read the iterator again."""
        # Empty at the start, and after a flush: an advance per stage fills it.
        if all(batch is None for batch in self._passed) and not self._has_ended:
            for _ in self._stages:
                self._advance(dataloader_iter, fills=True)
        # At the end of the data, or during a flush, the remaining batches move to the last stage.
        while self._passed[-1] is None and any(batch is not None for batch in self._passed):
            self._advance(dataloader_iter, fills=False)
        batch, self._passed[-1] = self._passed[-1], None
        if batch is None:
            self._has_ended = False
            if self._flushes:
                self._flushes = False
                if self._on_flush_end is not None:
                    self._on_flush_end()
            return None
        # Before the next advance: the compute stream would otherwise also wait for the work which that
        # starts.
        self._wait_for_stages()
        self._advance(dataloader_iter, fills=False)
        return batch

    def set_flush(self, flush: bool) -> None:
        """Set whether ``progress`` first drains the pipeline before it reads new batches."""
        self._flushes = flush

    def _advance(self, iterator: Iterator[Any], *, fills: bool) -> None:
        """Move every batch to the next stage, oldest batch first.

        A batch waits if the next stage is occupied.

        Args:
            fills: whether ``progress`` is filling an empty pipeline; see `_run`.
        """
        # From the last stage back, so that a batch moves into the slot that was just freed.
        for index in reversed(range(len(self._stages))):
            if self._passed[index] is not None:
                continue
            batch = self._taken(iterator) if index == 0 else self._passed[index - 1]
            if index:
                self._passed[index - 1] = None
            if batch is not None:
                self._passed[index] = self._run(index, batch, fills)

    def _run(self, index: int, batch: Any, fills: bool) -> Any:
        """Run a stage on a batch, on the stage's stream, and return the result.

        Args:
            fills: whether ``progress`` is filling an empty pipeline. If so, call the stage's
                ``fill_callback`` afterwards.
        """
        stage = self._stages[index]
        on_stream: AbstractContextManager[Any] = nullcontext()
        if stage.stream is not None:
            before = self._stages[index - 1].stream if index else None
            # A stage reads the output of the previous stage, which wrote it on another stream.
            stage.stream.wait_stream(torch.cuda.current_stream() if before is None else before)
            on_stream = torch.cuda.stream(stage.stream)
        with on_stream:
            batch = stage.runnable(batch)
        if fills and stage.fill_callback is not None:
            stage.fill_callback()
        return batch

    def _taken(self, iterator: Iterator[Any]) -> Any:
        """Return the next batch from the iterator.

        Return None if the data has ended, or while a flush empties the pipeline. When the data ends, call the
        ``data_exhausted_callback`` of all stages.
        """
        if self._has_ended or self._flushes:
            return None
        batch = next(iterator, None)
        # Once, at the first missing batch. Later calls return above.
        if batch is None and not self._has_ended:
            self._has_ended = True
            for stage in self._stages:
                if stage.data_exhausted_callback is not None:
                    stage.data_exhausted_callback()
        return batch

    def _wait_for_stages(self) -> None:
        """Let the compute stream wait for the last stage."""
        stream = self._stages[-1].stream
        if stream is not None:
            (self._compute_stream or torch.cuda.current_stream()).wait_stream(stream)


class SparseDataDistUtil:
    """Last stage of a StagedTrainPipeline. Starts the ID exchange before the model needs it::

        util = SparseDataDistUtil(model, stream)
        PipelineStage("ids", util.start_sparse_data_dist, util.data_dist_stream, util.wait_sparse_data_dist)

    Nothing is traced. The first forward pass shows which part of a batch every sharded module reads, and
    later batches start early. Rows are looked up when the model asks for them, so results equal a plain
    loop's.

    Args:
        model: model with sharded modules.
        data_dist_stream: CUDA stream for the stage.
        apply_jit, prefetch_stream, pipeline_postproc: ignored.
    """

    def __init__(
        self,
        model: nn.Module,
        data_dist_stream: Any = None,
        apply_jit: bool = False,
        prefetch_stream: Any = None,
        pipeline_postproc: bool = False,
    ) -> None:
        self.model, self.data_dist_stream = model, data_dist_stream
        # (module, path to its input in a batch), learned from forward passes. Only grows.
        self._calls: list[tuple[Collection, Path]] = []
        # Batches with a started exchange. The oldest drops out when the model never asked for it.
        self._batches: deque[BatchInFlight] = deque(maxlen=_MAX_BATCHES)
        self._modules = [
            module
            for module in model.modules()
            if isinstance(module, ShardedEmbeddingBagCollection | ShardedEmbeddingCollection)
        ]
        for module in self._modules:
            module.take_lookup = self._look_ahead(module)

    def start_sparse_data_dist(self, batch: Any) -> Any:
        """Start the ID exchange of a batch for all modules whose part of a batch is known. Collective.

        Returns:
            The same batch.
        """
        # Sends the IDs of earlier batches before this batch's sizes: all ranks must issue collectives in one
        # order.
        for earlier in self._batches:
            earlier.send_ids()
        in_flight = BatchInFlight(batch)
        for module, path in self._calls:
            features = object_at(batch, path)
            if isinstance(features, KeyedJaggedTensor):
                in_flight.route(module, features)
        self._batches.append(in_flight)
        return batch

    def wait_sparse_data_dist(self) -> None:
        """Send the IDs of all batches with a pending size exchange. Collective."""
        for batch in self._batches:
            batch.send_ids()

    def detach(self) -> nn.Module:
        """Restore plain lookups, and return the model. Further calls change nothing."""
        for module in self._modules:
            module.take_lookup = None
        self._batches.clear()
        return self.model

    def _look_ahead(self, module: Collection) -> Callable[[KeyedJaggedTensor], LazyAwaitable[Any] | None]:
        """Return a function which a module calls at the start of its forward pass.

        If an exchange was started for the features, the function returns the rows. Otherwise it returns None,
        and records which part of the batch the features are. From the next batch on, the exchange of this
        part starts early.
        """

        def take_lookup(features: KeyedJaggedTensor) -> LazyAwaitable[Any] | None:
            """Return the rows for the features if their exchange was started early, else None."""
            for batch in self._batches:
                # An error belongs to the batch in which it occurred, so it is raised when the model reads
                # this batch.
                if batch.error is not None and path_to(batch.batch, features) is not None:
                    raise batch.take_error()
                result = batch.take(module, features)
                if result is not None:
                    return result
                # The module reads this part of the batch: from the next batch on, its exchange starts early.
                if (path := path_to(batch.batch, features)) is not None and (module, path) not in self._calls:
                    self._calls.append((module, path))
            return None

        return take_lookup
