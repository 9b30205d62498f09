import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshrec.sparse import JaggedTensor, KeyedJaggedTensor

CPU = torch.device("cpu")


def kjt(weighted: bool = False, **changes) -> KeyedJaggedTensor:
    """Two keys with three bags each."""
    arguments = {
        "keys": ["a", "b"],
        "values": torch.arange(7),
        "weights": torch.arange(7) / 2 if weighted else None,
        "lengths": torch.tensor([2, 0, 1, 1, 1, 2]),
    }
    return KeyedJaggedTensor(**{**arguments, **changes})


def variable(**changes) -> KeyedJaggedTensor:
    """Key a with two bags, key b with three."""
    return kjt(**{"lengths": torch.tensor([2, 0, 1, 1, 3]), "stride_per_key_per_rank": [[2], [3]], **changes})


def bags(tensor: KeyedJaggedTensor) -> list[tuple[str, list[list[int]]]]:
    """Keys and bags, read from the numbers alone."""
    offsets, starts = tensor.offsets().tolist(), tensor.lengths_offset_per_key()
    values = tensor.values().tolist()
    return [
        (key, [values[offsets[bag] : offsets[bag + 1]] for bag in range(starts[i], starts[i + 1])])
        for i, key in enumerate(tensor.keys())
    ]


A, B = ("a", [[0, 1], [], [2]]), ("b", [[3], [4], [5, 6]])


def test_what_it_knows():
    tensor = kjt(weighted=True)
    assert bags(tensor) == [A, B]
    assert tensor.keys() == ["a", "b"]
    assert tensor.stride() == 3
    assert tensor.stride_per_key() == [3, 3]
    assert tensor.stride_per_key_per_rank() == []
    assert not tensor.variable_stride_per_key()
    assert tensor.segments_or_none() is None
    assert tensor.lengths_offset_per_key() == [0, 3, 6]
    assert tensor.length_per_key() == [3, 4]
    assert tensor.offset_per_key() == [0, 3, 7]
    assert tensor.index_per_key() == {"a": 0, "b": 1}
    assert tensor.weights().tolist() == [0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0]
    assert tensor.device() == CPU
    assert tensor.size_in_bytes() == 7 * 8 + 7 * 4 + 6 * 8 + 7 * 8
    assert tensor.inverse_indices_or_none() is None
    assert tensor.flatten_lengths() is tensor


def test_variable_batch_size_per_key():
    tensor = variable()
    assert bags(tensor) == [("a", [[0, 1], []]), ("b", [[2], [3], [4, 5, 6]])]
    assert tensor.variable_stride_per_key()
    assert tensor.stride() == 3
    assert tensor.stride_per_key() == [2, 3]
    assert tensor.stride_per_key_per_rank() == [[2], [3]]
    assert tensor.lengths_offset_per_key() == [0, 2, 5]
    assert tensor.segments_or_none().tolist() == [0, 2, 5]
    assert tensor.segments_or_none().dtype == torch.int64
    assert tensor.length_per_key() == [2, 5]
    assert tensor.offset_per_key() == [0, 2, 7]


def test_strides_per_rank_add_up():
    tensor = kjt(stride_per_key_per_rank=[[2, 1], [3, 0]])
    assert tensor.stride_per_key() == [3, 3]
    assert tensor.variable_stride_per_key()
    as_tensor = kjt(stride_per_key_per_rank=torch.tensor([[2, 1], [3, 0]], dtype=torch.int32))
    assert as_tensor.stride_per_key_per_rank() == [[2, 1], [3, 0]]


def test_stride_per_key_is_variable_only_where_keys_differ():
    assert not kjt(stride_per_key=[3, 3]).variable_stride_per_key()
    tensor = kjt(lengths=torch.tensor([2, 0, 1, 1, 3]), stride_per_key=[2, 3])
    assert tensor.stride_per_key_per_rank() == [[2], [3]]


