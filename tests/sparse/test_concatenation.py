import pytest
import torch

from meshrec.sparse import JaggedTensor, KeyedJaggedTensor
from meshrec.sparse.concatenation import concatenate_bags, concatenate_keys


def jt(weights: torch.Tensor | None = None, values: torch.Tensor | None = None) -> JaggedTensor:
    values = torch.arange(2) if values is None else values
    return JaggedTensor(values, weights, offsets=torch.tensor([0, 0, 2]))


def kjt(**strides) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(["a", "b"], torch.arange(4), lengths=torch.ones(4, dtype=torch.int64), **strides)


def test_bags():
    values, weights, lengths = concatenate_bags("concat", [jt(torch.ones(2)), jt(torch.zeros(2))])
    assert values.tolist() == [0, 1, 0, 1]
    assert weights.tolist() == [1.0, 1.0, 0.0, 0.0]
    assert lengths.tolist() == [0, 2, 0, 2]
    assert concatenate_bags("concat", [jt()])[1] is None


def test_some_weights():
    with pytest.raises(ValueError, match=r"1.*2 inputs"):
        concatenate_bags("concat", [jt(torch.ones(2)), jt()])


def test_integers_and_floats():
    with pytest.raises(ValueError, match=r"\['int64', 'float32'\]"):
        concatenate_bags("concat", [jt(), jt(values=torch.rand(2))])


def test_strides():
    assert concatenate_keys([kjt(), kjt()]).stride() == 2
    assert concatenate_keys([kjt(stride_per_key=[1, 3])] * 2).stride_per_key_per_rank() == [
        [1],
        [3],
        [1],
        [3],
    ]
    with pytest.raises(ValueError, match="inputs"):
        concatenate_keys([kjt(), kjt(stride_per_key=[1, 3])])
    single = KeyedJaggedTensor(["c"], torch.arange(1), lengths=torch.tensor([1]))
    with pytest.raises(ValueError, match=r"input 1.*size 1.*input 0.*2"):
        concatenate_keys([kjt(), single])


def test_counts_are_known_where_all_inputs_know_them():
    assert concatenate_keys([kjt().sync(), kjt().sync()]).length_per_key_or_none() == [2, 2, 2, 2]
    assert concatenate_keys([kjt().sync(), kjt()]).length_per_key_or_none() is None


def test_inverse_indices():
    with_indices = kjt(inverse_indices=(["a", "b"], torch.tensor([[0, 1], [1, 0]])))
    keys, indices = concatenate_keys([with_indices, with_indices]).inverse_indices()
    assert keys == ["a", "b", "a", "b"]
    assert indices.tolist() == [[0, 1], [1, 0], [0, 1], [1, 0]]
    assert concatenate_keys([with_indices, kjt()]).inverse_indices_or_none() is None
