"""Tell waiting ranks about an error which a single rank has raised between two collectives.

[Note: a rank that fails alone]

Lookups and updates may run out of memory on a single rank. Agreeing on errors there would cost a collective
per step. Instead the failing rank announces the error in the process group's store
(``announced_on_failure``). A rank which waits for a CPU collective polls the store twice a second, and raises
the same error without waiting for the timeout.

- The *position* of an error is the number of collectives the failing rank had started. An announcement
  contains it. Ranks which wait for a later collective raise the error.
- A program may catch an error which all ranks have raised, and continue. Therefore a rank which has announced
  an error waits at its next collective until all other ranks have announced an error at the same position. If
  they have not done so after 30 s, the process group rejects further collectives, because a rank out of step
  would exchange wrong rows.
- If a rank has failed alone, the ranks are out of step. Ranks which receive the error announce this, and the
  process group rejects further collectives.
- An error on which the ranks have agreed (``combined_error``) is not announced.
"""

import contextlib
import functools
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch.distributed as dist

from meshrec.ops.operators import InputError, OutOfMemoryError

F = TypeVar("F", bound=Callable[..., Any])

KINDS: tuple[type[Exception], ...] = (InputError, ValueError, OutOfMemoryError, MemoryError)
"""Exception types which keep their type when they are sent to other ranks; subclasses before base classes."""
POLL_SECONDS = 0.5  # interval at which a waiting rank reads the store
_SAME_ERROR_SECONDS = 30.0  # time for all ranks to announce a common error
_STORE_SECONDS = 3.0  # time for the store to answer
# Name of the attribute which marks an exception as raised on all ranks.
_AGREED = "is_agreed"
# Weak, so that this dict does not keep destroyed process groups alive.
_lost: "WeakKeyDictionary[dist.ProcessGroup, str]" = WeakKeyDictionary()
"""Process groups which reject collectives after a rank has failed alone, with the failure message."""


class FailureState:
    """State of this process: how many collectives it has started, and which errors it has announced.

    The state is in class attributes. The class is not instantiated.
    """

    num_started = 0
    """Number of collectives started so far, over all process groups."""
    failed_at: ClassVar[list[int]] = []
    """Value of ``num_started`` at each error which this rank has announced."""
    has_failed = False
    """Whether this rank has announced an error. Collectives then call `check_group` before they start."""
    is_uncertain = False
    """Whether this rank must still find out if other ranks have raised its last error, too.

    Set by `announce`, cleared by `check_group`.
    """


class _Announcement(NamedTuple):
    """Entry in torch's key-value store by which a rank announces an error to the others."""

    failed_at: list[int]
    """Positions of all errors on the rank. A position is the number of collectives which the rank had started
    before the error.
    """
    kind: str
    """Type name of the last error."""
    text: str
    """Message of the last error."""
    is_lost: bool
    """Whether the rank only passes on an error with which another rank has failed alone."""

    def error(self) -> Exception:
        """Return the last error as an exception."""
        # Only known types are created, by name.
        return {kind.__name__: kind for kind in KINDS}.get(self.kind, RuntimeError)(self.text)


class CollectiveError(RuntimeError):
    """A collective did not finish: a peer died, hung, or left."""


def sendable(error: Exception, kinds: Sequence[type[Exception]] = KINDS) -> Exception:
    """Return a copy of an error which other ranks can unpickle.

    Args:
        kinds: exception types to keep. An error of another type becomes a RuntimeError, whose message names
            the type.
    """
    for kind in kinds:
        if isinstance(error, kind):
            return kind(str(error) or type(error).__name__)
    return RuntimeError(f"{type(error).__name__}: {error}")


