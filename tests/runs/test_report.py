import json
import re

import pytest

from meshrec.planner import save_plan
from meshrec.reports.page import to_page
from meshrec.runs.report import phase_times, report_data, stragglers, write_report
from meshrec.train.run_folder import CONFIG, SUMMARY, RunFolder, to_json
from tests.browser import drawn, needs_browser


def folder_with(tmp_path, small, num_lines):
    folder = RunFolder(tmp_path)
    folder.write_json(CONFIG, {"recipe": to_json(small()), "ranks": 2, "device": "cpu"})
    folder.write_json(SUMMARY, {"validation": {"auc": 0.75}})
    for step in range(1, num_lines + 1):
        folder.append_metrics({"kind": "train", "step": step, "loss": 1 / step, "lr": 0.1})
    folder.append_metrics({"kind": "validation", "step": num_lines, "auc": 0.75})
    with folder.phases.open("w") as file:
        for seconds in (1.0, 3.0, 2.0):
            for phase in ("dense", "lookup"):
                file.write(json.dumps({"phase": phase, "rank": 1, "seconds": seconds, "step": 1}) + "\n")
    return folder


def test_the_page_holds_its_data(tmp_path, small):
    folder = folder_with(tmp_path, small, 3)
    page = to_page("run.js", report_data(folder) | {"name": "</script><b>"})
    text = re.search(r'<script id="data" type="application/json">(.*?)</script>', page, re.DOTALL)
    data = json.loads(text.group(1))
    assert data["name"] == "</script><b>"
    assert data["summary"]["validation"] == {"auc": 0.75}
    assert data["metrics"][0] == {"kind": "train", "step": 1, "loss": 1.0, "lr": 0.1}
    assert data["plan"] is None
    assert ["training.batch_size", 100] in data["options"]


def test_phases_are_medians_with_the_dense_part_last(tmp_path, small):
    (rank,) = phase_times(folder_with(tmp_path, small, 1))
    assert rank["rank"] == 1
    assert list(rank["phases"].items()) == [("lookup", 2.0), ("dense", 2.0)]
    assert phase_times(RunFolder(tmp_path / "none")) == []


def test_long_runs_are_thinned(tmp_path, small):
    lines = [
        line for line in report_data(folder_with(tmp_path, small, 3000))["metrics"] if line["kind"] == "train"
    ]
    assert 500 < len(lines) <= 1001
    assert (lines[0]["step"], lines[-1]["step"]) == (1, 3000)


