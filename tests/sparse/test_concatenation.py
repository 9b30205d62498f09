import pytest
import torch

from meshrec.sparse import JaggedTensor, KeyedJaggedTensor
from meshrec.sparse.concatenation import concatenated_bags, concatenated_inverse, concatenated_strides


def jt(weights: torch.Tensor | None = None, values: torch.Tensor | None = None) -> JaggedTensor:
    values = torch.arange(2) if values is None else values
    return JaggedTensor(values, weights, offsets=torch.tensor([0, 0, 2]))


def kjt(**strides) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(["a", "b"], torch.arange(4), lengths=torch.ones(4, dtype=torch.int64), **strides)


def test_bags():
    values, weights, lengths = concatenated_bags("concat", [jt(torch.ones(2)), jt(torch.zeros(2))])
    assert values.tolist() == [0, 1, 0, 1]
    assert weights.tolist() == [1.0, 1.0, 0.0, 0.0]
    assert lengths.tolist() == [0, 2, 0, 2]
    assert concatenated_bags("concat", [jt()])[1] is None


def test_some_weights():
    with pytest.raises(ValueError, match="concat: 1 of 2 inputs have weights; give them to all or none"):
        concatenated_bags("concat", [jt(torch.ones(2)), jt()])


def test_integers_and_floats():
    with pytest.raises(
        ValueError, match=r"values must be all integers or all floats, got \['int64', 'float32'\]"
    ):
        concatenated_bags("concat", [jt(), jt(values=torch.rand(2))])


def test_strides():
    assert concatenated_strides([kjt(), kjt()]) == (2, None)
    assert concatenated_strides([kjt(stride_per_key=[1, 3])] * 2) == (None, [[1], [3], [1], [3]])
    with pytest.raises(ValueError, match="some inputs have a batch size per key, some one for all keys"):
        concatenated_strides([kjt(), kjt(stride_per_key=[1, 3])])
    single = KeyedJaggedTensor(["c"], torch.arange(1), lengths=torch.tensor([1]))
    with pytest.raises(ValueError, match="input 1 has batch size 1, input 0 has 2; they must be equal"):
        concatenated_strides([kjt(), single])


def test_inverse_indices():
    first, second = (["a"], torch.tensor([[0, 1]])), (["b"], torch.tensor([[1, 0]]))
    keys, indices = concatenated_inverse([first, second])
    assert keys == ["a", "b"]
    assert indices.tolist() == [[0, 1], [1, 0]]
    assert concatenated_inverse([first, None]) is None
