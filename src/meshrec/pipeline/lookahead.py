"""Lookahead: start later batches' lookups while the current batch computes.

While batch i computes, ranks exchange IDs for batch i + 1, and the loader reads batch i + 2. The model is not
traced. The first forward pass shows which part in the batch is the input for which module. In later batches,
the lookups for these parts start before the forward pass. A module call with exactly this object as input
takes the result from the lookup in flight. Any other call runs the plain lookup.
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
from meshrec.pipeline.in_flight import BatchInFlight, Call, Collection, Mover, object_at, path_to
from meshrec.sparse import KeyedJaggedTensor

_logger = logging.getLogger("meshrec")
Uneven = Literal["stop", "error"]
# Status for a rank without a next batch. 0: the rank has a batch.
_END, _FAILED = 1, 2


class _Decision(NamedTuple):
    """Joint status for the batches just read by all ranks; equal on all ranks."""

    continues: bool
    """Whether all ranks have a batch."""
    has_input: list[bool]
    """For every sharded module call: whether the input was found in the batches on all ranks."""
    error: Exception | None
    """Loader error, to be raised once all earlier batches are trained."""
    ended: list[int]
    """Ranks whose loaders have no more batches."""


class _StatusExchange:
    """Asynchronous exchange between ranks: does every rank have a batch, and which inputs does it contain?

    Args:
        batch: batch from this rank's loader; None at the data's end and after an error.
        has_input: for every sharded module call, whether the batch contains the input.
        error: loader error; None if there was none.
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
        """Wait for the status from all ranks. If a loader failed, also exchange the error messages."""
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
    """Asynchronous exchange between ranks: was a batch written to after the loader returned it?

    Args:
        change: message about a write on this rank; None: no write.
        axis: the ranks.
        device: device for the exchange.
    """

    def __init__(self, change: str | None, axis: Axis, device: torch.device) -> None:
        self._change, self._axis = change, axis
        word = torch.tensor([change is not None], dtype=torch.int64, device=device)
        self._words = all_gather(word, axis, "checks of batches")

    def finish(self) -> None:
        """Wait for all ranks, and raise ValueError on every rank if there was a write on any."""
        if bool(self._words.wait().any()):
            texts = enumerate(gather_objects(self._change, self._axis, "changes of batches"))
            changes = "; ".join(f"rank {rank}: {text}" for rank, text in texts if text is not None)
            raise ValueError(f"{changes}. Give every batch tensors of its own.")


