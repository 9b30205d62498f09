"""Plan report as an HTML page."""

from pathlib import Path

from meshrec.planner.plan_report import PlanReport
from meshrec.reports.page import to_page


def to_html(report: PlanReport) -> str:
    """Render the page: load and memory per rank, rectangles of every table, and alternatives."""
    return to_page("plan.js", report.to_json())


def write_html(report: PlanReport, path: str | Path) -> None:
    """Write the page."""
    Path(path).write_text(to_html(report), encoding="utf-8")