@needs_browser
def test_a_browser_draws_it(tmp_path, small, small_plan):
    folder = folder_with(tmp_path, small, 3)
    save_plan(small_plan, folder.plan)
    for step, speed in ((4, 130_000.0), (5, 5_000.0)):
        folder.append_metrics(
            {"kind": "train", "step": step, "epoch": step / 2, "samples_per_second": speed, "auc": 0.7}
        )
    folder.append_metrics({"kind": "test", "step": 4, "epoch": 2.0, "auc": 0.74})
    summary = {
        "state": "finished",
        "step": 5,
        "best_step": 4,
        "weights_step": 4,
        "seconds": 100.0,
        "train_seconds": 60.0,
        "validation": {"auc": 0.75},
        "test": {"auc": 0.74},
        "baselines": {"item popularity": {"auc": 0.7}},
        "baselines_test": {"item popularity": {"auc": 0.76}},
        "remarks": ["it was still improving. Train longer."],
        "curves": {
            "test": {
                "positive": 300.0,
                "negative": 700.0,
                "roc": [[0, 0], [0.2, 0.6], [1, 1]],
                "precision_recall": [[0.6, 0.56], [1, 0.3]],
                "gains": [[0, 0], [0.32, 0.6], [1, 1]],
                "calibration": [[0.1, 0.12, 500], [0.5, 0.48, 500]],
            }
        },
        "baseline_curves": {
            "item popularity": {"roc": [[0, 0], [0.4, 0.6], [1, 1]], "calibration": [[0.3, 0.3, 9]]}
        },
        "skipped": {"a.csv": {"row 3: no label": 1}},
        "phases": [{"phase": phase, "predicted": 0.001, "measured": 0.0025} for phase in ("lookup", "step")],
        "checkpoints": {"weights": "runs/x/best/step-4", "last": None},
    }
    folder.write_json(SUMMARY, summary)
    folder.write_json(
        CONFIG,
        folder.read_json(CONFIG)
        | {"commands": {"export": "meshrec checkpoint export", "predict": "meshrec predict x"}},
    )
    write_report(folder)
    page = drawn(f"file://{folder.report}").split("<noscript>")[0]
    assert page.count("<path") >= 2
    for text in (
        ">100,000<",
        ">0<",
        ">epoch 2<",
        ">best step<",
        ">Precision and recall<",
        ">Gains<",
        "the best step, whose weights are kept",
    ):
        assert text in page, text
    assert ">-0<" not in page
    assert "item popularity (better)" in page  # on the test data, so that card is not green
    assert '<b class="good">0.7500</b><span>validation AUC' in page
    assert '<b class="">0.7400</b><span>test AUC, 95 %: 0.7044 to 0.7756' in page
    assert "Receiver operating curve" in page
    assert "test: predicted 0.5000, measured 0.4800, 500 samples" in page
    assert "learning rate of the dense part" in page
    assert "it was still improving. Train longer." in page
    assert "meshrec predict x" in page
    assert "Proven, of the planner's model of the hardware" in page
    assert "Measured in this run: 2.500 ms, 2.5 times what the model says." in page
    assert "in all, of them 60.0 s training" in page
    assert "row 3: no label" in page
    assert "meshrec checkpoint export" in page
    assert "meshrec train --resume" not in page  # there is no checkpoint to go on from


@needs_browser
def test_a_failed_run_says_so(tmp_path, small):
    folder = folder_with(tmp_path, small, 3)
    (folder.path / SUMMARY).unlink()
    folder.write_state("failed", error="the disk is full", step=3)
    write_report(folder)
    page = drawn(f"file://{folder.report}").split("<noscript>")[0]
    assert '<span class="badge failed">failed</span>' in page
    assert "It failed after step 3: the disk is full" in page


@needs_browser
def test_the_page_shows_where_the_world_changed_and_who_was_waited_for(tmp_path, small):
    folder = folder_with(tmp_path, small, 9)
    worlds = [(4, {"host0": 2, "host1": 2}, 0), (2, {"host1": 2}, 3), (4, {"host0": 2, "host1": 2}, 6)]
    starts = [
        {
            "began": f"2026-01-0{day}T10:00:00",
            "from_step": step,
            "ranks": ranks,
            "hosts": found,
            "changes": [],
        }
        for day, (ranks, found, step) in enumerate(worlds, 1)
    ]
    folder.write_json(CONFIG, folder.read_json(CONFIG) | {"starts": starts})
    for seconds, rank, share in WAITED:
        folder.append_metrics(
            {
                "kind": "train",
                "step": 9 + int(seconds),
                "seconds": seconds,
                "straggler": rank,
                "straggler_share": share,
            }
        )
    write_report(folder)
    page = drawn(f"file://{folder.report}").split("<noscript>")[0]
    assert "<td>2 (4 before)</td>" in page
    assert "<td>host1: 2</td>" in page
    assert "step 3: 2 ranks, 4 before" in page  # the mark on the curves
    assert "step 6: 4 ranks, 2 before" in page
    assert page.index(">rank 3<") < page.index(">rank 1<")
    assert ">40.0 %<" in page


def test_who_was_waited_for():
    lines = [{"kind": "train", "seconds": s, "straggler": r, "straggler_share": w} for s, r, w in WAITED]
    assert stragglers(lines) == [
        {"rank": 3, "share": pytest.approx(0.4)},
        {"rank": 1, "share": pytest.approx(0.05)},
    ]
    assert stragglers([{"kind": "train", "seconds": 1.0}]) == []


WAITED = [(1.0, 3, 0.4), (2.0, 1, 0.2), (4.0, 3, 0.6)]
