import pytest
import torch

from meshrec.compat.bridge.pools import KeyedJaggedTensorPool, TensorPool
from meshrec.compat.bridge.sparse import KeyedJaggedTensor

CPU = torch.device("cpu")


def test_rows_are_kept_and_the_last_of_equal_ids_wins():
    pool = TensorPool(5, 2, torch.float32, CPU)
    pool.update(torch.tensor([1, 4, 1], dtype=torch.int32), torch.tensor([[1.0, 1], [4, 4], [2, 2]]))
    assert pool(torch.tensor([4, 0, 1])).tolist() == [[4, 4], [0, 0], [2, 2]]
    other = TensorPool(5, 2, torch.float32, CPU, loaded_values=torch.zeros(5, 2))
    other.load_state_dict(pool.state_dict())
    assert torch.equal(other.pool, pool.pool)
    assert (pool.pool_size, pool.dim, pool.dtype, pool.device) == (5, 2, torch.float32, CPU)


@pytest.mark.parametrize(
    ("ids", "values", "message"),
    [
        (torch.tensor([5]), torch.ones(1, 2), "0.*4.*5.*5"),
        (torch.tensor([1.0]), torch.ones(1, 2), "integers"),
        (torch.tensor([1]), torch.ones(1, 3), r"\[1, 2\]"),
    ],
)
def test_what_does_not_fit_changes_nothing(ids, values, message):
    pool = TensorPool(5, 2, torch.float32, CPU)
    with pytest.raises(ValueError, match=message):
        pool.update(ids, values)
    assert pool.pool.sum() == 0


def bags(keys=("g", "f", "other")) -> KeyedJaggedTensor:
    values = torch.tensor([11, 13, 13, 12, 1, 3, 3, 2, 7])
    return KeyedJaggedTensor(
        list(keys),
        values,
        values.float(),
        lengths=torch.tensor([1, 2, 1, 1, 2, 1, 0, 0, 1], dtype=torch.int32),
    )


def test_bags_are_kept_by_feature():
    pool = KeyedJaggedTensorPool(4, {"f": 2, "g": 3}, is_weighted=True, device=CPU)
    pool.update(torch.tensor([2, 0, 2]), bags())
    found = pool.lookup(torch.tensor([2, 1, 0]))
    assert found.keys() == ["f", "g"]
    assert found.lengths().tolist() == [1, 0, 2, 1, 0, 2]
    assert found.values().tolist() == [2, 3, 3, 12, 13, 13]
    assert found.weights().tolist() == found.values().tolist()
    nothing = pool(torch.tensor([], dtype=torch.int64))
    assert nothing.keys() == ["f", "g"]
    assert nothing.values().numel() == nothing.lengths().numel() == 0
    other = KeyedJaggedTensorPool(4, {"f": 2, "g": 3}, is_weighted=True, device=CPU)
    other.load_state_dict(pool.state_dict())
    assert torch.equal(other.lookup(torch.tensor([2])).values(), torch.tensor([2, 12]))


@pytest.mark.parametrize(
    ("limits", "keys", "message"),
    [
        ({"f": 1, "g": 3}, ("g", "f", "o"), "'f'.*2.*keeps 1"),
        ({"f": 2, "x": 3}, ("g", "f", "o"), "'x'"),
    ],
)
def test_bags_that_do_not_fit_change_nothing(limits, keys, message):
    pool = KeyedJaggedTensorPool(4, limits, device=CPU)
    with pytest.raises(ValueError, match=message):
        pool.update(torch.tensor([0, 1, 2]), bags(keys))
    assert pool.key_lengths.sum() == 0


def test_there_is_no_uvm():
    with pytest.raises(ValueError, match="enable_uvm"):
        TensorPool(5, 2, torch.float32, CPU, enable_uvm=True)
