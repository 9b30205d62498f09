"""Start the lookups for later batches while the current batch computes.

While batch i computes, the ranks exchange IDs for batch i + 1, and the loader reads batch i + 2. The model is
not traced. The first forward pass shows which object in the batch is the input to which sharded module. In
later batches, lookups for the objects at the same paths start before the forward pass. If a module is called
with exactly this object, it takes the result of the started lookup. Any other call runs the plain lookup.
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
from meshrec.comms.failures import combined_error
from meshrec.comms.mesh import Axis, default_env, group_device
from meshrec.distributed.awaitable import LazyAwaitable
from meshrec.distributed.embedding_modules import ShardedEmbeddingBagCollection, ShardedEmbeddingCollection
from meshrec.model_parallel import DistributedModelParallel
from meshrec.pipeline.in_flight import BatchInFlight, Call, Collection, Mover, object_at, path_to
from meshrec.sparse import KeyedJaggedTensor

_logger = logging.getLogger("meshrec")
Uneven = Literal["stop", "error"]
# Status which a rank sends for its next batch: 0 (it has a batch), or one of these.
_END, _FAILED = 1, 2


class _Decision(NamedTuple):
    """Result of a status exchange about the batches just read by all ranks. Equal on all ranks."""

    continues: bool
    """Whether all ranks have a batch."""
    has_input: list[bool]
    """For every call of a sharded module, whether the batches on all ranks contain the input."""
    error: Exception | None
    """Error from a loader on some rank, to be raised once all earlier batches are trained."""
    ended: list[int]
    """Ranks whose loaders have no more batches."""


class _StatusExchange:
    """Started exchange in which the ranks tell each other whether they have a next batch, and with which
    inputs.

    The constructor starts the exchange, and ``decide`` waits for it.

    Args:
        batch: batch from this rank's loader; None at the end of the data and after an error.
        has_input: for every call of a sharded module, whether the batch contains the input.
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
        """Wait for the status of all ranks, and return the decision. Collective.

        If a loader has failed, also exchanges the error messages.
        """
        words = self._words.wait().cpu()
        # An input counts only if all ranks have it, because lookups are collective.
        statuses, has_input = words[:, 0].tolist(), words[:, 1:].bool().all(0).tolist()
        error = self._error
        if _FAILED in statuses and self._axis.size > 1:
            error = combined_error(
                gather_errors(self._error, self._axis, "errors of loaders"), self._axis.size
            )
            # Keep this rank's traceback.
            error.__cause__ = self._error
        ended = [rank for rank, status in enumerate(statuses) if status == _END]
        return _Decision(not any(statuses), has_input, error, ended)


class _WriteCheck:
    """Started exchange in which the ranks tell each other whether their batch was changed after it was read.

    The constructor starts the exchange, and ``finish`` waits for it.
    """

    def __init__(self, change: str | None, axis: Axis, device: torch.device) -> None:
        self._change, self._axis = change, axis
        word = torch.tensor([change is not None], dtype=torch.int64, device=device)
        self._words = all_gather(word, axis, "checks of batches")

    def finish(self) -> None:
        """Wait for all ranks, and raise ValueError on every rank if the batch was changed on any rank."""
        if bool(self._words.wait().any()):
            # Slow, but only after a write.
            texts = enumerate(gather_objects(self._change, self._axis, "changes of batches"))
            changes = "; ".join(f"rank {rank}: {text}" for rank, text in texts if text is not None)
            raise ValueError(f"{changes}. Give every batch tensors of its own.")


