"""A plan's report as one HTML page."""

from pathlib import Path

from meshrec.reports.page import to_page
from meshrec.reports.plan_report import PlanReport


def to_html(report: PlanReport) -> str:
    """Return the page: load and memory per rank, the rectangles of every table, and the alternatives."""
    return to_page("plan.js", report.to_json())


def write_html(report: PlanReport, path: str | Path) -> None:
    """Write the page."""
    Path(path).write_text(to_html(report), encoding="utf-8")
