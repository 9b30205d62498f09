import pytest

from meshrec import DataType
from meshrec.checkpoint import load
from meshrec.cli import quantize
from meshrec.cli.train import main as train
from meshrec.quant import quantize as quantized
from tests.train.small import small


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    assert train(["tests/train/small.py:small", "--runs", str(folder), "--name", "r", "--quiet"]) == 0
    return folder


def test_a_run_within_a_budget(runs, tmp_path, capsys):
    out = tmp_path / "small"
    assert quantize.main(["r", "--runs", str(runs), "--out", str(out), "--max-loss", "5%"]) == 0
    told = capsys.readouterr().out
    assert "budget 5.0000%" in told
    assert "<table>" in (out / "report.html").read_text()
    with pytest.raises(ValueError, match="another"):
        quantize.main(["r", "--runs", str(runs), "--out", str(out)])


def test_a_run_in_one_precision(runs, tmp_path, capsys):
    out = tmp_path / "small"
    assert quantize.main(["r", "--runs", str(runs), "--out", str(out), "--weights", "INT4"]) == 0
    assert f"the quantised model: {out}" in capsys.readouterr().out
    recipe = small()
    model = quantized(recipe.model.build(recipe.data.load()), DataType.INT4)
    state = {"quantised": {}}
    load(out, state)
    assert state["quantised"]["run"] == "r"
    assert {table["data_type"] for table in state["quantised"]["tables"].values()} == {"INT4"}
    for child in model.modules():
        if hasattr(child, "table_holders"):
            child.to_empty(device="cpu")
    load(out, {"model": model})


def test_wrong_budgets(runs, tmp_path):
    with pytest.raises(ValueError, match=r"--max-loss.*'little'"):
        quantize.main(["r", "--runs", str(runs), "--out", str(tmp_path / "o"), "--max-loss", "little"])
