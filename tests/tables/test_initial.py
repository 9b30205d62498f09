import functools

import pytest
import torch

from meshrec.tables import initial
from meshrec.tables.initial import init_table, initial_rows


def rows(first, end, seed=0, table="t0"):
    drawn = initial_rows((first, end), table=table, size=(1000, 8), init_fn=torch.nn.init.normal_, seed=seed)
    found = [(begin, block.clone()) for begin, block in drawn]
    begins = [first, *(begin + len(block) for begin, block in found)]
    assert begins == [*(begin for begin, _ in found), end]  # one after the other
    return torch.cat([block for _, block in found])


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(initial, "_BLOCK_ELEMENTS", 8 * 64)


def test_parts_are_parts_of_one_table():
    whole = rows(0, 1000)
    assert torch.equal(rows(100, 433), whole[100:433])
    assert torch.equal(rows(999, 1000), whole[999:])
    filled = torch.empty(1000, 8, dtype=torch.bfloat16)
    init_table(filled, table="t0", init_fn=torch.nn.init.normal_, seed=0)
    assert torch.equal(filled, whole.bfloat16())
    assert abs(whole.mean()) < 0.05
    assert abs(whole.std() - 1) < 0.05
    assert not torch.equal(whole[:64], whole[64:128])


def test_seed_and_table_matter():
    assert not torch.equal(rows(0, 9), rows(0, 9, seed=1))
    assert not torch.equal(rows(0, 9), rows(0, 9, table="t1"))


def test_the_callers_generator_is_left_alone():
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    rows(0, 9)
    assert torch.equal(torch.rand(2), expected)


def sine_of_row(weight):
    weight.copy_(torch.arange(len(weight)).sin()[:, None])


def in_order(weight):
    weight.copy_(torch.linspace(-1, 1, weight.numel()).view(weight.shape))


def read(weight):
    weight.fill_(len(weight) + float(weight.fill_(1).sum()))


@pytest.mark.parametrize(
    "init_fn", [torch.nn.init.xavier_uniform_, torch.nn.init.orthogonal_, sine_of_row, in_order, read]
)
def test_what_depends_on_the_shape_fills_the_whole_table(init_fn):
    (drawn,) = initial_rows((300, 433), table="t0", size=(1000, 8), init_fn=init_fn, seed=0)
    torch.manual_seed(initial._block_seed(0, "t0", 0))
    whole = torch.empty(1000, 8)
    init_fn(whole)
    assert drawn[0] == 300
    assert torch.equal(drawn[1], whole[300:433])


@pytest.mark.parametrize(
    "init_fn",
    [
        lambda weight: torch.nn.init.trunc_normal_(weight, std=0.02),
        functools.partial(torch.nn.init.trunc_normal_, a=-0.1, b=0.1),
        lambda weight: weight.copy_(torch.randn(weight.shape)).mul_(0.1),
        lambda weight: weight.copy_(torch.rand_like(weight) - 0.5),
        torch.nn.init.zeros_,
    ],
)
def test_what_fills_rows_alike_fills_block_by_block(init_fn):
    drawn = initial_rows((0, 1000), table="t0", size=(1000, 8), init_fn=init_fn, seed=0)
    assert [begin for begin, _ in drawn] == [*range(0, 1000, 64)]


class Constant:
    """A callable without a hash."""

    __hash__ = None

    def __call__(self, weight):
        weight.fill_(0.5)


def test_a_callable_object_without_a_hash_fills_block_by_block():
    drawn = initial_rows((0, 1000), table="t0", size=(1000, 8), init_fn=Constant(), seed=0)
    assert [begin for begin, _ in drawn] == [*range(0, 1000, 64)]
