"""HTML report on the last staged batch."""

from pathlib import Path
from typing import Any

from meshrec.reports.page import to_page
from meshrec.stages.staged import Staged


def write_report(staged: Staged, path: str | Path) -> None:
    """Write an HTML report on the last batch to ``path``.

    The report shows the timeline, the fraction of time that stages compute, and the predicted and the
    measured step time.

    Raises:
        ValueError: no batch has run.
    """
    Path(path).write_text(to_page("stages.js", report_data(staged)), encoding="utf-8")


def report_data(staged: Staged) -> dict[str, Any]:
    """Return the content of the report as a dict that ``json.dumps`` accepts. Times are in seconds.

    Raises:
        ValueError: no batch has run.
    """
    events = staged.timeline.events
    if not events:
        raise ValueError("the stages have run no batch. Train one, then write the report.")
    choice = staged.choice
    stages = [name or f"stage {number}" for number, name in enumerate(staged.stages)]
    predicted = None if choice is None else sorted(choice.predicted.items())
    return {
        "stages": stages,
        "num_splits": max(event.split for event in events) + 1,
        "seconds": max(event.end for event in events) - min(event.start for event in events),
        "busy": staged.timeline.busy(),
        "timeline": staged.timeline.svg(stages),
        "predicted": predicted,
        "bound": None if choice is None else choice.bound,
        "gap": None if choice is None else choice.gap,
    }
