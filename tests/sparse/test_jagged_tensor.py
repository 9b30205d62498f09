import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshrec.sparse import JaggedTensor


def jagged(weighted: bool = False) -> JaggedTensor:
    weights = torch.tensor([0.5, 1.0, 2.0]) if weighted else None
    return JaggedTensor(torch.tensor([5.0, 7.0, 1.0]), weights, lengths=torch.tensor([1, 0, 2]))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_lengths_and_offsets_follow_from_one_another(dtype):
    lengths, offsets = torch.tensor([1, 0, 2], dtype=dtype), torch.tensor([0, 1, 1, 3], dtype=dtype)
    by_lengths = JaggedTensor(torch.arange(3), lengths=lengths)
    by_offsets = JaggedTensor(torch.arange(3), offsets=offsets)
    assert by_lengths.offsets_or_none() is None
    assert by_offsets.lengths_or_none() is None
    assert torch.equal(by_lengths.offsets(), offsets)
    assert torch.equal(by_offsets.lengths(), lengths)
    assert by_lengths.offsets().dtype == by_offsets.lengths().dtype == dtype


def test_derived_fields_are_computed_once():
    jt = jagged()
    assert jt.offsets() is jt.offsets()
    assert jt.offsets_or_none() is jt.offsets()
    other = JaggedTensor(torch.arange(3), offsets=torch.tensor([0, 3]))
    assert other.lengths() is other.lengths()


def test_weights():
    assert jagged().weights_or_none() is None
    assert jagged(weighted=True).weights().tolist() == [0.5, 1.0, 2.0]
    with pytest.raises(ValueError, match="JaggedTensor"):
        jagged().weights()


def test_empty():
    jt = JaggedTensor.empty(is_weighted=True, values_dtype=torch.int64, weights_dtype=torch.float64)
    assert jt.values().dtype == torch.int64
    assert jt.weights().dtype == torch.float64
    assert jt.lengths().dtype == torch.int32
    assert jt.offsets().tolist() == [0]
    assert jt.to_dense() == []
    assert jt.to_padded_dense().shape == (0, 0)
    assert JaggedTensor.empty().weights_or_none() is None


def test_empty_like():
    like = JaggedTensor.empty_like(jagged(weighted=True))
    assert like.values().dtype == torch.float32
    assert like.weights().numel() == like.values().numel() == like.lengths().numel() == 0
    assert like.lengths().dtype == torch.int64


def test_from_dense():
    bags = [torch.tensor([1.0, 2.0]), torch.tensor([]), torch.tensor([3.0])]
    jt = JaggedTensor.from_dense(bags, weights=[bag * 2 for bag in bags])
    assert jt.values().tolist() == [1.0, 2.0, 3.0]
    assert jt.weights().tolist() == [2.0, 4.0, 6.0]
    assert jt.lengths().tolist() == [2, 0, 1]
    assert jt.lengths().dtype == torch.int32


def test_from_dense_lengths():
    dense = torch.tensor([[1, 2, 3], [4, 5, 6]])
    jt = JaggedTensor.from_dense_lengths(dense, torch.tensor([1, 3]), weights=dense / 2)
    assert jt.values().tolist() == [1, 4, 5, 6]
    assert jt.weights().tolist() == [0.5, 2.0, 2.5, 3.0]
    assert jt.lengths().tolist() == [1, 3]
    rows = JaggedTensor.from_dense_lengths(torch.arange(8).view(2, 2, 2), torch.tensor([0, 1]))
    assert rows.values().tolist() == [[4, 5]]


def test_to_dense():
    assert [bag.tolist() for bag in jagged().to_dense()] == [[5.0], [], [7.0, 1.0]]
    assert jagged().to_dense_weights() is None
    weights = jagged(weighted=True).to_dense_weights()
    assert weights is not None
    assert [bag.tolist() for bag in weights] == [[0.5], [], [1.0, 2.0]]


def test_to_padded_dense():
    jt = jagged(weighted=True)
    assert jt.to_padded_dense().tolist() == [[5.0, 0.0], [0.0, 0.0], [7.0, 1.0]]
    assert jt.to_padded_dense(1, 9.0).tolist() == [[5.0], [9.0], [7.0]]
    assert jt.to_padded_dense(3, 9.0).tolist() == [[5.0, 9.0, 9.0], [9.0, 9.0, 9.0], [7.0, 1.0, 9.0]]
    weights = jt.to_padded_dense_weights()
    assert weights is not None
    assert weights.tolist() == [[0.5, 0.0], [0.0, 0.0], [1.0, 2.0]]
    assert jagged().to_padded_dense_weights() is None
    integers = JaggedTensor(torch.tensor([5]), lengths=torch.tensor([1, 0])).to_padded_dense(2)
    assert integers.dtype == torch.int64
    assert JaggedTensor(torch.empty(0, 2), lengths=torch.tensor([0])).to_padded_dense(2).tolist() == [
        [[0.0] * 2] * 2
    ]


def test_padding_is_differentiable():
    rows = torch.rand(3, 2, dtype=torch.float64, requires_grad=True)
    lengths = torch.tensor([1, 0, 2])
    assert torch.autograd.gradcheck(lambda v: JaggedTensor(v, lengths=lengths).to_padded_dense(2), (rows,))
    (grad,) = torch.autograd.grad(JaggedTensor(rows, lengths=lengths).to_padded_dense(1).sum(), rows)
    assert grad.tolist() == [[1.0, 1.0], [1.0, 1.0], [0.0, 0.0]]


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 9), max_size=4), min_size=1, max_size=6))
def test_dense_and_back(bags):
    jt = JaggedTensor.from_dense([torch.tensor(bag, dtype=torch.int64) for bag in bags])
    assert [bag.tolist() for bag in jt.to_dense()] == bags
    again = JaggedTensor.from_dense_lengths(jt.to_padded_dense(), jt.lengths())
    assert torch.equal(again.values(), jt.values())


