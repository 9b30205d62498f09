"""Batches in flight, and the start of every lookup stage.

While batch i computes, the IDs for batch i + 1 travel, and batch i + 2 comes from the loader. Nothing is
traced: the first forward pass shows which part of the batch is the input to which module, and from then on
these lookups start ahead. A call with that very object takes the lookup in flight; any other call runs the
plain lookup.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, NamedTuple, NoReturn

import torch
from torch import nn

from meshrec.comms.agreement import gather_errors
from meshrec.comms.collectives import all_gather, gather_objects
from meshrec.comms.failures import combined
from meshrec.comms.mesh import Axis, default_env, group_device
from meshrec.distributed.awaitable import LazyAwaitable
from meshrec.distributed.embedding_modules import ShardedEmbeddingBagCollection, ShardedEmbeddingCollection
from meshrec.model_parallel import DistributedModelParallel
from meshrec.pipeline.in_flight import BatchInFlight, Call, Collection, Mover, find, follow
from meshrec.sparse import KeyedJaggedTensor

_logger = logging.getLogger("meshrec")
Uneven = Literal["stop", "error"]
# Status of a rank without a next batch. 0: the rank has a batch.
_END, _FAILED = 1, 2


class _Decision(NamedTuple):
    """The ranks' common decision on the batches they have read."""

    continues: bool
    """Whether all ranks have a batch."""
    has_input: list[bool]
    """Whether all ranks' batches contain the input, by sharded-module call."""
    error: Exception | None
    """The error to raise once all earlier batches are trained."""
    ended: list[int]
    """Ranks without a batch, if others have one."""


class _StatusExchange:
    """Background exchange of batch status between ranks.

    Args:
        batch: the batch this rank got from its loader; None at the end of the data and after an error.
        has_input: whether the batch contains the input, by sharded-module call.
        error: the loader's error.
        axis: the ranks.
        device: device for the exchange.
    """

    def __init__(
        self,
        batch: BatchInFlight | None,
        has_input: list[bool],
        error: Exception | None,
        axis: Axis,
        device: torch.device,
    ) -> None:
        self.batch, self._error, self._axis = batch, error, axis
        # Every rank sends in every step, even at the end or after an error, so the collectives match.
        status = _FAILED if error is not None else _END if batch is None else 0
        words = torch.tensor([status, *has_input], dtype=torch.int64, device=device)
        self._words = all_gather(words, axis, "status of batches")

    def decide(self) -> _Decision:
        """Wait for all ranks' status. Error messages are exchanged only if there are any."""
        words = self._words.wait().cpu()
        statuses, has_input = words[:, 0].tolist(), words[:, 1:].bool().all(0).tolist()
        error = self._error
        if _FAILED in statuses and self._axis.size > 1:
            error = combined(gather_errors(self._error, self._axis, "errors of loaders"), self._axis.size)
            # Keep this rank's traceback.
            error.__cause__ = self._error
        ended = [rank for rank, status in enumerate(statuses) if status == _END]
        return _Decision(not any(statuses), has_input, error, ended)


class _WriteCheck:
    """Background check on all ranks for writes to the next batch.

    Args:
        change: describes this rank's write; None: no write.
        axis: the ranks.
        device: device for the exchange.
    """

    def __init__(self, change: str | None, axis: Axis, device: torch.device) -> None:
        self._change, self._axis = change, axis
        word = torch.tensor([change is not None], dtype=torch.int64, device=device)
        self._words = all_gather(word, axis, "checks of batches")

    def finish(self) -> None:
        """Raise ValueError on every rank if some rank has a change."""
        if bool(self._words.wait().any()):
            texts = enumerate(gather_objects(self._change, self._axis, "changes of batches"))
            changes = "; ".join(f"rank {rank}: {text}" for rank, text in texts if text is not None)
            raise ValueError(f"{changes}. Give every batch tensors of its own.")