def test_inverse_indices():
    inverse = (["a", "b"], torch.tensor([[0, 1, 0, 1], [0, 1, 2, 2]]))
    tensor = variable(inverse_indices=inverse)
    assert tensor.stride() == 4
    assert tensor.inverse_indices() is inverse
    assert tensor.to(CPU).inverse_indices()[0] == ["a", "b"]
    assert tensor.split([2])[0].inverse_indices_or_none() is inverse
    assert tensor.split([1, 1])[0].inverse_indices_or_none() is None
    assert tensor.permute([1, 0]).inverse_indices_or_none() is None
    keys, indices = KeyedJaggedTensor.concat([tensor, tensor]).inverse_indices()
    assert keys == ["a", "b", "a", "b"]
    assert indices.shape == (4, 4)
    assert KeyedJaggedTensor.concat([tensor, variable()]).inverse_indices_or_none() is None
    with pytest.raises(ValueError, match="KeyedJaggedTensor"):
        kjt().inverse_indices()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_lengths_and_offsets_keep_their_dtype(dtype):
    tensor = kjt(lengths=torch.tensor([2, 0, 1, 1, 1, 2], dtype=dtype))
    assert tensor.offsets().dtype == dtype
    by_offsets = kjt(lengths=None, offsets=tensor.offsets())
    assert bags(by_offsets) == [A, B]
    assert by_offsets.lengths().dtype == dtype
    assert by_offsets.stride() == 3
    assert by_offsets.permute([1, 0]).lengths().dtype == dtype


def test_two_dimensional_lengths_are_flattened():
    assert bags(kjt(lengths=torch.tensor([[2, 0, 1], [1, 1, 2]]))) == [A, B]


def test_derived_fields_are_computed_once():
    tensor = kjt()
    for name in ("offsets", "length_per_key", "offset_per_key", "index_per_key", "stride_per_key", "to_dict"):
        assert getattr(tensor, name)() is getattr(tensor, name)()
    assert variable().segments_or_none() is not None


def test_sync_and_unsync():
    tensor = kjt()
    assert tensor.length_per_key_or_none() is None
    assert tensor.offset_per_key_or_none() is None
    assert tensor.sync() is tensor
    assert tensor.length_per_key_or_none() == [3, 4]
    assert tensor.offset_per_key_or_none() == [0, 3, 7]
    assert tensor.unsync() is tensor
    assert tensor.length_per_key_or_none() is None


def test_from_lengths_and_offsets_sync():
    lengths = torch.tensor([2, 0, 1, 1, 1, 2])
    tensor = KeyedJaggedTensor.from_lengths_sync(["a", "b"], torch.arange(7), lengths)
    assert tensor.length_per_key_or_none() == [3, 4]
    offsets = torch.tensor([0, 2, 2, 3, 4, 5, 7])
    same = KeyedJaggedTensor.from_offsets_sync(["a", "b"], torch.arange(7), offsets, torch.rand(7))
    assert same.offset_per_key_or_none() == [0, 3, 7]
    assert same.weights().numel() == 7
    assert bags(same) == [A, B]


def test_counts_that_the_values_contradict():
    with pytest.raises(ValueError, match=r"7.*6 values"):
        kjt(values=torch.arange(6)).length_per_key()


def test_getitem():
    tensor = kjt(weighted=True)
    assert str(tensor["b"]) == str(
        JaggedTensor(torch.tensor([3, 4, 5, 6]), torch.tensor([1.5, 2.0, 2.5, 3.0]), torch.tensor([1, 1, 2]))
    )
    assert tensor["b"].values().data_ptr() == tensor.values()[3:].data_ptr()
    assert str(variable()["b"]) == "JaggedTensor({[[2], [3], [4, 5, 6]]})"
    assert kjt(keys=["only"])["only"].values() is not None
    with pytest.raises(KeyError, match=r"'z'.*KeyedJaggedTensor.*\['a', 'b'\]"):
        tensor["z"]


def test_of_two_equal_keys_the_last_is_read():
    assert str(kjt(keys=["a", "a"])["a"]) == "JaggedTensor({[[3], [4], [5, 6]]})"
    assert str(kjt(keys=["a", "a"]).to_dict()["a"]) == "JaggedTensor({[[3], [4], [5, 6]]})"


