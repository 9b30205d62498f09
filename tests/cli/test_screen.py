import time
from io import StringIO

from rich.console import Console

from meshrec.cli.screen import LineScreen, LiveScreen, summary_table
from meshrec.train import Placement, RunFolder, Trainer, join
from meshrec.train.observers import Finished, Progressed, Reported

SUMMARY = {
    "state": "stopped",
    "recipe": "small",
    "step": 20,
    "samples": 2000,
    "seconds": 1.0,
    "samples_per_second": 2000.0,
    "validation": {"auc": 0.7, "loss": 0.5},
    "test": {"auc": 0.69, "loss": 0.51},
    "baselines": {"global mean": {"auc": 0.5, "loss": 0.7}},
    "baselines_test": {"global mean": {"auc": 0.5, "loss": 0.71}},
    "weights_step": 10,
    "train_seconds": 0.4,
    "failed_saves": ["no space left"],
    "skipped": {"a.parquet": {"null": 1}},
    "phases": [{"phase": "step", "predicted": 0.001, "measured": 0.009}],
    "checkpoints": {"weights": "runs/mine/best/step-0000000010", "last": None},
    "error": None,
    "best_possible_auc": 0.8,
}


def shown(kind, tmp_path, small, *, terminal):
    out = StringIO()
    console = Console(file=out, width=120, force_terminal=terminal, color_system=None, highlight=False)
    screen = kind(RunFolder(tmp_path / "mine"), console)
    recipe = small(epochs=2, placement=Placement(sharding_types=("row_wise",)))
    Trainer(recipe, recipe.data.load(), join("cpu"), observer=screen).run()
    screen(Reported("something"))
    screen(Finished(SUMMARY))
    return out.getvalue()


def test_lines(tmp_path, small):
    out = shown(LineScreen, tmp_path, small, terminal=False)
    for text in (
        "1,000 samples of synthetic_clicks",
        "plan: 3 row-wise",
        "rank 0: f0, f1, f2",
        "step     20",
    ):
        assert text in out, out
    for text in ("(best so far)", "0.8000", "--resume --name mine", "report.html", "something"):
        assert text in out, out
    for text in (
        "stopped at step 20: 1.0 s in all, 0.4 s of them training",
        "no checkpoint was saved: no space left",
        "skipped 1 row of a.parquet",
        "serve:        meshrec serve mine-package",
        "the weights of step 10",
        "the weights:  runs/mine/best/step-0000000010",
    ):
        assert text in out, out
    assert "\x1b" not in out


def test_a_live_display(tmp_path, small):
    out = shown(LiveScreen, tmp_path, small, terminal=True)
    for text in ("the plan: 3 row-wise", "training", "20/20", "samples/s", "global mean", "something"):
        assert text in out, out


def test_progress_outside_training_has_an_estimate(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    out = StringIO()
    screen = LineScreen(RunFolder(tmp_path), Console(file=out, width=120, highlight=False))
    # Lines are 10 seconds apart; another task, or the same again, starts anew.
    for task, seconds, share in [
        ("fitting features", 0, 0.1),
        ("fitting features", 5, 0.2),
        ("fitting features", 20, 0.3),
        ("fitting features", 25, 0.4),
        ("fitting features", 3620, 0.5),
        ("fitting features", 3700, 1.0),
        ("baselines", 3710, 0.5),
        ("baselines", 3715, 0.6),
    ]:
        now[0] = float(seconds)
        screen(Progressed(task, share))
    assert out.getvalue().splitlines() == [
        "fitting features: 30%, about 70 s remaining",
        "fitting features: 50%, about 75 min remaining",
    ]
    out = StringIO()
    screen = LiveScreen(
        RunFolder(tmp_path), Console(file=out, width=120, force_terminal=True, color_system=None)
    )
    screen(Progressed("fitting features", 0.25))
    screen(Finished(SUMMARY))
    assert "fitting features" in out.getvalue()
    assert "25/100" in out.getvalue()


def test_a_summary_of_ranked_items_has_their_metrics():
    judged = {"ndcg@10": 0.0579, "recall@10": 0.1088, "mrr": 0.0534, "loss": 7.3}
    popularity = {"item popularity": {"ndcg@10": 0.0189, "recall@10": 0.0402, "mrr": 0.018, "loss": 8.6}}
    ranked = {"validation": judged, "test": judged, "baselines": popularity, "baselines_test": popularity}
    out = StringIO()
    Console(file=out, width=120).print(summary_table(SUMMARY | ranked | {"best_possible_auc": None}))
    for text in ("NDCG@10", "recall@10", "MRR", "0.0579", "0.1088", "0.0402"):
        assert text in out.getvalue()
    assert "AUC" not in out.getvalue()
