"""Trace over a few training steps, for Perfetto (ui.perfetto.dev) or chrome://tracing."""

from pathlib import Path
from types import TracebackType

from torch import profiler

# Steps 1 to 5 are skipped, 6 and 7 are warmup, 8 to 12 are recorded.
_WAIT, _WARMUP, _ACTIVE = 5, 2, 5


class StepProfiler:
    """Context manager that traces steps 8 to 12; MeshRec's phases are named ``meshrec.*``."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._profiler = profiler.profile(
            schedule=profiler.schedule(wait=_WAIT, warmup=_WARMUP, active=_ACTIVE, repeat=1),
            on_trace_ready=self._write,
        )

    def step(self) -> None:
        """Record the end of a step. Call it after every step."""
        self._profiler.step()

    def __enter__(self) -> "StepProfiler":
        self._profiler.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._profiler.stop()

    def _write(self, finished: profiler.profile) -> None:
        finished.export_chrome_trace(str(self._path))
