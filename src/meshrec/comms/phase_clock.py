"""Training step time by phase on this rank, measured while a recorder is active."""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import TracebackType
from typing import NamedTuple

import torch

DENSE = "dense"
"""Phase name for time outside the tables' phases: dense model, dense optimizer, everything else."""

OFF = nullcontext()
recorders: list["Recorder"] = []
"""The active recorder, or empty. Callers write ``with phase(...) if recorders else OFF``, which costs nothing
when inactive.
"""


@contextmanager
def record_phases(*, device: torch.device | None = None, overlap: bool = True) -> Iterator[dict[str, float]]:
    """Record a step. When the block ends, the yielded dict holds seconds by phase.

    Phases are those of ``meshrec.planner.estimators.PHASES`` that occurred, and ``"dense"`` for the remaining
    time; they sum to the block's duration. Sharded modules are not timed outside such a block.

    Args:
        device: model device. On CUDA, times are measured with events on the current stream, and the end of
            the block synchronizes.
        overlap: False waits for every collective where it starts, so the phase includes the whole exchange
            instead of the part not hidden by other work. Planner estimates refer to these times. The step
            takes longer.

    Raises:
        ValueError: nested inside another such block.

    Example::

        with record_phases() as seconds:
            loss = torch.ones(2, requires_grad=True).sum()
            loss.backward()
        assert set(seconds) == {"dense"}
    """
    if recorders:
        raise ValueError("record_phases is inside another record_phases: end the outer block first.")
    recorder = Recorder(on_cuda=device is not None and device.type == "cuda", overlap=overlap)
    recorders.append(recorder)
    try:
        yield recorder.seconds
    finally:
        recorders.clear()
        recorder.finish()


def phase(name: str) -> AbstractContextManager[None]:
    """Attribute the time inside to this phase, except nested phases. Requires an active recorder."""
    return _RecordedPhase(recorders[0], name)


class _Mark(NamedTuple):
    """Start of ``phase``; ``stamp`` is in seconds, or a CUDA event."""

    phase: str
    stamp: float | torch.cuda.Event


class Recorder:
    """Phase starts of a step. Without ``overlap``, callers wait for collectives where they start."""

    def __init__(self, *, on_cuda: bool, overlap: bool) -> None:
        self.seconds: dict[str, float] = {}
        self.overlap = overlap
        self._on_cuda = on_cuda
        self._marks: list[_Mark] = []
        self._nested: list[str] = []
        self.enter(DENSE)

    def enter(self, name: str) -> None:
        """Start phase ``name``."""
        self._nested.append(name)
        self._mark(name)

    def leave(self) -> None:
        """Return to the enclosing phase."""
        self._nested.pop()
        self._mark(self._nested[-1])

    def finish(self) -> None:
        """Sum the seconds by phase."""
        self._mark(DENSE)
        if self._on_cuda:
            # Event times can only be read after the events have completed.
            torch.cuda.synchronize()
        for mark, following in zip(self._marks, self._marks[1:], strict=False):
            seconds = _between(mark.stamp, following.stamp)
            self.seconds[mark.phase] = self.seconds.get(mark.phase, 0.0) + seconds

    def _mark(self, name: str) -> None:
        stamp: float | torch.cuda.Event = time.perf_counter()
        if self._on_cuda:
            stamp = torch.cuda.Event(enable_timing=True)
            stamp.record()
        self._marks.append(_Mark(name, stamp))


class _RecordedPhase(AbstractContextManager[None]):
    """Context manager for a recorded phase."""

    def __init__(self, recorder: Recorder, name: str) -> None:
        self._recorder, self._name = recorder, name

    def __enter__(self) -> None:
        self._recorder.enter(self._name)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._recorder.leave()


def _between(first: float | torch.cuda.Event, second: float | torch.cuda.Event) -> float:
    if isinstance(first, torch.cuda.Event):
        assert isinstance(second, torch.cuda.Event)
        return float(first.elapsed_time(second)) / 1e3
    assert isinstance(second, float)
    return second - first
