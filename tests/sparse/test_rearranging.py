import pytest
import torch

from meshrec.sparse import KeyedJaggedTensor
from meshrec.sparse.rearranging import permute_keys, slice_keys, split_keys


def make_keyed(weighted: bool = False, **strides) -> KeyedJaggedTensor:
    values = torch.arange(6)
    lengths = torch.tensor([1, 2, 0, 1, 0, 2])
    return KeyedJaggedTensor(
        ["a", "b", "c"], values, values.float() / 2 if weighted else None, lengths=lengths, **strides
    )


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    ("sizes", "ids"), [([1, 2], [[0, 1, 2], [3, 4, 5]]), ([0, 2, 1], [[], [0, 1, 2, 3], [4, 5]])]
)
def test_groups_are_views(sizes, ids, weighted):
    kjt = make_keyed(weighted)
    groups = slice_keys(kjt, sizes)
    assert [group.values.tolist() for group in groups] == ids
    assert [len(group.lengths) for group in groups] == [2 * size for size in sizes]
    storage = kjt.values().untyped_storage().data_ptr()
    assert all(group.values.untyped_storage().data_ptr() == storage for group in groups)
    weights = [None if group.weights is None else (2 * group.weights).long().tolist() for group in groups]
    assert weights == (ids if weighted else [None] * len(sizes))


def test_all_keys_at_once_read_no_lengths():
    lengths = torch.empty(6, dtype=torch.int64, device="meta")
    kjt = KeyedJaggedTensor(["a", "b", "c"], torch.empty(9, device="meta"), lengths=lengths)
    nothing, everything = slice_keys(kjt, [0, 3])
    assert nothing.values.numel() == nothing.lengths.numel() == 0
    assert everything.values is kjt.values()


def test_batch_sizes_of_their_own_go_with_their_keys():
    kjt = make_keyed(stride_per_key=[3, 1, 2])
    first, second = split_keys(kjt, [1, 2])
    assert (first.stride_per_key(), second.stride_per_key()) == ([3], [1, 2])
    assert second["c"].to_dense()[1].tolist() == [4, 5]
    assert permute_keys(kjt, [2, 0]).stride_per_key() == [2, 3]


def test_counts_that_are_known_go_with_their_keys():
    kjt = make_keyed().sync()
    assert [part.length_per_key_or_none() for part in split_keys(kjt, [2, 1])] == [[3, 1], [2]]
    assert permute_keys(kjt, [2, 1, 0]).length_per_key_or_none() == [2, 1, 3]


@pytest.mark.parametrize("segments", [[2, 2], [-1, 1]])
def test_groups_that_are_not_there(segments):
    with pytest.raises(ValueError, match=r"0.*3 keys"):
        split_keys(make_keyed(), segments)


@pytest.mark.parametrize("index", [3, -1])
def test_positions_that_are_not_there(index):
    with pytest.raises(ValueError, match=f"{index}.*0.*2"):
        permute_keys(make_keyed(), [0, index])
