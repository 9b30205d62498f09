"""The sparse types against TorchRec's: what they print, and what their methods give."""

import warnings

import pytest
import torch

import meshrec

pytestmark = pytest.mark.peers


@pytest.fixture(scope="module")
def torchrec():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("torchrec.sparse.jagged_tensor", reason="`make parity` installs it")


def make_jagged(room, *, weighted=False, by_offsets=False):
    bags = {"offsets": torch.tensor([0, 1, 1, 3])} if by_offsets else {"lengths": torch.tensor([1, 0, 2])}
    weights = torch.tensor([0.5, 1.0, 2.0]) if weighted else None
    return room.JaggedTensor(torch.tensor([1.0, 2.0, 3.0]), weights, **bags)


def make_keyed(room, *, weighted=False, by_offsets=False):
    bags = (
        {"offsets": torch.tensor([0, 1, 3, 3, 4, 4, 6])}
        if by_offsets
        else {"lengths": torch.tensor([1, 2, 0, 1, 0, 2])}
    )
    weights = torch.tensor([0.5, 1.0, 2.0, -1.5, 4.0, 0.25]) if weighted else None
    return room.KeyedJaggedTensor(["a", "b", "c"], torch.tensor([5, 7, 1, 2, 3, 9]), weights, **bags)


def make_variable(room):
    return room.KeyedJaggedTensor(
        ["a", "b"],
        torch.tensor([5, 7, 1, 2]),
        lengths=torch.tensor([1, 2, 1]),
        stride_per_key_per_rank=[[2], [1]],
    )


def make_dense(room, keys=("a", "b"), start=0.0):
    return room.KeyedTensor(list(keys), [1, 2], torch.arange(start, start + 6).view(2, 3))


MAKERS = {
    "jagged": make_jagged,
    "jagged-weighted": lambda room: make_jagged(room, weighted=True),
    "jagged-offsets": lambda room: make_jagged(room, by_offsets=True),
    "keyed": make_keyed,
    "keyed-weighted": lambda room: make_keyed(room, weighted=True),
    "keyed-offsets": lambda room: make_keyed(room, by_offsets=True),
    "keyed-variable": make_variable,
    "keyed-empty": lambda room: room.KeyedJaggedTensor.empty(),
    "dense": make_dense,
}
KEYED = pytest.mark.parametrize("make", [MAKERS[name] for name in MAKERS if name.startswith("keyed")])


def plain(found):
    """Nested lists in place of tensors and of the types of either library."""
    if isinstance(found, torch.Tensor):
        return found.tolist()
    if isinstance(found, dict):
        return {key: plain(value) for key, value in found.items()}
    if isinstance(found, list | tuple):
        return [plain(value) for value in found]
    if hasattr(found, "keys"):
        return {"keys": found.keys(), **bags(found)} if hasattr(found, "offsets") else plain(found.to_dict())
    return bags(found) if hasattr(found, "offsets") else found


def bags(jagged):
    names = ("values", "lengths", "offsets", "weights_or_none")
    found = {name: plain(getattr(jagged, name)()) for name in names}
    # Without bags TorchRec has no offsets; here there is the one with the number of values, as ever.
    return {**found, "offsets": found["offsets"] or [0]}


@pytest.mark.parametrize("name", MAKERS)
def test_the_text_is_the_same_but_for_spaces(torchrec, name):
    ours, theirs = (str(MAKERS[name](room)) for room in (meshrec, torchrec))
    assert "".join(ours.split()) == "".join(theirs.split())


@KEYED
@pytest.mark.parametrize(
    "method",
    [
        "keys",
        "stride",
        "stride_per_key",
        "length_per_key",
        "offset_per_key",
        "lengths_offset_per_key",
        "lengths",
        "offsets",
        "weights_or_none",
        "to_dict",
        "variable_stride_per_key",
    ],
)
def test_methods_of_keyed_jagged_tensors(torchrec, make, method):
    ours, theirs = (plain(getattr(make(room), method)()) for room in (meshrec, torchrec))
    assert ours == theirs


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    "call",
    [
        lambda kjt, room: kjt.permute([2, 0]),
        lambda kjt, room: kjt.permute([1, 1, 0]),
        lambda kjt, room: kjt.split([1, 2]),
        lambda kjt, room: kjt.split([0, 3]),
        lambda kjt, room: kjt["b"],
        lambda kjt, room: room.KeyedJaggedTensor.concat([kjt, kjt]),
        lambda kjt, room: room.KeyedJaggedTensor.from_jt_dict(kjt.to_dict()),
        lambda kjt, room: room.KeyedJaggedTensor.empty_like(kjt),
    ],
    ids=["permute", "permute-twice", "split", "split-empty", "key", "concat", "from_jt_dict", "empty_like"],
)
def test_operations_on_keyed_jagged_tensors(torchrec, call, weighted):
    ours, theirs = (plain(call(make_keyed(room, weighted=weighted), room)) for room in (meshrec, torchrec))
    assert ours == theirs


def test_operations_on_keys_with_batch_sizes_of_their_own(torchrec):
    for call in (lambda kjt: kjt.permute([1, 0]), lambda kjt: kjt.split([1, 1]), lambda kjt: kjt["b"]):
        assert plain(call(make_variable(meshrec))) == plain(call(make_variable(torchrec)))


@pytest.mark.parametrize(
    "call",
    [
        lambda jt: jt.to_dense(),
        lambda jt: jt.to_dense_weights(),
        lambda jt: jt.to_padded_dense(),
        lambda jt: jt.to_padded_dense(1),
        lambda jt: jt.to_padded_dense(4, padding_value=-1.0),
        lambda jt: jt.to_padded_dense_weights(3),
    ],
)
def test_dense_forms_of_jagged_tensors(torchrec, call):
    ours, theirs = (plain(call(make_jagged(room, weighted=True))) for room in (meshrec, torchrec))
    assert ours == theirs


def test_jagged_tensors_from_dense_ones(torchrec):
    rows, padded = [torch.tensor([1.0]), torch.tensor([7.0, 8.0])], torch.tensor([[1.0, 0.0], [7.0, 8.0]])
    for make in (
        lambda room: room.JaggedTensor.from_dense(rows, rows),
        lambda room: room.JaggedTensor.from_dense_lengths(padded, torch.tensor([1, 2])),
        lambda room: room.JaggedTensor.empty(is_weighted=True),
    ):
        assert plain(make(meshrec)) == plain(make(torchrec))


def test_keyed_tensors(torchrec):
    for call in (
        lambda kt: [kt.keys(), kt.key_dim(), kt.length_per_key(), kt.offset_per_key(), kt["b"], kt.to_dict()],
        lambda kt: type(kt).regroup([kt, type(kt)(["c"], [2], kt["b"] + 1)], [["c", "a"], ["b"]]),
        lambda kt: type(kt).regroup_as_dict([kt], [["b", "a"]], ["both"]),
        lambda kt: type(kt).from_tensor_list(["x", "y"], [kt["a"], kt["b"]]),
    ):
        assert plain(call(make_dense(meshrec))) == plain(call(make_dense(torchrec)))
