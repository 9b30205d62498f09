import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshrec.sparse import KeyedTensor


def keyed(requires_grad: bool = False) -> KeyedTensor:
    values = torch.arange(6.0).view(2, 3)
    return KeyedTensor(["a", "b"], [1, 2], values.requires_grad_(requires_grad))


def test_what_it_knows():
    kt = keyed()
    assert kt.keys() == ["a", "b"]
    assert kt.length_per_key() == [1, 2]
    assert kt.offset_per_key() == [0, 1, 3]
    assert kt.key_dim() == 1
    assert kt.device() == torch.device("cpu")
    assert kt.size_in_bytes() == 24
    assert kt.values().shape == (2, 3)


def test_pieces_by_key():
    kt = keyed()
    assert kt["b"].tolist() == [[1.0, 2.0], [4.0, 5.0]]
    assert {key: piece.tolist() for key, piece in kt.to_dict().items()} == {
        "a": [[0.0], [3.0]],
        "b": [[1.0, 2.0], [4.0, 5.0]],
    }
    assert kt["a"].data_ptr() == kt.values().data_ptr()
    with pytest.raises(KeyError, match=r"'c'.*KeyedTensor.*\['a', 'b'\]"):
        kt["c"]


def test_other_key_dimensions():
    rows = KeyedTensor(["a", "b"], [1, 2], torch.arange(9.0).view(3, 3), key_dim=0)
    assert rows["b"].tolist() == [[3.0, 4.0, 5.0], [6.0, 7.0, 8.0]]
    last = KeyedTensor(["a", "b"], [1, 2], torch.arange(12.0).view(2, 2, 3), key_dim=-1)
    assert last["a"].flatten().tolist() == [0.0, 3.0, 6.0, 9.0]


def test_of_two_equal_keys_the_last_is_read():
    assert KeyedTensor(["a", "a"], [1, 2], torch.arange(6.0).view(2, 3))["a"].shape == (2, 2)


def test_reading_every_key_makes_one_backward_node():
    kt = keyed(requires_grad=True)
    assert kt["a"].grad_fn is kt["b"].grad_fn
    assert kt["a"].grad_fn is not None
    (kt["a"].sum() + 2 * kt["b"].sum()).backward()
    assert kt.values().grad.tolist() == [[1.0, 2.0, 2.0]] * 2


def test_a_piece_read_without_gradient_does_not_lose_the_next_ones():
    kt = keyed(requires_grad=True)
    with torch.no_grad():
        assert not kt["a"].requires_grad
    assert kt["a"].requires_grad
    with torch.inference_mode():
        assert not kt["a"].requires_grad
    (kt["a"] * torch.ones(2, 1, requires_grad=True)).sum().backward()


def test_from_tensor_list():
    kt = KeyedTensor.from_tensor_list(["a", "b"], [torch.ones(2, 1), torch.zeros(2, 3)])
    assert kt.length_per_key() == [1, 3]
    assert kt["b"].shape == (2, 3)
    rows = KeyedTensor.from_tensor_list(
        ["a", "b"], [torch.ones(1, 2), torch.zeros(3, 2)], key_dim=0, cat_dim=0
    )
    assert rows["b"].shape == (3, 2)


def other() -> KeyedTensor:
    return KeyedTensor(["c", "d"], [2, 1], torch.arange(6.0).view(2, 3) + 10)


def test_regroup():
    groups = KeyedTensor.regroup([keyed(), other()], [["b", "c"], ["a"], ["d", "a", "b"], [], ["a", "b"]])
    assert [group.tolist() for group in groups] == [
        [[1.0, 2.0, 10.0, 11.0], [4.0, 5.0, 13.0, 14.0]],
        [[0.0], [3.0]],
        [[12.0, 0.0, 1.0, 2.0], [15.0, 3.0, 4.0, 5.0]],
        [[], []],
        [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]],
    ]


def test_regroup_takes_the_last_of_equal_keys():
    second = KeyedTensor(["c", "b"], [1, 2], torch.arange(6.0).view(2, 3) + 10)
    (group,) = KeyedTensor.regroup([keyed(), second], [["b", "a"]])
    assert group.tolist() == [[11.0, 12.0, 0.0], [14.0, 15.0, 3.0]]


def test_regroup_in_other_dimensions_and_with_keys_of_no_width():
    kt = KeyedTensor(["a", "b", "c"], [1, 0, 2], torch.arange(3.0), key_dim=0)
    assert [g.tolist() for g in KeyedTensor.regroup([kt], [["c", "b"], ["b"], ["b", "a"]])] == [
        [1.0, 2.0],
        [],
        [0.0],
    ]


