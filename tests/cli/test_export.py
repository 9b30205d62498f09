import torch

from meshrec.cli import export
from meshrec.cli.train import main as train
from meshrec.data import Batch
from meshrec.export import Predictor
from tests.export.conftest import torchs_own_warnings
from tests.train.small import small


def test_a_run_becomes_a_package(tmp_path, capsys):
    assert train(["tests/train/small.py:small", "--runs", str(tmp_path), "--name", "r", "--quiet"]) == 0
    with torchs_own_warnings():
        assert export.main(["r", "--runs", str(tmp_path), "--out", str(tmp_path / "p"), "--no-compile"]) == 0
    assert "the package: " in capsys.readouterr().out
    predictor = Predictor(tmp_path / "p")
    assert predictor.about["run"] == "r"
    batch: Batch = next(iter(small().data.load().validation.batches(16)))
    jagged = batch.sparse.to_dict()
    values = {feature: jagged[feature].values() for feature in predictor.features}
    lengths = {feature: jagged[feature].lengths().long() for feature in predictor.features}
    scores = predictor(batch.dense, {f: v.long() for f, v in values.items()}, lengths)
    assert scores.shape == (16,)
    assert ((scores > 0) & (scores < 1)).all()
    assert not torch.equal(scores, scores[:1].expand(16))