def test_to_dict():
    assert {key: str(jt) for key, jt in kjt().to_dict().items()} == {
        "a": "JaggedTensor({[[0, 1], [], [2]]})",
        "b": "JaggedTensor({[[3], [4], [5, 6]]})",
    }
    assert variable().to_dict(compute_offsets=False)["a"].lengths().tolist() == [2, 0]
    tensor = kjt()
    assert tensor.to_dict()["a"] is tensor["a"]
    given = {"a": JaggedTensor(torch.tensor([9]), lengths=torch.tensor([1]))}
    assert kjt(jt_dict=given)["a"] is given["a"]


def test_a_dict_made_without_gradient_does_not_lose_the_next_ones():
    tensor = kjt(weights=torch.ones(7, requires_grad=True))
    with torch.no_grad():
        tensor.to_dict()
    tensor["b"].weights().sum().backward()
    assert tensor.weights().grad.tolist() == [0.0] * 3 + [1.0] * 4


def test_split():
    parts = kjt(weighted=True).split([1, 0, 1])
    assert [bags(part) for part in parts] == [[A], [], [B]]
    assert parts[2].weights().tolist() == [1.5, 2.0, 2.5, 3.0]
    assert [part.stride() for part in parts] == [3, 3, 3]
    assert [part.length_per_key() for part in parts] == [[3], [], [4]]
    assert [bags(part) for part in kjt().split([1])] == [[A]]
    assert [part.stride_per_key() for part in variable().split([1, 1])] == [[2], [3]]
    assert kjt().split([]) == []


def test_split_into_all_keys_reads_nothing():
    tensor = kjt()
    (part,) = tensor.split([2])
    assert part.values() is tensor.values()
    assert tensor.length_per_key_or_none() is None
    rest, empty = tensor.split([2, 0])
    assert bags(rest) == [A, B]
    assert empty.keys() == []
    assert empty.stride() == 3


def test_permute():
    assert bags(kjt().permute([1, 0])) == [B, A]
    assert bags(kjt().permute([1])) == [B]
    assert bags(kjt().permute([1, 1, 0])) == [B, B, A]
    assert kjt().permute([]).keys() == []
    assert kjt().permute([]).stride() == 3
    weighted = kjt(weighted=True).permute([1, 0], indices_tensor=torch.tensor([1, 0]))
    assert weighted.weights().tolist() == [1.5, 2.0, 2.5, 3.0, 0.0, 0.5, 1.0]
    moved = variable().permute([1, 0])
    assert bags(moved) == [("b", [[2], [3], [4, 5, 6]]), ("a", [[0, 1], []])]
    assert moved.stride_per_key_per_rank() == [[3], [2]]
    assert variable().permute([1, 1]).stride_per_key() == [3, 3]


def test_permuting_all_keys_reads_nothing_but_keeps_what_is_known():
    tensor = kjt()
    assert tensor.permute([1, 0]).length_per_key_or_none() is None
    assert tensor.length_per_key_or_none() is None
    assert tensor.sync().permute([1, 0]).length_per_key_or_none() == [4, 3]


def test_permute_is_differentiable():
    weights = torch.rand(7, requires_grad=True)
    (grad,) = torch.autograd.grad(kjt(weights=weights).permute([1, 1]).weights().sum(), weights)
    assert grad.tolist() == [0.0] * 3 + [2.0] * 4


def test_concat():
    joined = KeyedJaggedTensor.concat([kjt(weighted=True), kjt(keys=["c", "d"], weighted=True)])
    assert bags(joined) == [A, B, ("c", A[1]), ("d", B[1])]
    assert joined.weights().numel() == 14
    assert joined.length_per_key_or_none() is None
    assert KeyedJaggedTensor.concat([kjt().sync(), kjt().sync()]).length_per_key_or_none() == [3, 4, 3, 4]
    assert KeyedJaggedTensor.concat([variable(), variable()]).stride_per_key() == [2, 3, 2, 3]


def test_from_jt_dict():
    jts = kjt(weighted=True).to_dict()
    assert bags(KeyedJaggedTensor.from_jt_dict(jts)) == [A, B]
    uneven = KeyedJaggedTensor.from_jt_dict(variable().to_dict())
    assert bags(uneven) == bags(variable())
    assert uneven.stride_per_key_per_rank() == [[2], [3]]


