import torch
from torch import nn

from meshrec.modules.parameters import InitializedDict, InitializedList


def test_tensors_are_filled_now_and_on_reset():
    numbers = InitializedList([torch.empty(2), torch.empty(3)], nn.init.ones_)
    assert [tensor.tolist() for tensor in numbers] == [[1, 1], [1, 1, 1]]
    with torch.no_grad():
        numbers[1].zero_()
    numbers.reset_parameters()
    assert numbers[1].tolist() == [1, 1, 1]
    assert list(numbers.state_dict()) == ["0", "1"]


def test_what_is_built_on_meta_starts_when_it_is_reset():
    named = InitializedDict({"a": torch.empty(2, device="meta")}, nn.init.ones_)
    named.to_empty(device="cpu")
    named.reset_parameters()
    assert named["a"].tolist() == [1, 1]
    assert list(named.state_dict()) == ["a"]
