"""Propagation of an error that a single rank has between two collectives to the ranks waiting for it.

[Note: a rank that fails alone]

Lookups and updates may run out of memory on a single rank. Agreement on errors there would cost a collective
per step. Instead the rank announces the error in the process group's store (``announced_on_failure``). A rank
waiting for a CPU collective polls the store twice a second, and raises the same error without waiting for the
timeout.

- An announcement has the number of collectives its rank had started. Ranks waiting for a later collective
  raise the error.
- Programs may catch an error raised on all ranks, and continue. A rank with an announced error therefore
  waits at its next collective until the others have announced an error at the same collective. If they have
  not after 30 s, the group rejects further collectives: a rank out of step would exchange wrong rows.
- After a lone failure the ranks are out of step. Ranks that received the error announce this, and the group
  rejects further collectives.
- Errors that the ranks agreed on (``combined``) are not announced.
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
"""Exception types preserved across ranks; subclasses before their bases."""
POLL_SECONDS = 0.5
_SAME_ERROR_SECONDS = 30.0
_STORE_SECONDS = 3.0
_AGREED = "is_agreed"
_lost: "WeakKeyDictionary[dist.ProcessGroup, str]" = WeakKeyDictionary()
"""Error per group with a lone failure."""


class Local:
    """Collectives this rank started, and errors it announced."""

    num_started = 0
    """Collectives of all groups."""
    failed_at: ClassVar[list[int]] = []
    """``num_started`` at this rank's errors."""
    has_failed = False
    """Whether an error was announced, here or by another rank, so that collectives check their group."""
    is_uncertain = False
    """Whether this rank has yet to check that the other ranks announced its last error, too.

    Set by `announce`, cleared by `check_group`.
    """


class _Announcement(NamedTuple):
    """Store entry per rank: positions of its errors, the last error, and whether another rank raised it."""

    failed_at: list[int]
    kind: str
    text: str
    is_lost: bool

    def error(self) -> Exception:
        """Return the last error."""
        return {kind.__name__: kind for kind in KINDS}.get(self.kind, RuntimeError)(self.text)


class CollectiveError(RuntimeError):
    """A collective did not finish: a peer died, hung, or left."""


def sendable(error: Exception, kinds: Sequence[type[Exception]] = KINDS) -> Exception:
    """Convert an error to one of ``kinds``, or else to a RuntimeError with the type's name."""
    for kind in kinds:
        if isinstance(error, kind):
            return kind(str(error) or type(error).__name__)
    return RuntimeError(f"{type(error).__name__}: {error}")


def combined(
    errors: Mapping[int, Exception], size: int, kinds: Sequence[type[Exception]] = KINDS
) -> Exception:
    """Combine errors from several ranks into one, with their common type if any, else RuntimeError.

    Args:
        errors: error per failed rank.
        size: rank count. Equal errors on all ranks are reported once.
        kinds: allowed types, subclasses before their bases.
    """
    shared = [kind for kind in kinds if all(isinstance(error, kind) for error in errors.values())]
    texts = list(map(str, errors.values()))
    if len(texts) < size or len(set(texts)) > 1:
        texts = [f"rank {rank}: {text}" for rank, text in zip(errors, texts, strict=True)]
    else:
        del texts[1:]
    return as_agreed((shared or [RuntimeError])[0]("\n".join(texts)))


def as_agreed(error: Exception) -> Exception:
    """Mark an error as raised on all ranks."""
    error.__dict__[_AGREED] = True
    return error


def announced_on_failure(stage: F) -> F:
    """Decorate a function to announce exceptions; see [Note: a rank that fails alone]."""

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
        error: the error.
        is_lost: whether another rank failed alone with this error, so that the group rejects collectives.
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
    """Count a collective started by this rank, after `check_group` if an error was announced.

    The collectives of every step inline this function.

    Raises:
        CollectiveError: a rank in the group has failed alone.
    """
    if Local.has_failed:
        check_group(group)
    Local.num_started += 1


def check_group(group: dist.ProcessGroup) -> None:
    """Before a collective, check that the group's ranks are still in step.

    If this rank has announced an error since the last check, waits until all other ranks have announced an
    error at the same collective. If one has not after ``_SAME_ERROR_SECONDS``, or reports a lone failure, the
    group rejects further collectives.

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
    """Return the combined error of other ranks that failed alone, and reject the group; else None."""
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
    """Polls for announcements while this rank waits for others.

    Args:
        ranks: the collective's ranks.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self._ranks = ranks
        self._next = time.monotonic() + POLL_SECONDS

    def check(self) -> None:
        """Raise RuntimeError if a rank has failed alone. Cheap, so it may be called often."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + POLL_SECONDS
        if errors := _lone_errors(self._ranks):
            ranks = ", ".join(map(str, errors))
            raise RuntimeError(f"rank {ranks} has failed. See the log of that rank for its error.")


def _await_same_error(group: dist.ProcessGroup) -> None:
    """Wait until the other ranks have announced the same error; reject the group if one has not."""
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
    """Return errors of ranks that started fewer collectives, and did not fail where this rank failed."""
    return {
        rank: entry.error()
        for rank, entry in _announcements(ranks).items()
        if entry.failed_at[-1] < Local.num_started
        and entry.failed_at[-1] not in Local.failed_at
        and not entry.is_lost
    }


def _key(rank: int) -> str:
    return f"meshrec/error/{rank}"


def _announcements(ranks: Sequence[int]) -> dict[int, _Announcement]:
    """Return the announcements of other ranks."""
    me, entries = dist.get_rank(), dict[int, _Announcement]()

    def ask(store: Any) -> None:
        for rank in ranks:
            if rank != me and store.check([_key(rank)]):
                entries[rank] = _Announcement(*json.loads(store.get(_key(rank))))

    _ask_store(ask)
    return dict(entries)


def _ask_store(question: Callable[[Any], object]) -> None:
    """Query the default group's store, in a daemon thread that may hang if the store's host is stopped."""
    store = dist.distributed_c10d._get_default_store()

    def ask() -> None:
        with contextlib.suppress(RuntimeError):
            question(store)

    thread = threading.Thread(target=ask, name="errors of ranks", daemon=True)
    thread.start()
    thread.join(_STORE_SECONDS)
