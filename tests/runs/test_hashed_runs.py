"""What is done with a run whose tables are hashed: scoring, exporting, quantising, looking at it."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from meshrec.cli import checkpoint, embed, evaluate, predict
from meshrec.cli import quantize as quantize_cli
from meshrec.cli.train import main as train
from meshrec.data.features.values import hashes_of
from meshrec.export import Predictor
from meshrec.runs.export import export_run
from meshrec.runs.report import report_data
from meshrec.runs.scoring import load_trained_model
from meshrec.serve.fresh import Deltas, Quantization, apply_deltas
from meshrec.serve.requests import Request, RequestError, check_request
from meshrec.serve.trial import signature_of
from meshrec.train import RunFolder
from tests.export.conftest import torchs_own_warnings
from tests.train.raw_ids import visits, write_visits


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("visits")
    write_visits(folder)
    source = ["tests/train/raw_ids.py:recipe", "--data.train", str(folder), "--training.publish-every", "3"]
    more = ["--training.checkpoint-every", "4"]
    assert train([*source, *more, "--runs", str(folder), "--name", "r", "--quiet"]) == 0
    return RunFolder(folder / "r")


def exported(run, folder, **options):
    with torchs_own_warnings():
        return Predictor(export_run(run, folder, compile=False, **options))


def scored(predictor, table):
    """The scores of rows of raw values."""
    dense, values, lengths = predictor.raw.encode(table.drop(["clicked", "time"]))[:3]
    arrays = ({name: torch.from_numpy(each) for name, each in given.items()} for given in (values, lengths))
    return predictor(torch.from_numpy(dense), *arrays)


def test_metrics_and_the_page_tell_of_ids(run):
    metrics = run.path.joinpath("metrics.jsonl").read_text().splitlines()
    lines = [line for line in map(json.loads, metrics) if line["kind"] == "train"]
    assert {f"hashed/user/{what}" for what in ("live", "new", "refused", "evicted", "hit_rate")} <= {
        name for line in lines for name in line
    }
    assert sum(line["hashed/user/evicted"] for line in lines) > 0
    assert sum(line["hashed/user/refused"] for line in lines) > 0
    shown = [line for line in report_data(run)["metrics"] if line["kind"] == "train"]
    assert all(line["hashed/user/live"] <= 60 for line in shown)


def test_predictions_are_those_of_the_package(run, tmp_path, capsys):
    data = tmp_path / "new.parquet"
    pq.write_table(visits(400, seed=5), data)
    out = tmp_path / "scores.parquet"
    assert predict.main([str(run.path), "--data", str(data), "--out", str(out)]) == 0
    scores = pq.read_table(out)["score"].to_numpy()
    predictor = exported(run, tmp_path / "package")
    found = scored(predictor, pq.read_table(data))
    np.testing.assert_allclose(found.numpy(), scores, rtol=1e-6)
    assert evaluate.main([str(run.path), "--data", str(data)]) == 0
    assert "auc" in capsys.readouterr().out.lower()


def test_scoring_twice_gives_the_same(run, tmp_path):
    """No ID comes or goes while a model is scored."""
    data = tmp_path / "new.parquet"
    pq.write_table(visits(300, seed=6), data)
    found = []
    for name in ("one", "two"):
        out = tmp_path / f"{name}.parquet"
        assert predict.main([str(run.path), "--data", str(data), "--out", str(out)]) == 0
        found.append(pq.read_table(out))
    assert found[0].equals(found[1])


def test_vectors_are_written_with_their_ids(run, tmp_path):
    model = load_trained_model(run).model
    for feature in ("user", "words"):
        out = tmp_path / f"{feature}.parquet"
        assert embed.main([str(run.path), "--feature", feature, "--out", str(out)]) == 0
        found = pq.read_table(out)
        tables = [m.hashed_tables() for m in model.modules() if hasattr(m, "hashed_tables")]
        ids, rows, _ = next(each[feature] for each in tables if feature in each).items()
        assert found["value"].to_numpy().tolist() == ids.tolist()
        assert np.array_equal(np.stack(found["vector"].to_numpy()), rows.numpy())
    words = set(hashes_of(pa.array([f"w{word}" for word in range(99)])).view(np.int64).tolist())
    assert set(found["value"].to_pylist()) <= words | {-(1 << 63)}


@pytest.mark.parametrize("budget", [["--max-loss", "5%"], ["--weights", "INT4"]])
def test_a_run_is_quantised_and_exported(run, tmp_path, budget):
    small = tmp_path / "small"
    assert quantize_cli.main([str(run.path), "--out", str(small), *budget]) == 0
    predictor = exported(run, tmp_path / "package", quantised=small)
    whole = exported(run, tmp_path / "whole")
    found, expected = (scored(each, visits(200, seed=7)) for each in (predictor, whole))
    assert predictor.quantised
    assert 0 < float((found - expected).abs().max()) < 0.3


def test_servers_follow_the_run(run, tmp_path):
    """From an early checkpoint on to the last one, as it is and quantised."""
    early, late = exported(run, tmp_path / "early", step=4), exported(run, tmp_path / "late", last=True)
    deltas = Deltas(run.path / "deltas", early.about, early.weights, hashed=early.hashed)
    apply_deltas(deltas)
    assert deltas.freshness.reason == ""
    assert deltas.freshness.step == late.about["step"]
    assert torch.equal(scored(early, visits(300, seed=8)), scored(late, visits(300, seed=8)))


def test_quantised_servers_follow_the_run(run, tmp_path):
    from meshrec.runs.quantize import quantize_run
    from meshrec.train import join

    packages = []
    for name, which in (("early", {"step": 4}), ("late", {"last": True})):
        quantize_run(run, join("cpu"), tmp_path / f"{name}-small", rounding="search", **which)
        packages.append(exported(run, tmp_path / name, quantised=tmp_path / f"{name}-small"))
    early, late = packages
    codes = Quantization(early.quantised, early.rounding)
    deltas = Deltas(run.path / "deltas", early.about, early.weights, codes=codes, hashed=early.hashed)
    apply_deltas(deltas)
    assert deltas.freshness.reason == ""
    assert torch.equal(scored(early, visits(300, seed=9)), scored(late, visits(300, seed=9)))


def test_requests_may_have_any_id(run, tmp_path):
    signature = signature_of(exported(run, tmp_path / "package"))
    assert signature.any_ids == {"user", "words"}
    edges = np.array([-1, 0, (1 << 63) - 1, -(1 << 63)])
    ones, dense = np.ones(4, np.int64), np.zeros((4, signature.num_dense), np.float32)
    values = {"user": edges, "words": edges, "city": np.zeros(4, np.int64)}
    assert isinstance(check_request(signature, dense, values, dict.fromkeys(values, ones)), Request)
    with pytest.raises(RequestError, match=r"'city'.*id -1.*sample 0"):
        check_request(signature, dense, {**values, "city": edges}, dict.fromkeys(values, ones))


def test_checkpoints_are_looked_at(run, capsys):
    assert checkpoint.main(["inspect", str(run.path)]) == 0
    said = capsys.readouterr().out
    assert "user.weight" in said
    assert "user.ids" in said
    assert checkpoint.main(["verify", str(run.path)]) == 0