def combined_error(
    errors: Mapping[int, Exception], size: int, kinds: Sequence[type[Exception]] = KINDS
) -> Exception:
    """Combine the errors from several ranks into one error, which all ranks raise.

    The result has the first type in ``kinds`` of which all errors are instances. Without a common type, it is
    a RuntimeError. The message lists every failed rank with its error. If all ranks have the same error
    message, the result has this message, without ranks.

    Args:
        errors: errors of the failed ranks, by rank.
        size: number of ranks.
        kinds: allowed types, subclasses before base classes.
    """
    shared = [kind for kind in kinds if all(isinstance(error, kind) for error in errors.values())]
    texts = list(map(str, errors.values()))
    if len(texts) < size or len(set(texts)) > 1:
        texts = [f"rank {rank}: {text}" for rank, text in zip(errors, texts, strict=True)]
    else:
        del texts[1:]
    # The first common type is the most specific, because subclasses come first.
    return as_agreed((shared or [RuntimeError])[0]("\n".join(texts)))


def as_agreed(error: Exception) -> Exception:
    """Mark an error as raised on all ranks, so that it is not announced, and return it."""
    error.__dict__[_AGREED] = True
    return error


def announced_on_failure(stage: F) -> F:
    """Decorator: if the function raises, announce the error to other ranks before it propagates.

    See [Note: a rank that fails alone].
    """

    @functools.wraps(stage)
    def run(*arguments: Any, **options: Any) -> Any:
        try:
            return stage(*arguments, **options)
        except Exception as error:
            # An error on which all ranks have agreed is raised everywhere anyway. A CollectiveError is the
            # consequence of another failure.
            if _AGREED not in error.__dict__ and not isinstance(error, CollectiveError):
                announce(error)
            raise

    return run  # type: ignore[return-value]


def announce(error: Exception, *, is_lost: bool = False) -> None:
    """Announce an error to the other ranks, through the store of the default process group.

    Args:
        is_lost: whether another rank has failed alone with this error, so the group must reject collectives.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    sent = sendable(error)
    FailureState.failed_at.append(FailureState.num_started)
    FailureState.has_failed, FailureState.is_uncertain = True, not is_lost
    # JSON, so other ranks need not unpickle it.
    entry = json.dumps(_Announcement(FailureState.failed_at, type(sent).__name__, str(sent), is_lost))
    key = _key(dist.get_rank())
    _ask_store(lambda store: store.set(key, entry))


def count_start(group: dist.ProcessGroup) -> None:
    """Count a collective which this rank is about to start.

    If this rank has announced an error, call `check_group` first. The collectives in every training step
    contain this code inline, to save the call.

    Raises:
        CollectiveError: a rank in the group has failed alone.
    """
    if FailureState.has_failed:
        check_group(group)
    FailureState.num_started += 1


def check_group(group: dist.ProcessGroup) -> None:
    """Check, before a collective, that all ranks in a group will start the same collective.

    If this rank has announced an error since the last check, wait for the errors of all other ranks. These
    errors must have the same position, which is the number of collectives before the error. If such an error
    is missing after ``_SAME_ERROR_SECONDS``, or a rank reports that a rank has failed alone, the group
    rejects this and all further collectives.

    Raises:
        CollectiveError: a rank has failed alone, so the group rejects collectives.
    """
    if FailureState.is_uncertain:
        # First, because the outcome is recorded in ``_lost``: later checks must not wait again.
        FailureState.is_uncertain = False
        _await_same_error(group)
    if _lost and group in _lost:
        raise CollectiveError(
            f"rank {dist.get_rank()}: no collective can run after a rank has failed alone ({_lost[group]}). "
            "Restart all ranks from the last checkpoint."
        )


def lone_failure(group: dist.ProcessGroup | None) -> Exception | None:
    """Return the combined error of other ranks which have failed alone; None if no rank has.

    A rank has failed alone if two things hold: it has raised an error before a collective which this rank has
    started, and this rank has not raised an error at the same position. After such an error, ``group``
    rejects all collectives, and this rank passes the error on to its peers.

    Args:
        group: ranks to ask about; None for all ranks.
    """
    ranks = dist.get_process_group_ranks(group)
    errors = _lone_errors(ranks)
    if not errors:
        return None
    error = combined_error(errors, len(ranks))
    if group is not None and group not in _lost:
        _lost[group] = str(error)
        # Other ranks must reject collectives, too.
        announce(error, is_lost=True)
    return error


class Listener:
    """Checks, while this rank waits for a collective, whether another rank has announced an error."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self._ranks = ranks
        # A wait shorter than this never reads the store.
        self._next = time.monotonic() + POLL_SECONDS

    def check(self) -> None:
        """Raise RuntimeError if a rank has failed alone.

        The method may be called often: it reads the store at most once per ``POLL_SECONDS``.
        """
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + POLL_SECONDS
        if errors := _lone_errors(self._ranks):
            ranks = ", ".join(map(str, errors))
            raise RuntimeError(f"rank {ranks} has failed. See the log of that rank for its error.")


