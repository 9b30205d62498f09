"""Which bars the benchmark of tables in files has, and what it says when a contender does not end."""

import pytest

from benchmarks import file_rows_limited as limited
from benchmarks.file_rows import Turns

RATES = {"per_second": {"our reads": 90.0, "plain reads": 100.0, "our writes": 100.0}}
READS = "x: reads over a plain reader's"
STEP, LOOKAHEAD = "x: a step in memory over one from the file", "x: lookahead over none"


@pytest.mark.parametrize(
    ("memory", "disk", "expected"),
    [
        (30.0, 51.0, {READS: 0.9, LOOKAHEAD: 1.5}),  # the disk allows 0.59 of the step
        (40.0, 50.0, {READS: 0.9, STEP: 40 / 60, LOOKAHEAD: 1.5}),
        (60.0, 50.0, {READS: 0.9, STEP: 1.0}),
        (10.0, 50.0, {READS: 0.9, LOOKAHEAD: 1.5}),
    ],
)
def test_there_are_bars_where_the_disk_allows_them(memory, disk, expected):
    turns = Turns(memory=memory, ahead=60.0, plain=90.0, fast=memory, disk=disk, figures=RATES)
    assert {bar.name: bar.figure for bar in turns.bars("x")} == pytest.approx(expected)


@pytest.mark.parametrize(
    ("steps", "figure", "is_bound"),
    [([{"step": 0.5, "peak": 1.0}], 5.0, False), ([], limited._SECONDS / 0.1, True)],
)
def test_a_mapped_table_that_makes_no_step_gives_the_least_ratio(monkeypatch, steps, figure, is_bound):
    found = {"file": [{"step": 0.1, "peak": 1.0}], "mapped": steps}
    monkeypatch.setattr(limited, "_limited", lambda kind, *_: found[kind])
    _, (bar,) = limited.mapped(tiny=True)
    assert bar.figure == pytest.approx(figure)
    assert ("at least" in bar.name) is is_bound