def test_empty():
    empty = KeyedJaggedTensor.empty(is_weighted=True, values_dtype=torch.int64)
    assert empty.keys() == []
    assert empty.stride() == 0
    assert empty.values().dtype == torch.int64
    assert empty.weights().numel() == 0
    assert empty.lengths().dtype == torch.int32
    assert empty.offsets().tolist() == [0]
    assert empty.length_per_key() == []
    assert empty.offset_per_key() == [0]
    assert empty.to_dict() == {}


def test_empty_like():
    like = KeyedJaggedTensor.empty_like(kjt(weighted=True))
    assert like.stride() == 3
    assert like.keys() == []
    assert like.values().dtype == like.lengths().dtype == torch.int64
    assert like.weights().dtype == torch.float32


def test_a_batch_without_samples():
    tensor = kjt(values=torch.arange(0), lengths=torch.tensor([], dtype=torch.int64))
    assert tensor.stride() == 0
    assert tensor.length_per_key() == [0, 0]
    assert str(tensor["a"]) == "JaggedTensor({[]})"
    assert tensor.permute([1, 0]).keys() == ["b", "a"]
    tensor.validate()


def test_to_another_device_keeps_what_is_known():
    tensor = variable(
        weights=torch.ones(7), inverse_indices=(["a", "b"], torch.zeros(2, 4, dtype=torch.int64))
    )
    tensor.sync()
    moved = tensor.to(torch.device("meta"))
    assert all(part.is_meta for part in (moved.values(), moved.weights(), moved.lengths(), moved.offsets()))
    assert moved.inverse_indices()[1].is_meta
    assert moved.offset_per_key() == [0, 2, 7]
    assert moved.stride_per_key() == [2, 3]
    assert moved.stride() == 4
    assert tensor.to(CPU, dtype=torch.float16).weights().dtype == torch.float16
    assert tensor.to(CPU, dtype=torch.float16).values().dtype == torch.int64


def test_pin_memory_and_record_stream_reach_all_tensors(monkeypatch):
    seen = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor + 0)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: seen.append(id(tensor)))
    tensor = kjt(weighted=True)
    pinned = tensor.pin_memory()
    assert str(pinned) == str(tensor)
    assert pinned.values() is not tensor.values()
    assert pinned.weights() is not tensor.weights()
    pinned.record_stream(None)
    parts = (pinned.values(), pinned.weights(), pinned.lengths_or_none(), pinned.offsets_or_none())
    assert seen == [id(part) for part in parts if part is not None]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu():
    tensor = variable(weights=torch.ones(7)).pin_memory()
    assert tensor.values().is_pinned()
    moved = tensor.to(torch.device("cuda"), non_blocking=True)
    moved.record_stream(torch.cuda.current_stream())
    assert bags(moved.permute([1, 0])) == bags(variable().permute([1, 0]))
    assert [bags(part) for part in moved.split([1, 1])] == [bags(part) for part in variable().split([1, 1])]
    moved.validate()


def test_printing():
    assert (
        str(kjt())
        == repr(kjt())
        == 'KeyedJaggedTensor({\n    "a": [[0, 1], [], [2]],\n    "b": [[3], [4], [5, 6]]\n})'
    )
    assert str(kjt(weighted=True).permute([0])) == (
        'KeyedJaggedTensor({\n    "a": {\n        "values": [[0, 1], [], [2]],\n'
        '        "weights": [[0.0, 0.5], [], [1.0]]\n    }\n})'
    )
    assert (
        str(variable()) == 'KeyedJaggedTensor({\n    "a": [[0, 1], []],\n    "b": [[2], [3], [4, 5, 6]]\n})'
    )
    assert str(KeyedJaggedTensor.empty()) == "KeyedJaggedTensor()"
    meta = kjt().to(torch.device("meta"))
    assert str(meta) == "KeyedJaggedTensor(keys=['a', 'b'], values=int64[7], lengths=int64[6])"


def test_pickles_without_what_can_be_made_again():
    tensor = variable(weights=torch.ones(7))
    tensor.to_dict()
    again = pickle.loads(pickle.dumps(tensor))
    assert str(again) == str(tensor)
    assert again.to_dict() is not None


