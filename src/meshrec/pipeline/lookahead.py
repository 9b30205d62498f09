"""The batches that are under way, and when each part of their lookups starts.

While batch i computes, the ids of batch i + 1 travel, and batch i + 2 comes from the loader. Nothing is
traced: the first forward pass shows which module was called with which part of the batch, and from then on
these lookups start ahead. A forward pass that is given the very object takes what is under way; any other
call does the plain thing.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import nn

from meshrec.distributed.awaitable import LazyAwaitable
from meshrec.distributed.embedding_modules import ShardedEmbeddingBagCollection, ShardedEmbeddingCollection
from meshrec.model_parallel import DistributedModelParallel
from meshrec.pipeline.agreement import Agreed, Checking, Read, Telling, Uneven
from meshrec.pipeline.batch_paths import find, follow
from meshrec.pipeline.in_flight import BatchInFlight, Call, Collection
from meshrec.pipeline.moving import Mover
from meshrec.plan.mesh import Axis, default_env
from meshrec.sparse import KeyedJaggedTensor

_logger = logging.getLogger("meshrec")


class Lookahead:
    """Batches in flight, for a training loop of any kind. One batch goes through it like this::

        batch = ahead.next(iterator)  # StopIteration at the end
        with ahead.forward():
            loss = ...
        ahead.exchange(iterator)
        loss.backward()
        optimizer.step()
        ahead.look_up()

    All calls are collective. A call that is left out (no backward pass in evaluation, an exception in
    between) costs overlap and nothing else, but for ``exchange``: it tells of a batch that was written to
    while its ids were under way, before anything is updated.

    Args:
        model: with sharded modules somewhere.
        device: where batches go; None leaves them where they are.
        uneven: when ranks have different numbers of batches: ``"stop"`` ends all of them after the last batch
            that all have, ``"error"`` raises there and names the ranks.
        strict: raise where a module cannot be pipelined.
    """

    def __init__(
        self, model: nn.Module, *, device: torch.device | None, uneven: Uneven, strict: bool
    ) -> None:
        if uneven not in ("stop", "error"):
            raise ValueError(f"uneven must be 'stop' or 'error', got {uneven!r}.")
        self._uneven, self._strict = uneven, strict
        self._axis = _axis_of(model)
        self._modules: dict[str, Collection] = {
            name: module
            for name, module in model.named_modules()
            if isinstance(module, ShardedEmbeddingBagCollection | ShardedEmbeddingCollection)
        }
        self._mover = Mover(device)
        self._calls: list[Call] | None = None
        self._seen: list[tuple[str, Collection, KeyedJaggedTensor]] = []
        self._current: BatchInFlight | None = None
        self._waiting: deque[BatchInFlight] = deque()
        self._telling: Telling | None = None
        self._checking: Checking | None = None
        self._failure: Exception | None = None
        self._has_ended = False

    @property
    def is_last(self) -> bool:
        """Whether nothing follows the batch that ``next`` gave, as far as is known: the end is known once
        the batch before it has called ``look_up``.
        """
        return self._has_ended and not self._waiting

    @property
    def has_ended(self) -> bool:
        """Whether the loader has nothing after the batches in flight."""
        return self._has_ended

    def next(self, iterator: Iterator[Any]) -> Any:
        """The batch whose turn it is.

        Raises:
            StopIteration: on every rank, after the last one. The next call reads on.
            ValueError: on every rank, for bad ids in this batch.
            Exception: what the loader raised in place of this batch; RuntimeError on the other ranks.
        """
        self._current = None
        self._check()
        self._agree()
        while len(self._waiting) < 2 and not self._has_ended:
            self._read(iterator)
            self._agree()
        if not self._waiting:
            self._has_ended = False
            _raise(self._take_failure() or StopIteration())
        self._current = current = self._waiting.popleft()
        self._mover.wait(current.batch)
        current.send_ids()
        if current.error is not None:
            _raise(current.take_error())
        if current.lookups:
            self._checking = Checking(current.take_change(), self._axis)
        return current.batch

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Inside, calls of sharded modules take what is under way for their input."""
        for name, module in self._modules.items():
            module.ahead = self._asked(name, module)
        try:
            yield
        finally:
            seen, self._seen = self._seen, []
            for module in self._modules.values():
                module.ahead = None
        if self._calls is None and self._current is not None:
            self._calls = self._learned(seen, self._current.batch)

    def exchange(self, iterator: Iterator[Any]) -> None:
        """Between forward and backward: sends the next batch's ids, and reads the batch after it.

        Raises:
            ValueError: on every rank, when one wrote to this batch after the loader gave it and before
                ``next`` did.
        """
        self._check()
        if self._waiting:
            self._waiting[0].send_ids()
        if self._telling is None and not self._has_ended and len(self._waiting) < 2:
            self._read(iterator)

    def look_up(self, is_ready: Callable[[Collection], bool] | None = None) -> None:
        """After an update of tables: looks up the next batch's ids, and starts with the batch after it.

        ``is_ready``: for which modules; by default all. What was looked up before another update of a fused
        table is looked up again when it is asked for.
        """
        if self._waiting:
            self._waiting[0].send_embeddings(is_ready or (lambda _: True))
        self._agree()

    def look_up_before_update(self) -> None:
        """Looks up the next batch's ids now, for good: in tables from before this batch's update."""
        if self._waiting:
            self._waiting[0].send_ids()
            self._waiting[0].send_embeddings(lambda _: True, stays=True)

    def reset(self) -> None:
        """Drops the batches in flight; on all ranks."""
        self._current = self._telling = self._checking = self._failure = None
        self._waiting.clear()
        self._has_ended = False

    def _asked(self, name: str, module: Collection) -> Any:
        def ahead(features: KeyedJaggedTensor) -> LazyAwaitable[Any] | None:
            if self._calls is None:
                self._seen.append((name, module, features))
            return None if self._current is None else self._current.take(module, features)

        return ahead

    def _learned(self, seen: list[tuple[str, Collection, KeyedJaggedTensor]], batch: Any) -> list[Call]:
        """Which part of the batch each module was called with."""
        calls = [Call(name, module, find(batch, features)) for name, module, features in seen]
        called = {call.name for call in calls if call.path is not None}
        if plain := [name or "the model" for name in self._modules if name not in called]:
            text = (
                f"{', '.join(plain)}: no part of the batch is the input (the forward pass makes it, or does "
                "not call the module), so the exchange overlaps with nothing"
            )
            if self._strict:
                raise ValueError(f"{text}. Make it before the batch is handed over, or use strict=False.")
            _logger.warning("%s. The numbers are the same.", text)
        return calls

    def _check(self) -> None:
        """Ends the check that ``next`` began."""
        checking, self._checking = self._checking, None
        if checking is not None:
            checking.finish()

    def _start(self, batch: BatchInFlight, found: list[bool]) -> None:
        """Starts the lookups whose input all ranks have found."""
        self._mover.wait(batch.batch)
        for call, is_found in zip(self._calls or (), found, strict=True):
            if is_found and call.path is not None:
                batch.route(call.module, follow(batch.batch, call.path))

    def _read(self, iterator: Iterator[Any]) -> None:
        """Takes a batch from the loader and tells the other ranks."""
        read = self._taken(iterator)
        batch = read if isinstance(read, BatchInFlight) else None
        error = read if isinstance(read, Exception) else None
        found = [
            batch is not None
            and call.path is not None
            and isinstance(follow(batch.batch, call.path), KeyedJaggedTensor)
            for call in self._calls or ()
        ]
        self._telling = Telling(Read(batch, found, error), self._axis)

    def _take_failure(self) -> Exception | None:
        failure, self._failure = self._failure, None
        return failure

    def _taken(self, iterator: Iterator[Any]) -> BatchInFlight | Exception | None:
        """A batch of the loader, None at its end, or its error, to be raised in its turn."""
        try:
            return BatchInFlight(self._mover.moved(next(iterator)))
        except StopIteration:
            return None
        except Exception as error:
            return error

    def _agree(self) -> None:
        """Does with the batch that was read what all ranks do."""
        if self._telling is None:
            return
        telling, self._telling = self._telling, None
        agreed = telling.agreed()
        if not agreed.goes_on:
            self._end(agreed)
            return
        batch = telling.read.batch
        assert batch is not None
        self._waiting.append(batch)
        if self._calls is not None:
            self._start(batch, agreed.found)

    def _end(self, agreed: Agreed) -> None:
        self._has_ended, self._failure = True, agreed.error
        if agreed.error is not None or len(agreed.ended) == self._axis.size:
            return
        ranks = ", ".join(map(str, agreed.ended))
        text = f"no batch is left on rank {ranks} of {self._axis.size}, while others have one"
        if self._uneven == "error":
            self._failure = ValueError(
                f"{text}. Give every rank as many batches, or use uneven='stop' to end all of them here."
            )
        elif self._axis.rank not in agreed.ended:
            _logger.warning("%s: the one that this rank has read is left out, and all end.", text)


def _axis_of(model: nn.Module) -> Axis:
    for module in model.modules():
        if isinstance(module, DistributedModelParallel):
            return module.env.world
    return default_env().world


def _raise(error: BaseException) -> NoReturn:
    """Raises it; no frame of ours holds it afterwards. In a circle with its traceback it would keep exchanges
    in flight alive, for which the other ranks hold their messages.
    """
    try:
        raise error
    finally:
        del error
