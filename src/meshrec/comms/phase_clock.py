"""Seconds of each phase of a training step on this rank, measured while a recorder is in use."""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import TracebackType
from typing import NamedTuple

import torch

DENSE = "dense"
"""The name of all time outside the tables' phases: the dense model, its optimizer, and the rest."""

OFF = nullcontext()
recorders: list["Recorder"] = []
"""The recorder in use: one or none. Callers write ``with phase(...) if recorders else OFF``, which calls
nothing while nothing is recorded."""


@contextmanager
def record_phases(*, device: torch.device | None = None, overlap: bool = True) -> Iterator[dict[str, float]]:
    """Record one step. When the block ends, the dict that it yields holds the seconds by phase.

    The phases are those of ``meshrec.planner.estimators.PHASES`` that occurred, and ``"dense"``, the rest:
    together they are the time that the block took. What sharded modules do outside of such a block is not
    timed and costs nothing::

        with record_phases() as seconds:
            loss = model(batch)
            loss.backward()
            optimizer.step()
        write_phases(path, [PhaseTime(phase, rank, s, step) for phase, s in seconds.items()])

    Args:
        device: where the model runs. On CUDA the times are those of the current stream, by its events, and
            the end of the block waits for the device.
        overlap: False waits for every collective where it starts, so that its phase shows the whole of it,
            not only what no other work could hide: the times that a planner's estimate speaks of. The step
            takes longer.

    Raises:
        ValueError: inside another such block.
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
    """Count the time inside for this phase, less that of phases inside it. A recorder must be in use."""
    return _RecordedPhase(recorders[0], name)


class _Mark(NamedTuple):
    """The moment at which ``phase`` begins; ``stamp`` is in seconds, or an event of the device."""

    phase: str
    stamp: float | torch.cuda.Event


class Recorder:
    """The marks of one step. Without ``overlap``, collectives are waited for where they start."""

    def __init__(self, *, on_cuda: bool, overlap: bool) -> None:
        self.seconds: dict[str, float] = {}
        self.overlap = overlap
        self._on_cuda = on_cuda
        self._marks: list[_Mark] = []
        self._nested: list[str] = []
        self.enter(DENSE)

    def enter(self, name: str) -> None:
        """Begin the phase ``name``."""
        self._nested.append(name)
        self._mark(name)

    def leave(self) -> None:
        """Return to the phase that was before."""
        self._nested.pop()
        self._mark(self._nested[-1])

    def finish(self) -> None:
        """Add up the seconds of each phase."""
        self._mark(DENSE)
        if self._on_cuda:
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
    """A phase that is being recorded."""

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
