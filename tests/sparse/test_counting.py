import pytest
import torch

from meshrec.sparse import KeyedJaggedTensor
from meshrec.sparse.counting import count_per_key, sum_counts


def kjt(lengths: list[int], num_values: int, **strides) -> KeyedJaggedTensor:
    lengths = torch.tensor(lengths, dtype=torch.int32)
    return KeyedJaggedTensor(["a", "b"], torch.arange(num_values), lengths=lengths, **strides)


def test_counts():
    assert count_per_key(kjt([2, 0, 1, 4], 7)) == [2, 5]
    assert count_per_key(kjt([2, 0, 1, 4], 7, stride_per_key=[1, 3])) == [2, 5]
    assert count_per_key(kjt([2, 0], 2, stride_per_key=[0, 2])) == [0, 2]
    assert count_per_key(kjt([], 0)) == [0, 0]
    assert count_per_key(KeyedJaggedTensor.empty()) == []


@pytest.mark.parametrize("strides", [{}, {"stride_per_key": [1, 3]}])
def test_lengths_that_the_values_contradict(strides):
    with pytest.raises(ValueError, match=r"7.*6 values"):
        count_per_key(kjt([2, 0, 1, 4], 6, **strides))


def test_total():
    assert sum_counts([1, 2]) == 3
    assert sum_counts([]) == 0
