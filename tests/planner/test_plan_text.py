from rich.console import Console

from meshrec.planner.plan_report import Move, make_report
from meshrec.planner.plan_text import render, render_diff, render_what_if


def text_of(call):
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    call(console)
    console.file.close()
    return console.export_text()


def test_the_report_shows_ranks_phases_and_the_gap(small_plan):
    report = make_report(small_plan)
    text = text_of(lambda console: render(report, console=console))
    assert f"step {report.seconds * 1e3:.3f} ms on 4 ranks (a100)" in text
    assert f"gap {report.gap:.2%}" in text
    assert "rank by rank" in text
    for warning in report.warnings:
        assert f"warning: {warning}" in text


def test_what_if_shows_plans_and_failures(small_plan):
    text = text_of(lambda console: render_what_if([(4, small_plan), (6, "no plan fits")], console=console))
    assert f"{small_plan.seconds * 1e3:.3f}" in text
    assert "no plan fits" in text


def test_diff_sums_up():
    moves = [Move("a", "table_wise", "row_wise", 3 << 20), Move("b", None, "table_wise", 1 << 20)]
    text = text_of(lambda console: render_diff(moves, console=console))
    assert "2 tables change; 4.00 MiB move between ranks" in text
    assert "place every table identically" in text_of(lambda console: render_diff([], console=console))
