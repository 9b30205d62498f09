"""How an error on a single rank between two collectives reaches the ranks waiting for this rank.

[Note: a rank that fails alone]

Lookups and updates may run out of memory on a single rank. Agreement on errors there would cost a collective
per step. Instead the rank announces the error in the process group's store (``announced_on_failure``). A rank
waiting for a CPU collective polls the store twice a second, and raises the same error without waiting for the
timeout.

- An announcement has the count of collectives started by the rank. Ranks waiting for a later collective
  raise the error.
- Programs may catch an error raised on all ranks, and continue. A rank with an announced error therefore
  waits at its next collective until the others have announced an error at the same collective. If they have
  not after 30 s, the group rejects further collectives: a rank out of step would exchange wrong rows.
- After a lone failure the ranks are out of step. Ranks receiving the error announce this, and the group
  rejects further collectives.
- Errors agreed on by the ranks (``combined``) are not announced.
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
"""Exception types kept on other ranks; subclasses before base classes."""
POLL_SECONDS = 0.5  # interval at which a waiting rank reads the store
_SAME_ERROR_SECONDS = 30.0  # time for all ranks to announce a common error
_STORE_SECONDS = 3.0  # time for the store to answer
_AGREED = "is_agreed"
_lost: "WeakKeyDictionary[dist.ProcessGroup, str]" = WeakKeyDictionary()
"""Lone failure message, for groups rejecting collectives after the failure."""


class Local:
    """State of this rank: collectives it has started, and errors it has announced. Never instantiated."""

    num_started = 0
    """Started collective count, over all groups."""
    failed_at: ClassVar[list[int]] = []
    """``num_started`` at every error on this rank."""
    has_failed = False
    """Whether any rank has announced an error. Collectives then check the group first."""
    is_uncertain = False
    """Whether this rank must still check whether other ranks announced the rank's last error, too.

    Set by `announce`, cleared by `check_group`.
    """


class _Announcement(NamedTuple):
    """A rank's store entry: error positions, the last error, and whether another rank raised it."""

    failed_at: list[int]
    kind: str
    text: str
    is_lost: bool

    def error(self) -> Exception:
        """Return the last error as an exception."""
        return {kind.__name__: kind for kind in KINDS}.get(self.kind, RuntimeError)(self.text)


class CollectiveError(RuntimeError):
    """A collective did not finish: a peer died, hung, or left."""


def sendable(error: Exception, kinds: Sequence[type[Exception]] = KINDS) -> Exception:
    """Return an error other ranks can unpickle: with a type in ``kinds``, or else a RuntimeError.

    A RuntimeError names the original type.
    """
    for kind in kinds:
        if isinstance(error, kind):
            return kind(str(error) or type(error).__name__)
    return RuntimeError(f"{type(error).__name__}: {error}")


def combined(
    errors: Mapping[int, Exception], size: int, kinds: Sequence[type[Exception]] = KINDS
) -> Exception:
    """Combine errors from several ranks. The result has the common type if there is one, else RuntimeError.

    Args:
        errors: error per failed rank.
        size: rank count. Equal errors on all ranks are reported once.
        kinds: allowed types, subclasses before base classes.
    """
    shared = [kind for kind in kinds if all(isinstance(error, kind) for error in errors.values())]
    texts = list(map(str, errors.values()))
    if len(texts) < size or len(set(texts)) > 1:
        texts = [f"rank {rank}: {text}" for rank, text in zip(errors, texts, strict=True)]
    else:
        del texts[1:]
    return as_agreed((shared or [RuntimeError])[0]("\n".join(texts)))


def as_agreed(error: Exception) -> Exception:
    """Mark an error as raised on all ranks, so it is not announced. Returns the error."""
    error.__dict__[_AGREED] = True
    return error


def announced_on_failure(stage: F) -> F:
    """Decorator: announce a function's exceptions to other ranks; see [Note: a rank that fails alone]."""

    @functools.wraps(stage)
    def run(*arguments: Any, **options: Any) -> Any:
        try:
            return stage(*arguments, **options)
        except Exception as error:
            if _AGREED not in error.__dict__ and not isinstance(error, CollectiveError):
                announce(error)
            raise

    return run  # type: ignore[return-value]