class Lookahead:
    """Starts lookups before the model needs them, for any training loop::

        batch = ahead.next(iterator)  # StopIteration at the end
        with ahead.forward():
            loss = ...
        ahead.exchange(iterator)
        loss.backward()
        optimizer.step()
        ahead.look_up()

    All calls are collective. A loop may omit calls, as in evaluation without a backward pass or after an
    exception, and only loses overlap. Do not omit ``exchange`` in training: it raises, before any update, if
    a batch was written to while the IDs were in flight.

    Args:
        model: a model with sharded modules at any depth.
        device: device to copy batches to; None: batches are not copied.
        uneven: reaction to different batch counts on different ranks. ``"stop"`` ends all ranks after
            the last common batch; ``"error"`` raises ValueError there and names the ranks.
        strict: raise ValueError after the first forward pass if a module cannot be pipelined. Otherwise a log
            line names it.
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
        # The batch being trained, from a ``next`` call to the following call.
        self._current: BatchInFlight | None = None
        # Batches after the current one, at most two: read, and known to exist on all ranks.
        self._waiting: deque[BatchInFlight] = deque()
        # Exchanges in flight: a batch's status until ``_accept_batch``, and a write check until ``_check``.
        self._status: _StatusExchange | None = None
        self._write_check: _WriteCheck | None = None
        # Loader error to raise after the batches in flight. Set by ``_end``, until ``next`` raises it.
        self._failure: Exception | None = None
        self.has_ended = False
        """Whether a rank's loader has no batch after the batches in flight."""

    @property
    def is_last(self) -> bool:
        """Whether the current batch is known to be the last.

        The end becomes known in the ``look_up`` of the batch before the last.
        """
        return self.has_ended and not self._waiting

    def next(self, iterator: Iterator[Any]) -> Any:
        """Return the next batch to train, already copied to the device.

        Args:
            iterator: the loader's batches.

        Raises:
            StopIteration: after the last batch, on every rank. The following call reads from ``iterator``
                again.
            ValueError: this batch has invalid IDs; raised on every rank.
            Exception: the loader's error instead of this batch. Other ranks raise RuntimeError.
        """
        # Free the previous batch before anything is allocated for later batches.
        self._current = None
        self._check()
        self._accept_batch()
        # Usually only the first call reads here; ``exchange`` reads later batches.
        while len(self._waiting) < 2 and not self.has_ended:
            self._read(iterator)
            self._accept_batch()
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
            self._write_check = _WriteCheck(current.describe_new_write(), self._axis, self._device)
        return current.batch

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Enclose the forward pass: sharded modules take the results of lookups in flight."""
        for name, module in self._modules.items():
            module.ahead = partial(self._take_lookup, name, module)
        try:
            yield
        finally:
            seen, self._seen = self._seen, []
            for module in self._modules.values():
                module.ahead = None
        if self._calls is None and self._current is not None:
            self._calls = self._find_inputs(seen, self._current.batch)

    def exchange(self, iterator: Iterator[Any]) -> None:
        """Start the next batch's ID exchange, and read the batch after it from the loader.

        Call this method between forward and backward pass.

        Raises:
            ValueError: on some rank, this batch was written to after the loader had returned it and before
                ``next`` did. Raised on every rank.
        """
        self._check()
        if self._waiting:
            self._waiting[0].send_ids()
        if self._status is None and not self.has_ended and len(self._waiting) < 2:
            self._read(iterator)

    def look_up(self, is_ready: Callable[[Collection], bool] | None = None) -> None:
        """Look up the next batch's rows, and start the lookups of the batch after it.

        Call this method after the tables have been updated. If a fused table is updated again afterward, the
        forward pass looks up the table's rows again.

        Args:
            is_ready: selects the modules whose tables are up to date; None: all modules.
        """
        if self._waiting:
            self._waiting[0].send_embeddings(is_ready or (lambda _: True))
        self._accept_batch()

    def look_up_before_update(self) -> None:
        """Look up the next batch's rows before this batch's update, and use them in spite of the update."""
        if self._waiting:
            self._waiting[0].send_ids()
            self._waiting[0].send_embeddings(lambda _: True, keep_result=True)

    def reset(self) -> None:
        """Drop all batches in flight and errors. Call this method on all ranks."""
        self._current = self._status = self._write_check = self._failure = None
        self._waiting.clear()
        self.has_ended = False

    def _take_lookup(
        self, name: str, module: Collection, features: KeyedJaggedTensor
    ) -> LazyAwaitable[Any] | None:
        """Return the result of the lookup in flight for this module call, or None.

        `forward` installs this method as the modules' hook. In the first forward pass, it also records the
        call.
        """
        if self._calls is None:
            self._seen.append((name, module, features))
        return None if self._current is None else self._current.take(module, features)

    def _find_inputs(self, seen: list[tuple[str, Collection, KeyedJaggedTensor]], batch: Any) -> list[Call]:
        """Find the inputs of recorded calls in the batch.

        Warns, or raises if strict, about those not found.
        """
        calls = [Call(name, module, path_to(batch, features)) for name, module, features in seen]
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
        """Finish the write check that ``next`` started, if it is in flight."""
        check, self._write_check = self._write_check, None
        if check is not None:
            check.finish()

    def _read(self, iterator: Iterator[Any]) -> None:
        """Read a batch from the loader, and start the status exchange.

        A loader error is part of the status.
        """
        batch = error = None
        try:
            batch = BatchInFlight(self._mover.move_batch(next(iterator)))
        except StopIteration:
            pass
        except Exception as caught:
            error = caught
        has_input = [
            batch is not None
            and call.path is not None
            and isinstance(object_at(batch.batch, call.path), KeyedJaggedTensor)
            for call in self._calls or ()
        ]
        self._status = _StatusExchange(batch, has_input, error, self._axis, self._device)
        del error  # a cycle through the traceback and this frame would keep exchanges in flight alive

    def _accept_batch(self) -> None:
        """Finish the status exchange, and start the new batch's lookups if all ranks have a batch."""
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
                    batch.route(call.module, object_at(batch.batch, call.path))

    def _end(self, decision: _Decision) -> None:
        """Record that no batch follows, and the error if ranks failed or have uneven numbers of batches."""
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
    """Return the ranks of a DistributedModelParallel in the model, by default all ranks."""
    for module in model.modules():
        if isinstance(module, DistributedModelParallel):
            return module.env.world
    return default_env().world


def _raise(error: BaseException) -> NoReturn:
    """Raise the error without leaving a reference to it in this frame.

    The reference would form a cycle with the traceback. The cycle would keep exchanges in flight alive, and
    other ranks would keep their messages.
    """
    try:
        raise error
    finally:
        del error
