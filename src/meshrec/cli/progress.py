"""Progress of a command's slow steps: as a progress bar in a terminal, elsewhere as lines."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

# Minimum time between lines about the progress of a task.
_PROGRESS_SECONDS = 10.0


@contextmanager
def shown_progress(task: str) -> Iterator[Callable[[float], None]]:
    """Context: show the progress of a task on the standard error output.

    Args:
        task: name of the task.

    Yields:
        A function to call with the finished share, from 0 to 1.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        remaining = RemainingTime()

        def print_line(share: float) -> None:
            line = remaining.line(task, share)
            if line is not None:
                console.print(line, highlight=False)

        yield print_line
        return
    columns = (TextColumn("[bold]{task.description}"), BarColumn(bar_width=30), TaskProgressColumn())
    # The bar disappears at the end.
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as progress:
        bar = progress.add_task(task, total=1.0)
        yield lambda share: progress.update(bar, completed=share)


class RemainingTime:
    """Remaining-time estimate for a task outside training, for lines printed at most every 10 seconds."""

    def __init__(self) -> None:
        # The current task, and its share and time at the first event.
        self._task: str | None = None
        self._start = self._last = 0.0
        self._first_share = 0.0

    def line(self, task: str, share: float) -> str | None:
        """Return a line with the progress and the remaining time, or None if it is too early for one."""
        now = time.monotonic()
        # A new task, or the same task started again.
        if task != self._task or share < self._first_share:
            self._task, self._first_share, self._start, self._last = task, share, now, now
        # A line every few seconds, and none before the first progress, from which the speed follows.
        if now - self._last < _PROGRESS_SECONDS or not self._first_share < share < 1:
            return None
        self._last = now
        seconds = (now - self._start) * (1 - share) / (share - self._first_share)
        return f"{task}: {share:.0%}, about {duration_text(seconds)} remaining"


def duration_text(seconds: float) -> str:
    """Format a duration, such as "42 s", "3 min" or "2.5 h"."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
