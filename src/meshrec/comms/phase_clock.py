"""Measure how long the phases of a training step take on this rank, inside ``record_phases``."""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import TracebackType
from typing import NamedTuple

import torch

DENSE = "dense"
"""Name of the phase for all time outside the table phases: dense model, dense optimizer, everything else."""

OFF = nullcontext()
"""Context which does nothing, for callers of ``phase``."""
recorders: list["Recorder"] = []
"""A list with the active recorder, or empty. Callers write ``with phase(...) if recorders else OFF``, which
takes almost no time while no recorder is active.
"""


@contextmanager
def record_phases(*, device: torch.device | None = None, overlap: bool = True) -> Iterator[dict[str, float]]:
    """Context: measure a training step by phase. Yields a dict, filled at the end, with seconds by phase
    name.

    The dict contains the phases in ``meshrec.planner.estimators.PHASES`` which have run, and ``"dense"`` for
    all other time. The seconds add up to the duration of the context.

    Args:
        device: device of the model. On CUDA, events on the current stream measure the times, and the end of
            the context synchronizes.
        overlap: if False, every collective is awaited where it starts, and the step takes longer. A phase
            then includes the whole exchange, instead of only the part not hidden by other work. The planner
            estimates these times.

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
    """Context: count the time inside for the phase ``name``, except time in nested phases.

    A recorder must be active.
    """
    return _RecordedPhase(recorders[0], name)


class _Mark(NamedTuple):
    """The time at which a phase starts, or continues because a phase nested in it has ended.

    ``stamp`` is a time in seconds, or on CUDA an event.
    """

    phase: str
    stamp: float | torch.cuda.Event


class Recorder:
    """Record of the times at which the phases of a step start.

    Args:
        on_cuda: whether to record CUDA events instead of host times.
        overlap: whether collectives may overlap with other work; see `record_phases`.

    Attributes:
        seconds: seconds by phase name; set by ``finish``.
    """

    def __init__(self, *, on_cuda: bool, overlap: bool) -> None:
        # The same dict which record_phases() yields, so the caller sees the result.
        self.seconds: dict[str, float] = {}
        self.overlap = overlap
        self._on_cuda = on_cuda
        self._marks: list[_Mark] = []  # in time order
        self._nested: list[str] = []  # phases that are open now, outermost first
        # All time counts as dense until another phase starts.
        self.enter(DENSE)

    def enter(self, name: str) -> None:
        """Start the phase ``name``, which ends with ``leave``. It may be nested in another phase."""
        self._nested.append(name)
        self._mark(name)

    def leave(self) -> None:
        """End the current phase, and continue the enclosing phase."""
        self._nested.pop()
        self._mark(self._nested[-1])

    def finish(self) -> None:
        """Compute ``seconds`` from the recorded starts."""
        # The end of the last phase.
        self._mark(DENSE)
        if self._on_cuda:
            # Event times can only be read after the events have completed.
            torch.cuda.synchronize()
        for mark, following in zip(self._marks, self._marks[1:], strict=False):
            seconds = _elapsed_seconds(mark.stamp, following.stamp)
            self.seconds[mark.phase] = self.seconds.get(mark.phase, 0.0) + seconds

    def _mark(self, name: str) -> None:
        """Record phase ``name`` as starting or continuing now."""
        stamp: float | torch.cuda.Event = time.perf_counter()
        # An event in the stream, because the host runs ahead of the device.
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


def _elapsed_seconds(first: float | torch.cuda.Event, second: float | torch.cuda.Event) -> float:
    """Return the seconds between two stamps, which are times in seconds or CUDA events."""
    if isinstance(first, torch.cuda.Event):
        assert isinstance(second, torch.cuda.Event)
        return float(first.elapsed_time(second)) / 1e3
    assert isinstance(second, float)
    return second - first