class Lookahead:
    """Starts embedding lookups before the model needs them, in a training loop written by the user::

        batch = lookahead.next(iterator)  # StopIteration at the end
        with lookahead.forward():
            loss = ...
        lookahead.exchange(iterator)
        loss.backward()
        optimizer.step()
        lookahead.look_up()

    All methods are collective. If a loop leaves out calls, for example in evaluation or after an exception,
    it only loses overlap. Do not leave out ``exchange`` in training: it raises, before any update, if a batch
    was changed after the loader had returned it. `TrainPipeline` is a ready training loop.

    Args:
        model: model with sharded modules at any depth.
        device: device to which batches are copied; None: batches are not copied.
        uneven: what to do if ranks have different numbers of batches. ``"stop"`` ends all ranks after the
            last batch which all ranks have. ``"error"`` raises ValueError there and names the ranks.
        strict: whether to raise ValueError after the first forward pass if the lookup of some module cannot
            start early. If False, a log line names the module.
    """

    def __init__(
        self, model: nn.Module, *, device: torch.device | None, uneven: Uneven, strict: bool
    ) -> None:
        if uneven not in ("stop", "error"):
            raise ValueError(f"uneven must be 'stop' or 'error', got {uneven!r}.")
        self._uneven, self._strict = uneven, strict
        self._axis = _axis_of(model)
        # Device for status exchanges, which may differ from the batches' device.
        self._device = group_device(self._axis.group)
        # Sharded modules by their names in the model.
        self._modules: dict[str, Collection] = {
            name: module
            for name, module in model.named_modules()
            if isinstance(module, ShardedEmbeddingBagCollection | ShardedEmbeddingCollection)
        }
        # Copies every batch once, when it is read.
        self._mover = Mover(device)
        # Module calls and where their inputs are in a batch. None until the first forward pass, then fixed.
        self._calls: list[Call] | None = None
        # Calls recorded during a forward pass while ``_calls`` is None.
        self._seen: list[tuple[str, Collection, KeyedJaggedTensor]] = []
        # The batch in training, from a call of ``next`` to the following call.
        self._current: BatchInFlight | None = None
        # Batches after the current batch, at most two. They have been read, and all ranks have them.
        self._waiting: deque[BatchInFlight] = deque()
        # Exchanges in flight: a batch's status until ``_accept_batch``, and a write check until ``_check``.
        self._status: _StatusExchange | None = None
        self._write_check: _WriteCheck | None = None
        # Loader error to raise after the batches in flight. Set by ``_end``, until ``next`` raises it.
        self._failure: Exception | None = None
        self.has_ended = False
        """Whether the loader on some rank has no batch after the batches already read."""

    @property
    def is_last(self) -> bool:
        """Whether the current batch is known to be the last batch.

        The ``look_up`` call for the batch before the last batch finds out.
        """
        return self.has_ended and not self._waiting

    def next(self, iterator: Iterator[Any]) -> Any:
        """Return the next batch to train, already copied to the device. Collective.

        Args:
            iterator: iterator over the batches of this rank's loader.

        Raises:
            StopIteration: after the last batch, on every rank. The following call reads from ``iterator``
                again.
            ValueError: this batch has invalid IDs on some rank. All ranks raise it.
            Exception: the loader has failed instead of returning this batch. Other ranks raise RuntimeError.
        """
        # Free the previous batch before anything is allocated for later batches.
        self._current = None
        self._check()
        self._accept_batch()
        # Usually only the first call reads here; ``exchange`` reads later batches.
        # Two: the batch to return, and the next batch, whose IDs are exchanged during this step.
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
        # The error of an early lookup is raised when its batch is due, so all earlier batches are trained.
        if current.error is not None:
            _raise(current.take_error())
        if self._waiting:
            self._waiting[0].start_reads()
        # Without lookups, nothing was read early, so later writes are harmless. All ranks have the same
        # lookups, so all take part in the exchange or none does.
        if current.lookups:
            self._write_check = _WriteCheck(current.describe_new_write(), self._axis, self._device)
        return current.batch

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Context for the forward pass: sharded modules take the results of lookups already started."""
        for name, module in self._modules.items():
            # Only within the context, so a forward pass elsewhere does not take lookups.
            module.take_lookup = partial(self._take_lookup, name, module)
        try:
            yield
        finally:
            seen, self._seen = self._seen, []
            for module in self._modules.values():
                module.take_lookup = None
        if self._calls is None and self._current is not None:
            self._calls = self._find_inputs(seen, self._current.batch)

    def exchange(self, iterator: Iterator[Any]) -> None:
        """Start the ID exchange for the next batch, and read the batch after it from the loader. Collective.

        Call this method between the forward and the backward pass.

        Args:
            iterator: as for ``next``.

        Raises:
            ValueError: on some rank, the current batch was changed after the loader had returned it and
                before ``next`` returned it. All ranks raise it.
        """
        self._check()
        if self._waiting:
            self._waiting[0].send_ids()
        if self._status is None and not self.has_ended and len(self._waiting) < 2:
            self._read(iterator)

    def look_up(self, is_ready: Callable[[Collection], bool] | None = None) -> None:
        """Look up the rows for the next batch, and start the lookups for the batch after it. Collective.

        Call this method after the tables have been updated. If a fused table is updated again later, the
        forward pass looks up the rows again.

        Args:
            is_ready: returns whether a module's tables are up to date; None: all are.
        """
        if self._waiting:
            self._waiting[0].send_embeddings(is_ready or (lambda _: True))
        self._accept_batch()

    def look_up_before_update(self) -> None:
        """Look up the rows for the next batch before the current batch updates the tables. Collective.

        The next forward pass uses these rows although the update changes them (semi-synchronous training).
        """
        if self._waiting:
            self._waiting[0].send_ids()
            self._waiting[0].send_embeddings(lambda _: True, keep_result=True)

    def reset(self) -> None:
        """Drop all batches which have been read, and pending errors. Call this method on all ranks."""
        self._current = self._status = self._write_check = self._failure = None
        self._waiting.clear()
        self.has_ended = False

    def _take_lookup(
        self, name: str, module: Collection, features: KeyedJaggedTensor
    ) -> LazyAwaitable[Any] | None:
        """Return the result of the lookup started for this module call, or None if there is none.

        `forward` sets this method as ``take_lookup`` in the modules. In the first forward pass, it also
        records the call.
        """
        if self._calls is None:
            self._seen.append((name, module, features))
        return None if self._current is None else self._current.take(module, features)

    def _find_inputs(self, seen: list[tuple[str, Collection, KeyedJaggedTensor]], batch: Any) -> list[Call]:
        """Search the batch for the input tensor of every call, and return the calls with the input's path.

        If a module has no input in the batch, log a warning, or with ``strict`` raise ValueError.
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
        """Wait for the exchange started by ``next``, if any, and raise if the batch was changed."""
        check, self._write_check = self._write_check, None
        if check is not None:
            check.finish()

    def _read(self, iterator: Iterator[Any]) -> None:
        """Read a batch from the loader, and start the status exchange for it.

        An error from the loader is not raised, but sent as status.
        """
        batch = error = None
        try:
            batch = BatchInFlight(self._mover.move_batch(next(iterator)))
        # The data has ended on this rank, which the status tells the other ranks.
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
        """Wait for the status exchange. If all ranks have a batch, start lookups, else record the end."""
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
            # Routing reads the IDs, so the copy must have completed.
            self._mover.wait(batch.batch)
            for call, has_input in zip(self._calls, decision.has_input, strict=True):
                if has_input and call.path is not None:
                    batch.route(call.module, object_at(batch.batch, call.path))

    def _end(self, decision: _Decision) -> None:
        """Record that no batch follows, and the error to raise after the last batch, if any.

        There is an error if a loader has failed. With ``uneven="error"`` there is also an error if some ranks
        still have a batch. Otherwise these ranks log a warning that they drop the batch.
        """
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
    """Return the ranks which share the model: those of its DistributedModelParallel, or else all ranks."""
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
