"""What TorchRec's validator says of KeyedJaggedTensors."""

import pytest
import torch

from meshrec.compat.bridge.embeddings import EmbeddingBagConfig
from meshrec.compat.bridge.sparse import KeyedJaggedTensor
from meshrec.compat.bridge.sparse.validator import validate_keyed_jagged_tensor

VALUES = torch.arange(3)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({}, "empty"),
        ({"lengths": torch.tensor([1, 1])}, "lengths"),
        ({"offsets": torch.tensor([], dtype=torch.int64)}, "offsets"),
        ({"offsets": torch.tensor([1, 2, 3])}, "offset"),
        ({"offsets": torch.tensor([0, 1, 2])}, "element"),
        ({"lengths": torch.tensor([3]), "offsets": torch.tensor([0, 1, 3])}, "2 lengths.*1"),
        ({"lengths": torch.tensor([2, 1]), "offsets": torch.tensor([0, 1, 3])}, "cumulative"),
        ({"lengths": torch.tensor([3]), "weights": torch.ones(2)}, "weights"),
        ({"lengths": torch.tensor([3]), "keys": []}, "empty"),
        ({"lengths": torch.tensor([1, 1, 1]), "keys": ["a", "b"]}, "divisible"),
        ({"lengths": torch.tensor([1, 2]), "keys": ["a", "a"]}, "unique"),
    ],
)
def test_what_cannot_be_is_an_error(parts, message):
    kjt = KeyedJaggedTensor(**{"keys": ["a"], "values": VALUES, **parts})
    with pytest.raises(ValueError, match=message):
        validate_keyed_jagged_tensor(kjt)


@pytest.mark.parametrize("strides", [[[1, 1]], [[3]], [[1], [1]]])
def test_doubtful_strides_are_a_warning(strides, caplog):
    kjt = KeyedJaggedTensor(["a"], VALUES, lengths=torch.tensor([1, 2]), stride_per_key_per_rank=strides)
    assert validate_keyed_jagged_tensor(kjt)
    assert "stride_per_key_per_rank" in caplog.text


def test_ids_outside_their_table_are_told(caplog):
    kjt = KeyedJaggedTensor(["a"], VALUES, lengths=torch.tensor([1, 2]))
    assert validate_keyed_jagged_tensor(kjt, [EmbeddingBagConfig(3, 2, "a")])
    assert not validate_keyed_jagged_tensor(kjt, [EmbeddingBagConfig(2, 2, "a")])
    assert "ids from 0 to 2, its table has the rows 0 to 1" in caplog.text
