import pytest
import torch

from meshrec import DataType, KeyedTensor
from meshrec.modules import KTRegroupAsDict


@pytest.fixture
def tensors():
    torch.manual_seed(0)
    return [
        KeyedTensor(["a", "b"], [1, 2], torch.randn(4, 3)),
        KeyedTensor(["c", "d"], [3, 1], torch.randn(4, 4)),
    ]


def test_groups_have_their_features_side_by_side(tensors):
    found = KTRegroupAsDict([["c", "a"], ["b"], ["a", "d"]], ["x", "y", "z"])(tensors)
    first, second = tensors
    assert list(found) == ["x", "y", "z"]
    assert torch.equal(found["x"], torch.cat([second["c"], first["a"]], 1))
    assert torch.equal(found["y"], first["b"])
    assert torch.equal(found["z"], torch.cat([first["a"], second["d"]], 1))


def test_results_may_have_another_type(tensors):
    found = KTRegroupAsDict([["a"]], ["x"], emb_dtype=DataType.BF16)(tensors)
    assert found["x"].dtype == torch.bfloat16


def test_gradients_reach_the_inputs():
    values = torch.randn(2, 3, requires_grad=True)
    found = KTRegroupAsDict([["b", "b"]], ["x"])([KeyedTensor(["a", "b"], [1, 2], values)])
    found["x"].sum().backward()
    assert values.grad.tolist() == [[0, 2, 2]] * 2


def test_compiles_without_a_break(tensors):
    module = KTRegroupAsDict([["c", "a"], ["b"]], ["x", "y"], emb_dtype=DataType.FP16)
    found = torch.compile(module, fullgraph=True, backend="aot_eager")(tensors)
    for key, expected in module(tensors).items():
        torch.testing.assert_close(found[key], expected)


def test_wrong_groups(tensors):
    with pytest.raises(ValueError, match=r"2 groups.*1 keys"):
        KTRegroupAsDict([["a"], ["b"]], ["x"])
    with pytest.raises(ValueError, match="'e'"):
        KTRegroupAsDict([["e"]], ["x"])(tensors)