class Lookahead:
    """Batches in flight, for any training loop. A batch passes through it like this::

        batch = ahead.next(iterator)  # StopIteration at the end
        with ahead.forward():
            loss = ...
        ahead.exchange(iterator)
        loss.backward()
        optimizer.step()
        ahead.look_up()

    All calls are collective. You may omit a call, as in evaluation without a backward pass or after an
    exception; that costs only overlap. The exception is ``exchange``: it reports a batch that was written to
    while the IDs were in flight, before anything is updated.

    Args:
        model: a model with sharded modules anywhere in it.
        device: device to move batches to; None leaves them where they are.
        uneven: reaction to different numbers of batches on different ranks. ``"stop"`` ends all ranks after
            the last common batch; ``"error"`` raises ValueError there and names the ranks.
        strict: raise if a module cannot be pipelined.
    """

    def __init__(
        self, model: nn.Module, *, device: torch.device | None, uneven: Uneven, strict: bool
    ) -> None:
        if uneven not in ("stop", "error"):
            raise ValueError(f"uneven must be 'stop' or 'error', got {uneven!r}.")
        self._uneven, self._strict = uneven, strict
        self._axis = _axis_of(model)
        self._device = group_device(self._axis.group)
        self._modules: dict[str, Collection] = {
            name: module
            for name, module in model.named_modules()
            if isinstance(module, ShardedEmbeddingBagCollection | ShardedEmbeddingCollection)
        }
        self._mover = Mover(device)
        # Learned in the first forward pass, then fixed. None before that.
        self._calls: list[Call] | None = None
        # Calls recorded during a forward pass while ``_calls`` is None.
        self._seen: list[tuple[str, Collection, KeyedJaggedTensor]] = []
        # From ``next`` until the next ``next``.
        self._current: BatchInFlight | None = None
        # Batches read after the current batch, at most two.
        self._waiting: deque[BatchInFlight] = deque()
        # Exchanges in flight: a batch's status until ``_agree``, and a write check until ``_check``.
        self._status: _StatusExchange | None = None
        self._write_check: _WriteCheck | None = None
        # The error to raise after the batches in flight.
        self._failure: Exception | None = None
        self.has_ended = False
        """Whether the loader has nothing after the batches in flight."""

    @property
    def is_last(self) -> bool:
        """Whether the batch from ``next`` is the last batch, as far as is known.

        The end becomes known when the previous batch calls ``look_up``.
        """
        return self.has_ended and not self._waiting

    def next(self, iterator: Iterator[Any]) -> Any:
        """Return the next batch.

        Raises:
            StopIteration: after the last batch, on every rank. The next call reads on.
            ValueError: this batch has invalid IDs; raised on every rank.
            Exception: the loader's error for this batch. Other ranks raise RuntimeError.
        """
        # Free the previous batch first, to save memory.
        self._current = None
        self._check()
        self._agree()
        # Usually only the first call reads here; ``exchange`` reads later batches.
        while len(self._waiting) < 2 and not self.has_ended:
            self._read(iterator)
            self._agree()
        if not self._waiting:
            self.has_ended = False
            failure, self._failure = self._failure, None
            _raise(failure or StopIteration())
        self._current = current = self._waiting.popleft()
        self._mover.wait(current.batch)
        # ``exchange`` may not have reached this batch, such as the first.
        current.send_ids()
        if current.error is not None:
            _raise(current.take_error())
        if self._waiting:
            self._waiting[0].start_reads()
        if current.lookups:
            self._write_check = _WriteCheck(current.take_change(), self._axis, self._device)
        return current.batch

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Let sharded-module calls take the matching lookups in flight."""
        for name, module in self._modules.items():
            module.ahead = partial(self._take, name, module)
        try:
            yield
        finally:
            seen, self._seen = self._seen, []
            for module in self._modules.values():
                module.ahead = None
        if self._calls is None and self._current is not None:
            self._calls = self._learned(seen, self._current.batch)

    def exchange(self, iterator: Iterator[Any]) -> None:
        """Send the next batch's IDs, and read the batch after it. Call this between forward and backward.

        Raises:
            ValueError: a rank wrote to this batch after the loader returned it and before ``next`` did.
                Raised on every rank.
        """
        self._check()
        if self._waiting:
            self._waiting[0].send_ids()
        if self._status is None and not self.has_ended and len(self._waiting) < 2:
            self._read(iterator)

    def look_up(self, is_ready: Callable[[Collection], bool] | None = None) -> None:
        """Look up the next batch's IDs, and start the batch after it. Call this after a table update.

        Args:
            is_ready: selects the modules to look up; by default all. If a fused table is updated again
                afterward, the rows are looked up again when they are needed.
        """
        if self._waiting:
            self._waiting[0].send_embeddings(is_ready or (lambda _: True))
        self._agree()

    def look_up_before_update(self) -> None:
        """Look up the next batch's IDs before this batch's update, and keep the result."""
        if self._waiting:
            self._waiting[0].send_ids()
            self._waiting[0].send_embeddings(lambda _: True, stays=True)

    def reset(self) -> None:
        """Drop the batches in flight. Call this on all ranks."""
        self._current = self._status = self._write_check = self._failure = None
        self._waiting.clear()
        self.has_ended = False

    def _take(self, name: str, module: Collection, features: KeyedJaggedTensor) -> LazyAwaitable[Any] | None:
        """Return the result of the lookup in flight for this module call; None if there is none."""
        if self._calls is None:
            self._seen.append((name, module, features))
        return None if self._current is None else self._current.take(module, features)

    def _learned(self, seen: list[tuple[str, Collection, KeyedJaggedTensor]], batch: Any) -> list[Call]:
        """Return the position in the batch for every module input."""
        calls = [Call(name, module, find(batch, features)) for name, module, features in seen]
        called = {call.name for call in calls if call.path is not None}
        if plain := [name or "the model" for name in self._modules if name not in called]:
            text = (
                f"{', '.join(plain)}: no part of the batch is the input (the forward pass makes it, or does "
                "not call the module), so its exchange overlaps with nothing"
            )
            if self._strict:
                raise ValueError(f"{text}. Make it before the batch is handed over, or use strict=False.")
            _logger.warning("%s. The results are the same.", text)
        return calls

    def _check(self) -> None:
        """Wait for the check started in ``next``."""
        check, self._write_check = self._write_check, None
        if check is not None:
            check.finish()

    def _read(self, iterator: Iterator[Any]) -> None:
        """Take a batch from the loader and send its status. An error is raised at the batch's turn."""
        batch = error = None
        try:
            batch = BatchInFlight(self._mover.moved(next(iterator)))
        except StopIteration:
            pass
        except Exception as caught:
            error = caught
        has_input = [
            batch is not None
            and call.path is not None
            and isinstance(follow(batch.batch, call.path), KeyedJaggedTensor)
            for call in self._calls or ()
        ]
        self._status = _StatusExchange(batch, has_input, error, self._axis, self._device)
        del error  # a cycle through the traceback and this frame would keep exchanges in flight alive

    def _agree(self) -> None:
        """Apply the ranks' common decision to the batch just read."""
        if self._status is None:
            return
        status, self._status = self._status, None
        decision = status.decide()
        if not decision.continues:
            self._end(decision)
            return
        batch = status.batch
        assert batch is not None
        self._waiting.append(batch)
        if self._calls is not None:
            self._mover.wait(batch.batch)
            for call, has_input in zip(self._calls, decision.has_input, strict=True):
                if has_input and call.path is not None:
                    batch.route(call.module, follow(batch.batch, call.path))

    def _end(self, decision: _Decision) -> None:
        self.has_ended, self._failure = True, decision.error
        if decision.error is not None or len(decision.ended) == self._axis.size:
            return
        ranks = ", ".join(map(str, decision.ended))
        text = f"rank {ranks} of {self._axis.size} has no batch left, while others have one"
        if self._uneven == "error":
            self._failure = ValueError(
                f"{text}. Give every rank as many batches, or use uneven='stop' to end all of them here."
            )
        elif self._axis.rank not in decision.ended:
            _logger.warning("%s: this rank drops the batch that it has read, and all ranks end.", text)


def _axis_of(model: nn.Module) -> Axis:
    for module in model.modules():
        if isinstance(module, DistributedModelParallel):
            return module.env.world
    return default_env().world


def _raise(error: BaseException) -> NoReturn:
    """Raise the error without a reference to it in our own frame.

    Such a reference makes a cycle with the traceback, which would keep exchanges in flight alive: the other
    ranks would hold their messages for them.
    """
    try:
        raise error
    finally:
        del error