def announce(error: Exception, *, is_lost: bool = False) -> None:
    """Announce an error to the other ranks in the default group.

    Args:
        error: error to announce.
        is_lost: whether another rank failed alone with this error, so the group must reject collectives.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    sent = sendable(error)
    Local.failed_at.append(Local.num_started)
    Local.has_failed, Local.is_uncertain = True, not is_lost
    entry = json.dumps(_Announcement(Local.failed_at, type(sent).__name__, str(sent), is_lost))
    key = _key(dist.get_rank())
    _ask_store(lambda store: store.set(key, entry))


def count_start(group: dist.ProcessGroup) -> None:
    """Count a collective started by this rank. If an error was announced, call `check_group` first.

    The collectives in every step inline this function.

    Raises:
        CollectiveError: a rank in the group has failed alone.
    """
    if Local.has_failed:
        check_group(group)
    Local.num_started += 1


def check_group(group: dist.ProcessGroup) -> None:
    """Check whether the ranks in a group are still in step, before a collective.

    If this rank has announced an error since the last check, the call waits until all other ranks have
    announced an error at the same collective. If a rank has not within ``_SAME_ERROR_SECONDS``, or
    reports a lone failure, the group rejects this and all further collectives.

    Raises:
        CollectiveError: a rank has failed alone, so the group rejects collectives.
    """
    if Local.is_uncertain:
        Local.is_uncertain = False
        _await_same_error(group)
    if _lost and group in _lost:
        raise CollectiveError(
            f"rank {dist.get_rank()}: no collective can run after a rank has failed alone ({_lost[group]}). "
            "Restart all ranks from the last checkpoint."
        )


def lone_failure(group: dist.ProcessGroup | None) -> Exception | None:
    """Return the combined error from other ranks which failed alone, or None. After an error the group
    rejects collectives.
    """
    ranks = dist.get_process_group_ranks(group)
    errors = _lone_errors(ranks)
    if not errors:
        return None
    error = combined(errors, len(ranks))
    if group is not None and group not in _lost:
        _lost[group] = str(error)
        announce(error, is_lost=True)
    return error


class Listener:
    """Reads other ranks' announcements while this rank waits for them.

    Args:
        ranks: ranks in the awaited collective.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self._ranks = ranks
        self._next = time.monotonic() + POLL_SECONDS

    def check(self) -> None:
        """Raise RuntimeError if a rank has failed alone.

        Reads the store at most once per ``POLL_SECONDS``.
        """
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + POLL_SECONDS
        if errors := _lone_errors(self._ranks):
            ranks = ", ".join(map(str, errors))
            raise RuntimeError(f"rank {ranks} has failed. See the log of that rank for its error.")


def _await_same_error(group: dist.ProcessGroup) -> None:
    """Wait until all other ranks have announced an error at this rank's position.

    If not, reject the group.
    """
    ranks, local_position = dist.get_process_group_ranks(group), Local.failed_at[-1]
    deadline = time.monotonic() + _SAME_ERROR_SECONDS
    while time.monotonic() < deadline:
        entries = _announcements(ranks)
        if any(entry.is_lost for entry in entries.values()):
            _lost[group] = "this rank"
            return
        if sum(local_position in entry.failed_at for entry in entries.values()) == len(ranks) - 1:
            return
        time.sleep(0.02)
    entries = _announcements(ranks)
    failed = [rank for rank, entry in entries.items() if local_position in entry.failed_at]
    silent = sorted(set(ranks) - {dist.get_rank(), *failed})
    _lost[group] = f"this rank; ranks {silent} did not report the same error within {_SAME_ERROR_SECONDS:g} s"


def _lone_errors(ranks: Sequence[int]) -> dict[int, Exception]:
    """Return errors from ranks which failed before a collective started by this rank, by rank.

    Errors at a position where this rank failed too are left out.
    """
    return {
        rank: entry.error()
        for rank, entry in _announcements(ranks).items()
        if entry.failed_at[-1] < Local.num_started
        and entry.failed_at[-1] not in Local.failed_at
        and not entry.is_lost
    }


def _key(rank: int) -> str:
    """Return the store key for a rank's announcement."""
    return f"meshrec/error/{rank}"


def _announcements(ranks: Sequence[int]) -> dict[int, _Announcement]:
    """Return other ranks' announcements, by rank."""
    me, entries = dist.get_rank(), dict[int, _Announcement]()

    def ask(store: Any) -> None:
        for rank in ranks:
            if rank != me and store.check([_key(rank)]):
                entries[rank] = _Announcement(*json.loads(store.get(_key(rank))))

    _ask_store(ask)
    return dict(entries)


def _ask_store(question: Callable[[Any], object]) -> None:
    """Call a function with the default group's store, in a daemon thread: it hangs if the host is stopped."""
    store = dist.distributed_c10d._get_default_store()

    def ask() -> None:
        with contextlib.suppress(RuntimeError):
            question(store)

    thread = threading.Thread(target=ask, name="errors of ranks", daemon=True)
    thread.start()
    thread.join(_STORE_SECONDS)
