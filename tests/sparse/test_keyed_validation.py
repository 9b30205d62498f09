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
        ({"lengths": LENGTHS[:5]}, "5 bags do not divide evenly among 2 keys; pass stride_per_key where"),
        ({"stride": 2}, "2 keys with 2 bags each need 4 bags, got 6; pass stride_per_key where"),
        ({"stride_per_key": [2, 3]}, r"the strides \[\[2\], \[3\]\] sum to 5 bags, but there are 6"),
        ({"stride_per_key_per_rank": [[6]]}, "the strides must have one row for each of the 2 keys"),
        ({"stride_per_key_per_rank": [[1, 2], [3]]}, "and one number in it for each rank"),
        (
            {"stride_per_key_per_rank": torch.tensor([3, 3])},
            r"stride_per_key_per_rank must be \[2 keys, ranks\], got \[2\]",
        ),
        ({"keys": []}, "6 bags belong to no key; name the keys"),
        ({"lengths": None}, "KeyedJaggedTensor: neither lengths nor offsets are given"),
        ({"weights": torch.ones(6)}, r"weights must be one per value \(7\), got float32 \[6\]"),
        ({"lengths": LENGTHS.float()}, "lengths must be an int32 or int64 tensor"),
    ],
)
def test_construction_errors(arguments, message):
    if message is None:
        with pytest.raises(
            ValueError, match=r"keys must be a list of names, got the string 'user'; pass \['user'\]"
        ):
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
        ({"keys": ["user", 3]}, "key 1 is 3; keys are strings"),
        ({"length_per_key": [4, 3]}, "^key 'user': length_per_key is 4, but the lengths give 3"),
        ({"offset_per_key": [0, 4, 7]}, "^key 'item': offset_per_key is 4, but the lengths give 3"),
        ({"offset_per_key": [0, 3, 8]}, r"offset_per_key is \[0, 3, 8\], but the lengths give \[0, 3, 7\]"),
        ({"length_per_key": [7]}, r"length_per_key is \[7\], but the lengths give \[3, 4\]"),
        ({"stride_per_key_per_rank": [[-1], [7]]}, r"the strides per key are \[-1, 7\]; they are 0 or more"),
        (
            {"stride_per_key_per_rank": torch.tensor([[2], [3]])},
            r"the strides \[2, 3\] sum to 5 bags, not 6",
        ),
        (
            {"inverse_indices": (["user", "item"], torch.tensor([[0, 1, 2], [0, 3, 1]]))},
            "^key 'item', sample 1: the inverse index is 3, but the key has 3 bags",
        ),
        (
            {"inverse_indices": (["user"], torch.tensor([[0, 1, 2]]))},
            r"inverse_indices must name the keys \['user', 'item'\] and be \[2, batch size\]",
        ),
    ],
)
def test_validate_says_what_is_wrong_and_where(arguments, message):
    tensor = make(**arguments)
    with pytest.raises(ValueError, match=message):
        tensor.validate()


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
