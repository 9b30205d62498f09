import pytest
import torch

from meshrec.sparse import KeyedJaggedTensor

VALUES = torch.arange(7)
LENGTHS = torch.tensor([2, 0, 1, 1, 1, 2])


def make(keys=("user", "item"), values=VALUES, lengths=LENGTHS, **rest) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(list(keys), values, lengths=lengths, **rest)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"keys": "user"}, None),
        ({"lengths": LENGTHS[:5]}, "5 bags.*among 2.*stride_per_key"),
        ({"stride": 2}, "2 keys.*2 bags.*need 4.*6.*stride_per_key"),
        ({"stride_per_key": [2, 3]}, r"\[\[2\].*\[3\].*5 bags.*6"),
        ({"stride_per_key_per_rank": [[6]]}, "2 keys"),
        ({"stride_per_key_per_rank": [[1, 2], [3]]}, "number"),
        (
            {"stride_per_key_per_rank": torch.tensor([3, 3])},
            r"stride_per_key_per_rank.*\[2 keys, ranks\].*\[2\]",
        ),
        ({"keys": []}, "6 bags"),
        ({"lengths": None}, "KeyedJaggedTensor"),
        ({"weights": torch.ones(6)}, r"7.*float32.*\[6\]"),
        ({"lengths": LENGTHS.float()}, "int32.*int64"),
    ],
)
def test_construction_errors(arguments, message):
    if message is None:
        with pytest.raises(ValueError, match=r"'user'.*\['user'\]"):
            KeyedJaggedTensor("user", VALUES, lengths=LENGTHS)
        return
    with pytest.raises(ValueError, match=message):
        make(**arguments)


NAN = torch.tensor([0.0] * 6 + [float("nan")])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lengths": torch.tensor([2, 0, 1, 1, -1, 4])}, "^key 'item', sample 1: the length is -1"),
        ({"lengths": LENGTHS + 1}, r"^key 'item', sample 0: its ids are 6 to 8, but there are 7 values"),
        (
            {"lengths": None, "offsets": torch.tensor([0, 2, 1, 3, 4, 5, 7])},
            "^key 'user', sample 1: the offsets fall",
        ),
        ({"lengths": LENGTHS - LENGTHS}, "^the lengths sum to 0, but there are 7 values"),
        ({"weights": NAN}, "^key 'item', sample 2: weight 1 is NaN"),
        ({"keys": ["user", "user"]}, "^key 'user' comes twice, at positions 0 and 1; keys must differ"),
        ({"keys": ["user", 3]}, "key 1.*3"),
        ({"length_per_key": [4, 3]}, "^key 'user': length_per_key is 4, but the lengths give 3"),
        ({"offset_per_key": [0, 4, 7]}, "^key 'item': offset_per_key is 4, but the lengths give 3"),
        ({"offset_per_key": [0, 3, 8]}, r"offset_per_key.*\[0, 3, 8\].*\[0, 3, 7\]"),
        ({"length_per_key": [7]}, r"length_per_key.*\[7\].*\[3, 4\]"),
        ({"stride_per_key_per_rank": [[-1], [7]]}, r"strides.*\[-1, 7\].*0"),
        (
            {"stride_per_key_per_rank": torch.tensor([[2], [3]])},
            r"\[2, 3\].*5 bags.*6",
        ),
        (
            {"inverse_indices": (["user", "item"], torch.tensor([[0, 1, 2], [0, 3, 1]]))},
            "^key 'item', sample 1: the inverse index is 3, but the key has 3 bags",
        ),
        (
            {"inverse_indices": (["user"], torch.tensor([[0, 1, 2]]))},
            r"inverse_indices.*\['user', 'item'\].*\[2, batch size\]",
        ),
    ],
)
def test_validate_says_what_is_wrong_and_where(arguments, message):
    with pytest.raises(ValueError, match=message):
        make(**arguments).validate()  # counts and offsets beside lengths are compared at construction


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"weights": torch.rand(7), "length_per_key": [3, 4], "offset_per_key": [0, 3, 7]},
        {"stride_per_key": [1, 5]},
        {"stride_per_key_per_rank": torch.tensor([[1, 1], [4, 0]])},
        {"keys": [], "values": VALUES[:0], "lengths": LENGTHS[:0]},
        {"lengths": None, "offsets": torch.tensor([0, 2, 2, 3, 4, 5, 7], dtype=torch.int32)},
        {"inverse_indices": (["item", "user"], torch.tensor([[0, 1, 2], [2, 2, 1]]))},
    ],
)
def test_good_inputs_pass(arguments):
    make(**arguments).validate()
