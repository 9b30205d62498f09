import pytest
import torch

from meshrec import DataType
from meshrec.checkpoint import load, save
from meshrec.quant import quantised_about, quantize, quantize_checkpoint
from tests.quant.test_quantize import Model, batch


@pytest.fixture
def saved(tmp_path):
    torch.manual_seed(3)
    model = Model()
    save(tmp_path / "saved", {"model": model}, step=7)
    return tmp_path / "saved", model


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_same_as_from_memory(saved, device):
    folder, model = saved
    other = Model()
    other.bags.to(device)
    types = {"t1": DataType.BF16}
    made = quantize_checkpoint(folder, other, DataType.INT4, per_table=types, rounding="search")
    expected = quantize(model, DataType.INT4, per_table=types, rounding="search")
    assert torch.equal(made(batch()), expected(batch()))
    assert not made.training
    assert next(other.bags.parameters()).device.type == device


def test_what_was_quantised_is_told_and_saved(saved, tmp_path):
    folder, _ = saved
    made = quantize_checkpoint(folder, Model(), DataType.INT4)
    about = quantised_about(made, run="mine", step=7)
    assert about["tables"]["t1"] == {"data_type": "INT4", "bytes": 9 * 8, "padding_bits": 12}
    save(tmp_path / "small", {"model": made, "quantised": about})
    other = quantize(Model(), DataType.INT4)
    state = {"model": other, "quantised": {}}
    load(tmp_path / "small", state)
    assert state["quantised"] == about
    assert torch.equal(other(batch()), made(batch()))


def test_refusals(saved):
    folder, model = saved
    with pytest.raises(ValueError, match=r"'other\.bags\.embedding_bags\.t0\.weight'"):
        quantize_checkpoint(folder, Model(), entry="other")
    with pytest.raises(ValueError, match=r"per_table.*'t9'"):
        quantize_checkpoint(folder, Model(), per_table={"t9": DataType.INT4})
    with torch.no_grad():
        model.bags.embedding_bags["t1"].weight[4, 1] = torch.nan
    save(folder, {"model": model})
    with pytest.raises(ValueError, match=r"'t1'.*row 4"):
        quantize_checkpoint(folder, Model())
