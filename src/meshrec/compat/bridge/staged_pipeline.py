"""TorchRec's pipeline of stages that a batch passes before it reaches the model."""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from meshrec.distributed import LazyAwaitable, ShardedEmbeddingBagCollection, ShardedEmbeddingCollection
from meshrec.pipeline.batch_paths import Path, find, follow
from meshrec.pipeline.in_flight import BatchInFlight, Collection
from meshrec.sparse import KeyedJaggedTensor

_MOST_BATCHES = 4  # whose lookups are under way: the model may leave a batch out


@dataclass
class PipelineStage:
    """A stage of the pipeline.

    Attributes:
        name: name of the stage.
        runnable: maps a batch to a batch.
        stream: the stream on which the stage computes, on CUDA; None on a CPU.
        fill_callback: called after the stage's run on each batch that fills the pipeline.
        data_exhausted_callback: called once, when the stage has seen the last batch.
    """

    name: str
    runnable: Callable[[Any], Any]
    stream: Any = None
    fill_callback: Callable[[], None] | None = None
    data_exhausted_callback: Callable[[], None] | None = None


class StagedTrainPipeline:
    """A pipeline that returns batches that have passed all stages, while newer ones are in earlier stages::

        while (batch := pipeline.progress(iterator)) is not None:
            losses, output = model(batch)
            ...

    Args:
        pipeline_stages: the stages, in the order in which a batch passes them.
        debug_mode: changes nothing here.
        compute_stream: the stream that waits for the stages, on CUDA; None: the current stream.
        on_flush_end: called when a flush, see ``set_flush``, has emptied the pipeline.
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
        # Place k holds what has passed stage k, or nothing.
        self._passed: list[Any] = [None] * len(pipeline_stages)
        self._has_ended, self._flushes = False, False

    def progress(self, dataloader_iter: Iterator[Any]) -> Any:
        """Return the next batch for the model; None after the last one. The next call reads on."""
        if all(batch is None for batch in self._passed) and not self._has_ended:
            for _ in self._stages:
                self._advance(dataloader_iter, fills=True)
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
        self._wait_for_stages()
        self._advance(dataloader_iter, fills=False)
        return batch

    def set_flush(self, flush: bool) -> None:
        """Choose whether ``progress`` returns all batches in the pipeline before it takes a new one."""
        self._flushes = flush

    def _advance(self, iterator: Iterator[Any], *, fills: bool) -> None:
        """Move every batch to the next stage, the oldest first, if that stage is free."""
        for place in reversed(range(len(self._stages))):
            if self._passed[place] is not None:
                continue
            batch = self._taken(iterator) if place == 0 else self._passed[place - 1]
            if place:
                self._passed[place - 1] = None
            if batch is not None:
                self._passed[place] = self._run(place, batch, fills)

    def _run(self, place: int, batch: Any, fills: bool) -> Any:
        stage = self._stages[place]
        on_stream: AbstractContextManager[Any] = nullcontext()
        if stage.stream is not None:
            before = self._stages[place - 1].stream if place else None
            stage.stream.wait_stream(torch.cuda.current_stream() if before is None else before)
            on_stream = torch.cuda.stream(stage.stream)
        with on_stream:
            batch = stage.runnable(batch)
        if fills and stage.fill_callback is not None:
            stage.fill_callback()
        return batch

    def _taken(self, iterator: Iterator[Any]) -> Any:
        if self._has_ended or self._flushes:
            return None
        batch = next(iterator, None)
        if batch is None and not self._has_ended:
            self._has_ended = True
            for stage in self._stages:
                if stage.data_exhausted_callback is not None:
                    stage.data_exhausted_callback()
        return batch

    def _wait_for_stages(self) -> None:
        stream = self._stages[-1].stream
        if stream is not None:
            (self._compute_stream or torch.cuda.current_stream()).wait_stream(stream)


class SparseDataDistUtil:
    """The last stage of a StagedTrainPipeline, which starts the exchange of IDs before the model needs them::

        util = SparseDataDistUtil(model, stream)
        PipelineStage("ids", util.start_sparse_data_dist, util.data_dist_stream, util.wait_sparse_data_dist)

    Nothing is traced: the first forward pass shows which part of a batch each sharded module is called with,
    and later batches start ahead. Embeddings are looked up when the model asks for them, so the results are
    those of a plain loop.

    Args:
        model: a model with sharded modules somewhere in it.
        data_dist_stream: the stream of the stage.
        apply_jit, prefetch_stream, pipeline_postproc: change nothing here.
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
        self._calls: list[tuple[Collection, Path]] = []
        self._batches: deque[BatchInFlight] = deque(maxlen=_MOST_BATCHES)
        self._modules = [
            module
            for module in model.modules()
            if isinstance(module, ShardedEmbeddingBagCollection | ShardedEmbeddingCollection)
        ]
        for module in self._modules:
            module.ahead = self._asked(module)

    def start_sparse_data_dist(self, batch: Any) -> Any:
        """Start to exchange the IDs of the batch, for the modules whose input is known. Collective."""
        for earlier in self._batches:
            earlier.send_ids()
        in_flight = BatchInFlight(batch)
        for module, path in self._calls:
            features = follow(batch, path)
            if isinstance(features, KeyedJaggedTensor):
                in_flight.route(module, features)
        self._batches.append(in_flight)
        return batch

    def wait_sparse_data_dist(self) -> None:
        """Send the IDs of all batches whose sizes are under way. Collective."""
        for batch in self._batches:
            batch.send_ids()

    def detach(self) -> nn.Module:
        """Return the model, which runs plain lookups from now on. A second call does the same."""
        for module in self._modules:
            module.ahead = None
        self._batches.clear()
        return self.model

    def _asked(self, module: Collection) -> Callable[[KeyedJaggedTensor], LazyAwaitable[Any] | None]:
        def ahead(features: KeyedJaggedTensor) -> LazyAwaitable[Any] | None:
            for batch in self._batches:
                if batch.error is not None and find(batch.batch, features) is not None:
                    raise batch.take_error()
                found = batch.take(module, features)
                if found is not None:
                    return found
                if (path := find(batch.batch, features)) is not None and (module, path) not in self._calls:
                    self._calls.append((module, path))
            return None

        return ahead
