"""A plan's report as one HTML page that needs nothing else."""

import json
from importlib.resources import files
from pathlib import Path

from meshrec.reports.plan_report import PlanReport

_PLACE = '"REPORT"'


def to_html(report: PlanReport) -> str:
    """The page: load and memory per rank, every table's rectangles, and why each is where it is."""
    page = files("meshrec.reports").joinpath("plan_page.html").read_text(encoding="utf-8")
    # "</" would end the script element inside a table's name.
    data = json.dumps(report.to_json(), separators=(",", ":")).replace("</", "<\\/")
    return page.replace(_PLACE, data, 1)


def write_html(report: PlanReport, path: str | Path) -> None:
    """Writes the page."""
    Path(path).write_text(to_html(report), encoding="utf-8")