def test_to_another_device_keeps_what_is_known():
    jt = jagged(weighted=True)
    jt.offsets()
    moved = jt.to(torch.device("meta"))
    assert moved.device() == torch.device("meta")
    assert moved.weights().is_meta
    assert moved.lengths().is_meta
    assert moved.offsets_or_none() is not None
    assert jagged().to(torch.device("cpu")).offsets_or_none() is None


def test_record_stream_reaches_all_tensors(monkeypatch):
    jt = jagged(weighted=True)
    jt.offsets()
    seen = []
    monkeypatch.setattr(
        torch.Tensor, "record_stream", lambda tensor, stream: seen.append((id(tensor), stream))
    )
    jt.record_stream("stream")
    assert seen == [(id(t), "stream") for t in (jt.values(), jt.weights(), jt.lengths(), jt.offsets())]


def test_size_in_bytes():
    assert jagged().size_in_bytes() == 3 * 4 + 3 * 8


def test_printing():
    integers = JaggedTensor(torch.tensor([5, 7, 1]), lengths=torch.tensor([1, 2]))
    assert str(integers) == repr(integers) == "JaggedTensor({[[5], [7, 1]]})"
    assert str(jagged(weighted=True)) == (
        'JaggedTensor({"values": [[5.0], [], [7.0, 1.0]], "weights": [[0.5], [], [1.0, 2.0]]})'
    )
    meta = jagged().to(torch.device("meta"))
    assert str(meta) == "JaggedTensor(values=float32[3], lengths=int64[3])"


def test_pickles():
    again = pickle.loads(pickle.dumps(jagged(weighted=True)))
    assert str(again) == str(jagged(weighted=True))


VALUES = torch.arange(3)
LENGTHS = torch.tensor([1, 2])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: JaggedTensor(VALUES), "neither"),
        (lambda: JaggedTensor([1, 2], lengths=LENGTHS), "values"),
        (lambda: JaggedTensor(torch.tensor(1), lengths=LENGTHS), r"1 dimension.*int64.*\[\]"),
        (
            lambda: JaggedTensor(VALUES, lengths=LENGTHS.float()),
            "int32.*int64.*float32",
        ),
        (
            lambda: JaggedTensor(VALUES, lengths=[1, 2]),
            r"int32.*int64.*\[1, 2\]",
        ),
        (
            lambda: JaggedTensor(VALUES, lengths=LENGTHS[None]),
            r"1 dimension.*int64.*\[1, 2\]",
        ),
        (
            lambda: JaggedTensor(VALUES, offsets=LENGTHS[:0]),
            "1 dimension.*0",
        ),
        (lambda: JaggedTensor(VALUES, lengths=LENGTHS, offsets=LENGTHS), "2 lengths.*need 3.*2"),
        (
            lambda: JaggedTensor(VALUES, torch.ones(2), LENGTHS),
            r"3.*float32.*\[2\]",
        ),
        (lambda: JaggedTensor(VALUES, lengths=LENGTHS.to("meta")), "lengths"),
        (
            lambda: JaggedTensor(VALUES, torch.ones(3, device="meta"), LENGTHS),
            "weights",
        ),
        (lambda: JaggedTensor.from_dense([]), "JaggedTensor.empty"),
        (
            lambda: JaggedTensor.from_dense([VALUES], [torch.ones(2)]),
            r"values.*\[3\].*\[2\]",
        ),
        (
            lambda: JaggedTensor.from_dense_lengths(VALUES, LENGTHS),
            r"\[B, T, ...\].*\[B\].*\[3\].*\[2\]",
        ),
        (
            lambda: JaggedTensor.from_dense_lengths(VALUES[None], LENGTHS[:1], torch.ones(1, 2)),
            r"\[B, T\].*\[1, 3\].*\[1, 2\]",
        ),
    ],
)
def test_construction_errors(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_validate_names_the_sample():
    jagged(weighted=True).validate()
    with pytest.raises(ValueError, match=r"sample 1.*-1.*0"):
        JaggedTensor(VALUES, lengths=torch.tensor([4, -1])).validate()


def test_lengths_and_offsets_that_disagree_are_refused():
    values, lengths, offsets = torch.arange(3.0), torch.tensor([1, 2]), torch.tensor([0, 2, 3])
    with pytest.raises(ValueError, match=r"sample 0.*1.*offsets 0.*2"):
        JaggedTensor(values, lengths=lengths, offsets=offsets)
    for dtype in (torch.int32, torch.int64):
        jt = JaggedTensor(values, lengths=lengths, offsets=torch.tensor([0, 1, 3], dtype=dtype))
        assert jt.offsets().dtype == dtype


def test_padding_to_the_longest_bag_is_exported():
    class Padded(torch.nn.Module):
        def forward(self, values, lengths):
            return JaggedTensor(values, lengths=lengths).to_padded_dense().sum(1)

    example = torch.arange(6.0), torch.tensor([1, 2, 3, 0])
    auto = {0: torch.export.Dim.AUTO}
    program = torch.export.export(Padded(), example, dynamic_shapes=(auto, auto), strict=False).module()
    for lengths in ([1, 2, 3, 0], [5, 1]):
        inputs = torch.arange(6.0), torch.tensor(lengths)
        assert torch.equal(program(*inputs), Padded()(*inputs))
