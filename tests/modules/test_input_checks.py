import pytest
import torch

from meshrec import KeyedJaggedTensor
from meshrec.modules.input_checks import check_device, inverse_rows, positions_of, sample_weights


def bags(inverse_keys=None):
    """Key a has two bags and b one, for three samples."""
    rows = torch.tensor([[0, 1, 1], [0, 0, 0]])[: len(inverse_keys or [])]
    return KeyedJaggedTensor(
        ["a", "b"],
        torch.tensor([1, 2, 3]),
        lengths=torch.tensor([1, 1, 1]),
        stride_per_key_per_rank=[[2], [1]],
        inverse_indices=None if inverse_keys is None else (inverse_keys, rows),
    )


def test_rows_of_samples_come_in_the_order_that_was_asked_for():
    assert [row.tolist() for row in inverse_rows(bags(["a", "b"]), ["b", "a"])] == [[0, 0, 0], [0, 1, 1]]


def test_what_is_missing_is_named():
    with pytest.raises(ValueError, match="batch"):
        inverse_rows(bags(), ["a"])
    with pytest.raises(ValueError, match=r"\['b'\].*\['a'\]"):
        inverse_rows(bags(["a"]), ["a", "b"])
    with pytest.raises(ValueError, match=r"\['c'\].*\['t1', 't2'\].*\['a', 'b'\]"):
        positions_of(["a", "b"], ["b", "c", "c"], ["t0", "t1", "t2"])
    with pytest.raises(ValueError, match="weights"):
        sample_weights(bags(["a", "b"]), is_weighted=True)
    with pytest.raises(ValueError, match="'t0'"):
        check_device(torch.empty(1, device="meta"), "t0", torch.device("cpu"))


def test_positions_and_weights():
    assert positions_of(["a", "b"], ["b", "a", "b"], ["t0", "t1", "t2"]) == [1, 0, 1]
    assert sample_weights(bags(["a", "b"]), is_weighted=False) is None
