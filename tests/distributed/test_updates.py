import torch

from meshrec.distributed.updates import distinct, slot_major, update_rows
from meshrec.optim import Adagrad


def test_update_rows_steps_only_them():
    weight, state = torch.ones(4, 2), [torch.zeros(4, 2)]
    spec = Adagrad(lr=0.5, eps=1e-10)
    hyper = spec.hyper(lr=0.5, step=1)
    update_rows(weight, state, (0, 0), torch.tensor([1, 3]), torch.full((2, 2), 2.0), spec.code, hyper)
    torch.testing.assert_close(weight, torch.tensor([[1.0, 1.0], [0.5, 0.5], [1.0, 1.0], [0.5, 0.5]]))
    assert state[0][:, 0].tolist() == [0.0, 4.0, 0.0, 4.0]


def test_order_of_slots_and_rules():
    a, b, c, d = (torch.zeros(n) for n in range(4))
    assert [slot.numel() for slot in slot_major([[a, b], [c, d]])] == [0, 2, 1, 3]
    first, second = object(), object()
    assert distinct([None, first, second, first]) == [first, second]