def _await_same_error(group: dist.ProcessGroup) -> None:
    """Wait until all other ranks have announced an error at the same position as this rank's last error.

    A position is the number of collectives started before the error. If a rank announces no such error in
    time, let the group reject all further collectives.
    """
    ranks, local_position = dist.get_process_group_ranks(group), FailureState.failed_at[-1]
    deadline = time.monotonic() + _SAME_ERROR_SECONDS
    while time.monotonic() < deadline:
        entries = _announcements(ranks)
        # Another rank already knows that the ranks are out of step.
        if any(entry.is_lost for entry in entries.values()):
            _lost[group] = "this rank"
            return
        # All other ranks have failed at the same position: the ranks are in step.
        if sum(local_position in entry.failed_at for entry in entries.values()) == len(ranks) - 1:
            return
        time.sleep(0.02)
    # Read once more, for the message.
    entries = _announcements(ranks)
    failed = [rank for rank, entry in entries.items() if local_position in entry.failed_at]
    silent = sorted(set(ranks) - {dist.get_rank(), *failed})
    _lost[group] = f"this rank; ranks {silent} did not report the same error within {_SAME_ERROR_SECONDS:g} s"


def _lone_errors(ranks: Sequence[int]) -> dict[int, Exception]:
    """Return the errors of ranks which failed before a collective that this rank has started, by rank.

    Errors at positions where this rank has failed, too, are left out.
    """
    return {
        rank: entry.error()
        for rank, entry in _announcements(ranks).items()
        # A rank that failed later has started every collective for which this rank may wait.
        if entry.failed_at[-1] < FailureState.num_started
        and entry.failed_at[-1] not in FailureState.failed_at
        and not entry.is_lost
    }


def _key(rank: int) -> str:
    """Return the store key for a rank's announcement."""
    return f"meshrec/error/{rank}"


def _announcements(ranks: Sequence[int]) -> dict[int, _Announcement]:
    """Return the announcements of the given ranks, except this rank, by rank."""
    me, entries = dist.get_rank(), dict[int, _Announcement]()

    def ask(store: Any) -> None:
        """Read the announcements from the store into ``entries``."""
        for rank in ranks:
            # Without the check, ``get`` would wait for a rank that announces nothing.
            if rank != me and store.check([_key(rank)]):
                entries[rank] = _Announcement(*json.loads(store.get(_key(rank))))

    _ask_store(ask)
    return dict(entries)


def _ask_store(question: Callable[[Any], object]) -> None:
    """Call ``question`` with the store of the default group, and wait at most ``_STORE_SECONDS`` for it.

    It runs in a daemon thread, because a store call hangs if the process which hosts the store is stopped.
    """
    store = dist.distributed_c10d._get_default_store()

    def ask() -> None:
        """Call ``question``, and ignore errors from the store."""
        # A dead store must not hide the original error.
        with contextlib.suppress(RuntimeError):
            question(store)

    thread = threading.Thread(target=ask, name="errors of ranks", daemon=True)
    thread.start()
    thread.join(_STORE_SECONDS)
