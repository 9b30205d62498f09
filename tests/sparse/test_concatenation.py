import pytest
import torch

from meshrec.sparse import JaggedTensor, KeyedJaggedTensor
from meshrec.sparse.concatenation import concatenated, concatenated_bags


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
    assert concatenated([kjt(), kjt()]).stride() == 2
    assert concatenated([kjt(stride_per_key=[1, 3])] * 2).stride_per_key_per_rank() == [[1], [3], [1], [3]]
    with pytest.raises(ValueError, match="some inputs have a batch size per key, some one for all keys"):
        concatenated([kjt(), kjt(stride_per_key=[1, 3])])
    single = KeyedJaggedTensor(["c"], torch.arange(1), lengths=torch.tensor([1]))
    with pytest.raises(ValueError, match="input 1 has batch size 1, input 0 has 2; they must be equal"):
        concatenated([kjt(), single])


def test_counts_are_known_where_all_inputs_know_them():
    assert concatenated([kjt().sync(), kjt().sync()]).length_per_key_or_none() == [2, 2, 2, 2]
    assert concatenated([kjt().sync(), kjt()]).length_per_key_or_none() is None


def test_inverse_indices():
    with_indices = kjt(inverse_indices=(["a", "b"], torch.tensor([[0, 1], [1, 0]])))
    keys, indices = concatenated([with_indices, with_indices]).inverse_indices()
    assert keys == ["a", "b", "a", "b"]
    assert indices.tolist() == [[0, 1], [1, 0], [0, 1], [1, 0]]
    assert concatenated([with_indices, kjt()]).inverse_indices_or_none() is None
