"""A plan's report as one HTML page."""

from pathlib import Path

from meshrec.reports.page import to_page
from meshrec.reports.plan_report import PlanReport


def to_html(report: PlanReport) -> str:
    """The page: load and memory per rank, every table's rectangles, and why each is where it is."""
    return to_page("plan.js", report.to_json())


def write_html(report: PlanReport, path: str | Path) -> None:
    """Writes the page."""
    Path(path).write_text(to_html(report), encoding="utf-8")
