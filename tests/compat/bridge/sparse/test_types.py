"""The bridge's sparse types in Python, in TorchScript and in graphs."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from meshrec import sparse as core
from meshrec.compat.bridge.fx import symbolic_trace
from meshrec.compat.bridge.sparse import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from meshrec.compat.bridge.sparse.helpers import jt_is_equal, kjt_is_equal

# torch warns of the end of TorchScript; TorchRec's programs use it.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated"),
    pytest.mark.filterwarnings("ignore:The TorchScript type system:UserWarning"),  # torch's own GraphModule
]

torch.fx.wrap("len")


def keyed(*, variable: bool = False, weighted: bool = True) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(
        ["a", "b"],
        torch.tensor([5, 7, 1, 2]),
        torch.tensor([0.5, 1.0, 1.5, 2.0]) if weighted else None,
        lengths=torch.tensor([1, 2, 0, 1]),
        stride_per_key_per_rank=[[1], [3]] if variable else None,
    )


class Everything(nn.Module):
    def forward(self, kjt: KeyedJaggedTensor) -> tuple[KeyedJaggedTensor, Tensor, list[int]]:
        parts = kjt.permute([1, 0]).split([1, 1])
        whole = KeyedJaggedTensor.concat([parts[1], parts[0]])
        bags = KeyedJaggedTensor.from_jt_dict(whole.to_dict())
        return bags, bags["b"].to_padded_dense(), bags.length_per_key()


@pytest.mark.parametrize("variable", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_script_does_what_python_does(variable, weighted):
    kjt = keyed(variable=variable, weighted=weighted)
    module = Everything()
    expected, found = module(kjt), torch.jit.script(module)(kjt)
    assert kjt_is_equal(expected[0], kjt)
    assert kjt_is_equal(found[0], kjt)
    assert torch.equal(found[1], expected[1])
    assert found[2] == expected[2]


def test_permuted_as_in_the_own_type():
    theirs = keyed().permute([1, 0, 1])
    ours = core.KeyedJaggedTensor(
        ["a", "b"], torch.tensor([5, 7, 1, 2]), torch.tensor([0.5, 1.0, 1.5, 2.0]), torch.tensor([1, 2, 0, 1])
    ).permute([1, 0, 1])
    assert theirs.keys() == ours.keys()
    for name in ("values", "weights", "lengths", "offsets"):
        assert torch.equal(getattr(theirs, name)(), getattr(ours, name)())


def test_results_of_own_modules_are_of_these_types():
    assert isinstance(core.JaggedTensor(torch.ones(1), lengths=torch.tensor([1])), JaggedTensor)
    assert not isinstance(core.JaggedTensor(torch.ones(1), lengths=torch.tensor([1])), KeyedTensor)


def test_nothing_is_checked_but_dtypes():
    assert (
        KeyedJaggedTensor(["a"], torch.tensor([]), lengths=torch.tensor([])).to_dict()["a"].values().numel()
        == 0
    )
    assert KeyedJaggedTensor([], torch.tensor([])).length_per_key() == []
    with pytest.raises(AssertionError, match="integers"):
        KeyedJaggedTensor(["a"], torch.ones(2), lengths=torch.tensor([2.0]))
    with pytest.raises(ValueError, match="integers"):
        JaggedTensor(torch.ones(2), offsets=torch.tensor([0.0, 2.0]))


def test_texts_have_all_digits_and_end_in_a_blank_line():
    assert str(JaggedTensor(torch.tensor([0.1]), lengths=torch.tensor([1]))) == (
        "JaggedTensor({\n    [[0.10000000149011612]]\n})\n"
    )
    assert (
        str(keyed(weighted=False)) == 'KeyedJaggedTensor({\n    "a": [[5], [7, 1]],\n    "b": [[], [2]]\n})\n'
    )
    assert '"weights": [[], [2.0]]\n    }\n})\n' in str(keyed())
    assert str(KeyedTensor(["a"], [1], torch.ones(2, 1))) == 'KeyedTensor({\n    "a": [[1.0], [1.0]]\n})\n'
    assert str(KeyedTensor([], [], torch.ones(0))) == "KeyedTensor()\n"


def test_trees_are_cut_and_put_together():
    kjt = keyed(variable=True)
    leaves, spec = pytree.tree_flatten(kjt)
    assert kjt_is_equal(pytree.tree_unflatten(leaves, spec), kjt)
    kt = KeyedTensor(["a", "b"], [1, 2], torch.rand(2, 3))
    leaves, spec = pytree.tree_flatten(kt)
    swapped = KeyedTensor.from_tensor_list(["b", "a"], [kt["b"], kt["a"]])
    assert torch.equal(torch.fx._pytree.tree_flatten_spec(swapped, spec)[0], kt.values())


class InAndOut(nn.Module):
    def forward(self, kjt: KeyedJaggedTensor) -> tuple[KeyedJaggedTensor, int]:
        made = KeyedJaggedTensor(kjt.keys(), kjt.values(), lengths=kjt.lengths())
        return made, made.stride() + len(made.keys())


def test_graphs_make_and_take_them():
    graph = symbolic_trace(InAndOut())
    assert "KeyedJaggedTensor(" in graph.code
    for module in (graph, torch.jit.script(graph)):
        made, number = module(keyed())
        assert torch.equal(made.lengths(), keyed().lengths())
        assert number == 4


def test_equality_forgives_how_bags_are_described():
    by_lengths = JaggedTensor(torch.ones(3), lengths=torch.tensor([1, 2]))
    by_offsets = JaggedTensor(torch.ones(3), offsets=torch.tensor([0, 1, 3]))
    assert jt_is_equal(by_lengths, by_offsets)
    assert not jt_is_equal(by_lengths, "bags")
    assert not kjt_is_equal(keyed(), keyed(weighted=False))


def test_what_ranks_send_arrives_key_by_key():
    mine, other = keyed(), keyed().permute([1, 0])
    other._keys = mine.keys()
    tensors = [torch.cat(pair) for pair in zip(mine.dist_tensors(), other.dist_tensors(), strict=True)]
    assert mine.dist_labels() == ["lengths", "values", "weights"]
    assert mine.dist_splits([1, 1]) == [[2, 2], [3, 1], [3, 1]]
    arrived = KeyedJaggedTensor.dist_init(
        ["a", "b"], tensors, False, 2, torch.tensor([0, 2, 1, 3], dtype=torch.int32), [2, 2]
    )
    assert arrived.stride() == 4
    assert arrived["a"].values().tolist() == [5, 7, 1, 2]
    assert arrived["b"].lengths().tolist() == [0, 1, 1, 2]


def test_room_and_copies():
    kjt = keyed()
    room = KeyedJaggedTensor.empty_like(kjt, device=torch.device("cpu"))
    assert kjt_is_equal(room.copy_(kjt), kjt)
    nothing = KeyedJaggedTensor.empty_like(kjt)
    assert nothing.keys() == []
    assert nothing.stride() == 2


def test_no_bags_have_offsets_all_the_same():
    assert KeyedJaggedTensor.empty().offsets().tolist() == [0]
    nothing = KeyedJaggedTensor(["a"], torch.tensor([]), lengths=torch.tensor([]))
    assert nothing["a"].values().numel() == 0
    assert nothing.length_per_key() == [0]


def test_no_bags_of_whole_numbers_have_the_0():
    nothing = KeyedJaggedTensor(["a", "b"], torch.tensor([]), lengths=torch.tensor([], dtype=torch.int32))
    assert [bags.offsets().tolist() for bags in nothing.to_dict().values()] == [[0], [0]]


def test_chosen_keys_keep_the_batch_size():
    kjt = keyed(variable=True)
    assert (kjt.stride(), kjt.permute([0]).stride()) == (3, 3)


def test_padding_has_the_type_of_values():
    nothing = JaggedTensor(torch.empty(0, dtype=torch.int32), lengths=torch.tensor([0, 0]))
    assert nothing.to_padded_dense(2).dtype is torch.int32


def test_bags_need_lengths_or_offsets():
    with pytest.raises(AssertionError, match="neither"):
        JaggedTensor(torch.ones(2))


def test_batch_sizes_by_key_can_be_forced():
    jagged = {key: JaggedTensor(torch.ones(3), lengths=torch.tensor([1, 2])) for key in "ab"}
    assert not KeyedJaggedTensor.from_jt_dict(jagged).variable_stride_per_key()
    forced = KeyedJaggedTensor.from_jt_dict(jagged, force_variable_stride=True)
    assert forced.variable_stride_per_key()
    assert forced.stride_per_key() == [2, 2]