def test_meaningless_positions():
    for positions in ([2], [0, -1]):
        with pytest.raises(ValueError, match=r"permute: index -?\d is out of range"):
            kjt().permute(positions)
    for segments in ([2, 1], [3], [3, -1]):
        with pytest.raises(ValueError, match=r"0.*2 keys"):
            kjt().split(segments)
    with pytest.raises(ValueError, match="from_jt_dict"):
        KeyedJaggedTensor.from_jt_dict({})
    with pytest.raises(ValueError, match="concat"):
        KeyedJaggedTensor.concat([])


def test_lengths_that_are_no_tensor():
    with pytest.raises(ValueError, match=r"int32.*int64.*\[1, 2\]"):
        kjt(lengths=[1, 2])


@pytest.mark.parametrize("strides", [[3, 3, 3], [1, 2, 3]])
def test_one_stride_for_each_key(strides):
    with pytest.raises(ValueError, match=r"2 keys.*stride_per_key"):
        kjt(stride_per_key=strides)


@st.composite
def tensors(draw) -> KeyedJaggedTensor:
    """Any batch: keys of equal or different numbers of bags, with or without weights, int32 or int64."""
    num_keys = draw(st.integers(1, 4))
    if draw(st.booleans()):
        strides = [draw(st.integers(0, 3))] * num_keys
    else:
        strides = draw(st.lists(st.integers(0, 3), min_size=num_keys, max_size=num_keys))
    lengths = draw(st.lists(st.integers(0, 3), min_size=sum(strides), max_size=sum(strides)))
    dtype, length_dtype = (draw(st.sampled_from([torch.int32, torch.int64])) for _ in range(2))
    values = torch.arange(sum(lengths), dtype=dtype)
    return KeyedJaggedTensor(
        [f"f{i}" for i in range(num_keys)],
        values,
        values / 2 if draw(st.booleans()) else None,
        torch.tensor(lengths, dtype=length_dtype),
        stride_per_key=strides,
    )


def same(actual: KeyedJaggedTensor, expected: KeyedJaggedTensor) -> None:
    actual.validate()
    assert str(actual) == str(expected)
    assert actual.stride_per_key() == expected.stride_per_key()
    assert actual.values().dtype == expected.values().dtype
    assert actual.lengths().dtype == expected.lengths().dtype


@settings(deadline=None, max_examples=50)
@given(tensor=tensors(), data=st.data())
def test_permute_and_back(tensor, data):
    order = data.draw(st.permutations(range(len(tensor.keys()))))
    back = sorted(range(len(order)), key=order.__getitem__)
    same(tensor.permute(order).permute(back), tensor)


@settings(deadline=None, max_examples=50)
@given(tensor=tensors(), data=st.data())
def test_split_and_concat(tensor, data):
    first = data.draw(st.integers(0, len(tensor.keys())))
    parts = [part for part in tensor.split([first, len(tensor.keys()) - first]) if part.keys()]
    same(KeyedJaggedTensor.concat(parts), tensor)


@settings(deadline=None, max_examples=50)
@given(tensor=tensors())
def test_dict_and_back(tensor):
    same(KeyedJaggedTensor.from_jt_dict(tensor.to_dict()), tensor)


@settings(deadline=None, max_examples=50)
@given(tensor=tensors())
def test_a_key_alone_is_the_same_in_every_way_of_reading_it(tensor):
    for i, key in enumerate(tensor.keys()):
        texts = {str(jt) for jt in (tensor[key], tensor.permute([i])[key], tensor.to_dict()[key])}
        assert len(texts) == 1


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"offsets": torch.tensor([0, 2, 3])}, "1.*offsets 0.*2"),
        ({"length_per_key": [2, 1]}, "length_per_key.*2.*give 1"),
        ({"offset_per_key": [0, 2, 3]}, "offset_per_key.*2.*give 1"),
        ({"lengths_offset_per_key": [0, 2, 2]}, "lengths_offset_per_key.*2.*give 1"),
    ],
)
def test_counts_that_disagree_with_lengths_are_refused(options, named):
    with pytest.raises(ValueError, match=named):
        KeyedJaggedTensor(["a", "b"], torch.arange(3), lengths=torch.tensor([1, 2]), **options)
