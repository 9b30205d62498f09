import math

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from meshrec.cli import evaluate
from meshrec.cli.train import main as train
from meshrec.runs.evaluating import _encode_by_frequency, _slice_metrics
from meshrec.train import RunFolder
from meshrec.train.evaluation import Scored
from tests.train.clicks import clicks, write_clicks


def test_the_test_split_is_judged_as_in_training(tmp_path, capsys):
    write_clicks(tmp_path / "train.parquet", 900, seed=0)
    data = write_clicks(tmp_path / "test.parquet", 700, seed=1)
    source = ["tests/train/clicks.py:recipe", "--data.folder", str(tmp_path)]
    assert train([*source, "--runs", str(tmp_path), "--name", "r", "--quiet"]) == 0
    out = tmp_path / "m.json"
    assert evaluate.main(["r", "--runs", str(tmp_path), "--data", str(data), "--json", str(out)]) == 0
    found = RunFolder(tmp_path).read_json("m.json")
    assert found["samples"] == 700
    summary = RunFolder(tmp_path / "r").read_json("summary.json")
    assert found["metrics"] == pytest.approx(summary["validation"], rel=1e-12)
    assert "auc" in capsys.readouterr().out
    more = ["--by", "user", "--group", "user", "--intervals", "20"]
    again = [str(tmp_path / "r"), "--data", str(data), "--json", str(out), *more]
    assert evaluate.main([*again, "--force"]) == 0
    found = RunFolder(tmp_path).read_json("m.json")
    assert len(found["slices"]["user"]) == 21
    assert sum(each["samples"] for each in found["slices"]["user"].values()) == 700
    assert 0.3 < found["metrics"]["gauc"] < 0.7  # a user's own clicks are drawn at random
    low, high = found["intervals"]["auc"]
    assert low < found["metrics"]["auc"] < high
    assert "by user:" in capsys.readouterr().out
    with pytest.raises(ValueError, match="slices"):
        evaluate.main([str(tmp_path / "r"), "--data", str(data), "--by", "tags"])


def test_nan_scores_are_undefined_with_a_reason_and_weights_of_0_are_refused(tmp_path, capsys, monkeypatch):
    data = write_clicks(tmp_path / "train.parquet", 300, seed=0)
    write_clicks(tmp_path / "test.parquet", 300, seed=1)
    source = ["tests/train/clicks.py:recipe", "--data.folder", str(tmp_path)]
    assert train([*source, "--runs", str(tmp_path), "--name", "r", "--quiet"]) == 0
    logits, labels = torch.tensor([math.nan, 1.0]), torch.tensor([0.0, 1.0])

    def scored(weights):
        part = Scored(torch.arange(2), logits, labels, weights)
        monkeypatch.setattr("meshrec.runs.evaluating.gather_scores", lambda *_: iter([part]))

    scored(None)
    args, out = [str(tmp_path / "r"), "--data", str(data)], tmp_path / "m.json"
    assert evaluate.main([*args, "--json", str(out), "--intervals", "20", "--group", "user"]) == 0
    assert "(undefined: 1 scores are NaN)" in capsys.readouterr().out
    found = RunFolder(tmp_path).read_json("m.json")
    assert (found["metrics"]["auc"], found["metrics"]["gauc"]) == (None, None)
    assert (found["num_nan"], found["intervals"]) == (1, {})
    scored(torch.zeros(2))
    with pytest.raises(ValueError, match=r"sample.*0"):
        evaluate.main(args)


def test_damaged_rows_are_skipped_where_asked(tmp_path, capsys):
    write_clicks(tmp_path / "train.parquet", 900, seed=0)
    write_clicks(tmp_path / "test.parquet", 300, seed=1)
    source = ["tests/train/clicks.py:recipe", "--data.folder", str(tmp_path)]
    assert train([*source, "--runs", str(tmp_path), "--name", "r", "--quiet"]) == 0
    table = clicks(50, seed=2)
    labels = pa.array([*table["clicked"].to_pylist()[:-1], None], pa.int64())
    data = tmp_path / "damaged.parquet"
    pq.write_table(table.set_column(0, "clicked", labels), data)
    args = [str(tmp_path / "r"), "--data", str(data)]
    with pytest.raises(ValueError, match=r"--on-error.*`meshrec evaluate`"):
        evaluate.main(args)
    capsys.readouterr()
    assert evaluate.main([*args, "--on-error", "skip"]) == 0
    assert "AUC" in capsys.readouterr().out.upper()


def test_values_that_are_called_like_the_others_are_judged_by_themselves():
    rows = ["None", None, "others", *(f"v{at}" for at in range(30)), "None", None, "others"]
    values, numbers = _encode_by_frequency(pa.chunked_array([rows]), np.arange(len(rows)))
    assert sorted(values[:3]) == ["None", "None (null)", "others"]
    scored = Scored(None, torch.zeros(len(rows)), torch.ones(len(rows)))
    slices = _slice_metrics(scored, values, numbers)
    assert sum(each["samples"] for each in slices.values()) == len(rows)
    assert slices["others (the rest)"]["samples"] == len(rows) - 6 - 17


def test_made_up_data_has_no_files(tmp_path):
    args = ["tests/train/small.py:small", "--runs", str(tmp_path), "--name", "r", "--quiet"]
    assert train(args) == 0
    with pytest.raises(ValueError, match="SyntheticClicks"):
        evaluate.main([str(tmp_path / "r"), "--data", "x"])
    with pytest.raises(ValueError, match=r"SyntheticClicks.*on_error"):
        evaluate.main([str(tmp_path / "r"), "--data", "x", "--on-error", "skip"])


def test_intervals_need_draws():
    for draws in ("-1", "1"):
        with pytest.raises(ValueError, match=f"--intervals.*{draws}.*0.*2"):
            evaluate.main(["r", "--data", "x", "--intervals", draws])
