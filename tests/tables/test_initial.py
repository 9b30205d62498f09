import pytest
import torch

from meshrec.tables import initial
from meshrec.tables.initial import init_rectangle


def rectangle(first, shape, seed=0, table="t0"):
    target = torch.empty(shape)
    init_rectangle(target, table=table, size=(1000, 8), first=first, init_fn=torch.nn.init.normal_, seed=seed)
    return target


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(initial, "_BLOCK_ELEMENTS", 8 * 64)


def test_parts_are_parts_of_one_table():
    whole = rectangle((0, 0), (1000, 8))
    assert torch.equal(rectangle((100, 2), (333, 5)), whole[100:433, 2:7])
    assert torch.equal(rectangle((999, 7), (1, 1)), whole[999:, 7:])
    assert abs(whole.mean()) < 0.05
    assert abs(whole.std() - 1) < 0.05
    assert not torch.equal(whole[:64], whole[64:128])


def test_seed_and_table_matter():
    assert not torch.equal(rectangle((0, 0), (9, 8)), rectangle((0, 0), (9, 8), seed=1))
    assert not torch.equal(rectangle((0, 0), (9, 8)), rectangle((0, 0), (9, 8), table="t1"))


def test_the_callers_generator_is_left_alone():
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    rectangle((0, 0), (9, 8))
    assert torch.equal(torch.rand(2), expected)
