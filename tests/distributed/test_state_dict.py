import pytest
import torch

from meshrec.distributed.routing import Rectangle
from meshrec.distributed.state_dict import copy_into, split_tensor

HALVES = [Rectangle(0, 0, 4, 0, 2), Rectangle(0, 0, 4, 2, 3)]


def test_one_process_gets_plain_tensors():
    whole = torch.rand(4, 3)
    assert split_tensor([whole], [Rectangle(0, 0, 4, 0, 3)], (4, 3), None).data_ptr() == whole.data_ptr()
    joined = split_tensor([whole[:, :2], whole[:, 2:]], HALVES, (4, 3), None)
    assert torch.equal(joined, whole)
    rows = torch.rand(4)
    assert torch.equal(split_tensor([rows, rows], HALVES, (4,), None), rows)


def test_whole_tensors_are_cut():
    whole, parts = torch.rand(4, 3), [torch.zeros(4, 2), torch.zeros(4, 1)]
    copy_into(parts, HALVES, whole, "t0", (4, 3))
    assert torch.equal(torch.cat(parts, 1), whole)
    states = [torch.zeros(4), torch.zeros(4)]
    copy_into(states, HALVES, whole[:, 0], "t0", (4,))
    assert torch.equal(states[1], whole[:, 0])
    with pytest.raises(ValueError, match=r"t0: the state dict has shape \[4, 3\], the table \[5, 3\]"):
        copy_into(parts, HALVES, whole, "t0", (5, 3))
