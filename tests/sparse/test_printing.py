import torch

from meshrec.sparse import KeyedJaggedTensor
from meshrec.sparse.printing import (
    format_bags,
    format_keyed_jagged,
    format_per_key,
    format_rows,
    format_shapes,
    is_readable,
)


def test_bags():
    values = torch.tensor([5, 7, 1])
    assert format_bags(values, [0, 1, 1, 3]) == "[[5], [], [7, 1]]"
    assert format_bags(values, [1, 3]) == "[[7, 1]]"
    assert format_bags(values, [0]) == "[]"
    assert format_bags(torch.tensor([[0.1, 2.0]]), [0, 1]) == "[[[0.1, 2.0]]]"


def test_floats_have_six_digits():
    assert (
        format_rows(torch.tensor([0.1, 1e30, 123456789.0, -1 / 3])) == "[0.1, 1e+30, 123457000.0, -0.333333]"
    )


def test_many_bags_are_cut_short():
    offsets = list(range(2001))
    assert format_bags(torch.arange(2000), offsets) == "[[0], [1], [2], ..., [1997], [1998], [1999]]"


def test_a_long_bag_is_cut_short():
    assert (
        format_bags(torch.arange(2002), [0, 2000, 2002]) == "[[0, 1, 2, ..., 1997, 1998, 1999], [2000, 2001]]"
    )


def test_many_rows_are_cut_short():
    assert format_rows(torch.arange(2000)) == "[0, 1, 2, ..., 1997, 1998, 1999]"
    assert format_rows(torch.arange(2)) == "[0, 1]"


def test_keys_are_on_lines_of_their_own():
    assert format_per_key("X", ["a", "b"], ["[1]", "[2]"]) == 'X({\n    "a": [1],\n    "b": [2]\n})'
    assert format_per_key("X", [], []) == "X()"


def test_keyed_bags():
    lengths = torch.tensor([1, 2])
    kjt = KeyedJaggedTensor(["a", "b"], torch.tensor([5, 7, 1]), lengths=lengths)
    assert format_keyed_jagged(kjt) == 'KeyedJaggedTensor({\n    "a": [[5]],\n    "b": [[7, 1]]\n})'
    weighted = KeyedJaggedTensor(["a"], torch.tensor([5]), torch.tensor([0.5]), lengths=lengths[:1])
    assert '"a": {\n        "values": [[5]],\n        "weights": [[0.5]]\n    }' in format_keyed_jagged(
        weighted
    )
    meta = KeyedJaggedTensor(["a"], torch.ones(3, device="meta"), lengths=torch.ones(3, device="meta").int())
    assert format_keyed_jagged(meta) == "KeyedJaggedTensor(keys=['a'], values=float32[3], lengths=int32[3])"


def test_what_cannot_be_read_is_described():
    meta = torch.ones(2, 3, device="meta")
    assert not is_readable(torch.ones(1), meta)
    assert is_readable(torch.ones(1), None)
    assert format_shapes("X", keys=["a"], values=meta, weights=None) == "X(keys=['a'], values=float32[2, 3])"