def test_a_stretch_of_one_tensor_is_not_copied():
    kt = keyed()
    whole, part = KeyedTensor.regroup([kt, other()], [["a", "b"], ["d"]])
    assert whole.data_ptr() == kt.values().data_ptr()
    assert KeyedTensor.regroup([kt], [["a", "b"]])[0] is kt.values()
    assert part._base is not None


def test_regroup_is_differentiable():
    first = torch.rand(2, 3, dtype=torch.float64, requires_grad=True)
    second = torch.rand(2, 3, dtype=torch.float64, requires_grad=True)

    def regrouped(first, second):
        kts = [KeyedTensor(["a", "b"], [1, 2], first), KeyedTensor(["c", "d"], [2, 1], second)]
        return tuple(KeyedTensor.regroup(kts, [["b", "c"], ["a", "b"], ["d"]]))

    assert torch.autograd.gradcheck(regrouped, (first, second))


def test_regroup_as_dict():
    grouped = KeyedTensor.regroup_as_dict([keyed(), other()], [["b", "c"], ["a"]], ["u", "v"])
    assert {key: group.shape for key, group in grouped.items()} == {"u": (2, 4), "v": (2, 1)}


@settings(deadline=None)
@given(data=st.data(), widths=st.lists(st.integers(0, 3), min_size=1, max_size=8))
def test_regroup_puts_every_piece_in_its_place(data, widths):
    keys = [f"f{i}" for i in range(len(widths))]
    border = data.draw(st.integers(0, len(keys)))
    pieces = {key: torch.rand(2, width) for key, width in zip(keys, widths, strict=True)}
    kts = [
        KeyedTensor.from_tensor_list(part, [pieces[key] for key in part])
        for part in (keys[:border], keys[border:])
        if part
    ]
    groups = data.draw(st.lists(st.lists(st.sampled_from(keys), min_size=1, max_size=5), max_size=4))
    for group, result in zip(groups, KeyedTensor.regroup(kts, groups), strict=True):
        assert torch.equal(result, torch.cat([pieces[key] for key in group], dim=1))


@settings(deadline=None)
@given(widths=st.lists(st.integers(0, 3), min_size=1, max_size=5))
def test_dict_and_back(widths):
    keys = [f"f{i}" for i in range(len(widths))]
    kt = KeyedTensor(keys, widths, torch.rand(2, sum(widths)))
    pieces = kt.to_dict()
    again = KeyedTensor.from_tensor_list(list(pieces), list(pieces.values()))
    assert again.length_per_key() == widths
    assert torch.equal(again.values(), kt.values())


def test_to_record_stream_and_pickle(monkeypatch):
    kt = keyed()
    kt["a"]
    assert kt.to(torch.device("meta"))["b"].is_meta
    assert pickle.loads(pickle.dumps(kt)).to_dict().keys() == {"a", "b"}
    seen = []
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: seen.append((tensor, stream)))
    kt.record_stream("stream")
    assert seen == [(kt.values(), "stream")]


def test_printing():
    assert (
        str(keyed())
        == repr(keyed())
        == ('KeyedTensor({\n    "a": [[0.0], [3.0]],\n    "b": [[1.0, 2.0], [4.0, 5.0]]\n})')
    )
    assert str(KeyedTensor([], [], torch.empty(2, 0))) == "KeyedTensor()"
    assert str(keyed().to(torch.device("meta"))) == "KeyedTensor(keys=['a', 'b'], values=float32[2, 3])"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: KeyedTensor(["a"], [1, 2], torch.ones(2, 3)), "1 keys.*2"),
        (
            lambda: KeyedTensor(["a", "b"], [1, 2], torch.ones(2, 4)),
            "3.*size 4.*dimension 1",
        ),
        (lambda: KeyedTensor.from_tensor_list([], []), "tensor"),
        (lambda: KeyedTensor.regroup([], [["a"]]), "tensors"),
        (
            lambda: KeyedTensor.regroup([keyed()], [["a", "z"]]),
            r"'z'.*\['a', 'b'\]",
        ),
        (
            lambda: KeyedTensor.regroup([keyed(), KeyedTensor(["c"], [2], torch.ones(2, 3), 0)], [["a"]]),
            r"key_dim.*\[1, 0\]",
        ),
        (
            lambda: KeyedTensor.regroup_as_dict([keyed()], [["a"]], ["u", "v"]),
            "1 groups.*2 keys",
        ),
    ],
)
def test_errors(make, message):
    with pytest.raises(ValueError, match=message):
        make()
