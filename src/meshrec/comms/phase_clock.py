"""Training step time by phase, on this rank. Measured only inside ``record_phases``."""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import TracebackType
from typing import NamedTuple

import torch

DENSE = "dense"
"""Phase for the time outside the table phases: dense model, dense optimizer, everything else."""

OFF = nullcontext()
"""Context manager doing nothing."""
recorders: list["Recorder"] = []
"""The active recorder, or empty. Callers write ``with phase(...) if recorders else OFF``, which costs nothing
while no recorder is active.
"""


@contextmanager
def record_phases(*, device: torch.device | None = None, overlap: bool = True) -> Iterator[dict[str, float]]:
    """Measure a training step. When the context ends, the yielded dict has the seconds per phase.

    The phases are the ones in ``meshrec.planner.estimators.PHASES`` that occurred, and ``"dense"`` for all
    other time. They sum to the context's duration.

    Args:
        device: model device. On CUDA, events on the current stream measure times, and the context exit
            synchronizes.
        overlap: if False, every collective is awaited where it starts. The phase then includes the whole
            exchange, not only the part not hidden by other work. Planner estimates refer to these
            times. The step takes longer.

    Raises:
        ValueError: the context is inside another context.

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
    """Count the time inside the context for a phase, except time in nested phases.

    Needs an active recorder.
    """
    return _RecordedPhase(recorders[0], name)


class _Mark(NamedTuple):
    """Phase start; ``stamp`` is a time in seconds, or a CUDA event."""

    phase: str
    stamp: float | torch.cuda.Event


class Recorder:
    """Records when every phase in a step starts.

    Without ``overlap``, collectives are awaited where they start.
    """

    def __init__(self, *, on_cuda: bool, overlap: bool) -> None:
        self.seconds: dict[str, float] = {}
        self.overlap = overlap
        self._on_cuda = on_cuda
        self._marks: list[_Mark] = []  # in time order
        self._nested: list[str] = []  # phases that are open now, outermost first
        self.enter(DENSE)

    def enter(self, name: str) -> None:
        """Start a phase. It ends with ``leave``."""
        self._nested.append(name)
        self._mark(name)

    def leave(self) -> None:
        """End the present phase, and continue the enclosing phase."""
        self._nested.pop()
        self._mark(self._nested[-1])

    def finish(self) -> None:
        """Compute ``seconds`` from the recorded starts."""
        self._mark(DENSE)
        if self._on_cuda:
            # Event times can only be read after the events have completed.
            torch.cuda.synchronize()
        for mark, following in zip(self._marks, self._marks[1:], strict=False):
            seconds = _between(mark.stamp, following.stamp)
            self.seconds[mark.phase] = self.seconds.get(mark.phase, 0.0) + seconds

    def _mark(self, name: str) -> None:
        """Record phase ``name`` as starting or continuing now."""
        stamp: float | torch.cuda.Event = time.perf_counter()
        if self._on_cuda:
            stamp = torch.cuda.Event(enable_timing=True)
            stamp.record()
        self._marks.append(_Mark(name, stamp))


class _RecordedPhase(AbstractContextManager[None]):
    """Context manager for ``phase``."""

    def __init__(self, recorder: Recorder, name: str) -> None:
        self._recorder, self._name = recorder, name

    def __enter__(self) -> None:
        self._recorder.enter(self._name)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._recorder.leave()


def _between(first: float | torch.cuda.Event, second: float | torch.cuda.Event) -> float:
    """Return the seconds between two stamps."""
    if isinstance(first, torch.cuda.Event):
        assert isinstance(second, torch.cuda.Event)
        return float(first.elapsed_time(second)) / 1e3
    assert isinstance(second, float)
    return second - first
