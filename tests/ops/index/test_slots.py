"""Values by slot, written and read for several tables in one call: the kernels equal the reference."""

import pytest
import torch

from meshrec.ops import operators
from meshrec.ops.index import Fills, bits_of, slots
from meshrec.ops.library import has_kernels

pytestmark = pytest.mark.skipif(not has_kernels, reason="no kernels are built")
GENERATOR = torch.Generator().manual_seed(0)
OPS, REGISTERED = operators, torch.ops.meshrec


def drawn(low, high, count, dtype=torch.int64):
    return torch.randint(low, high, (count,), generator=GENERATOR, dtype=dtype)


@pytest.mark.parametrize("sizes", [(0, 1, 7), (50_000, 0, 20_000), ()])
def test_fills_write_to_all_rows(sizes):
    first = [
        torch.tensor([True]),
        torch.tensor([[0.1] * 3]),
        torch.tensor([-7], dtype=torch.int32),
        torch.tensor([-(2**63)]),
        torch.tensor([0.5], dtype=torch.bfloat16),
    ]
    parts = [each.new_zeros(30_000, *each.shape[1:]) for _ in sizes for each in first]
    expected = [each.clone() for each in parts]
    own = [drawn(0, 30_000, size) for size in sizes for _ in first]
    with Fills() as fills:
        for part, other, slot, value in zip(parts, expected, own, first * len(sizes), strict=True):
            fills.add(part, slot, bits_of(value))
            other[slot] = value
    assert all(torch.equal(*each) for each in zip(parts, expected, strict=True))


def test_nothing_is_written_after_an_error():
    part = torch.zeros(3)

    def fail(fills):
        with fills:
            fills.add(part, torch.tensor([1]), 5)
            raise KeyError

    with pytest.raises(KeyError):
        fail(Fills())
    assert not part.any()


def test_released_slots_equal_the_reference():
    own = [drawn(0, 900, size) for size in (0, 5, 3000)]
    pins = [torch.bincount(each, minlength=1000).int() + drawn(0, 2, 1000).int() for each in own]
    alive = [drawn(0, 2, 1000) > 0 for _ in own]
    others = [each.clone() for each in pins]
    found = OPS.release_slots(pins, alive, own)
    expected = slots.release_slots(others, alive, own)
    assert found[1].tolist()[2] > 0
    for one, other in zip([*found, *pins], [*expected, *others], strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_the_first_rows_left_equal_the_reference(dtype):
    count = 6
    now = [drawn(0, 3, 3000, dtype) for _ in range(count)]
    kept = [torch.randperm(3000, generator=GENERATOR)[:size] for size in (0, 1, 500, 500, 2000, 2000)]
    scores = [each[own].clone() for each, own in zip(now, kept, strict=True)]
    for each, own in zip(now[2:], kept[2:], strict=True):
        each[own[:40]] += 5
    alive = [drawn(0, 4, 4000) > 0 for _ in kept]
    used, gone = ([drawn(0, 3000, size) for _ in kept] for size in (700, 60))
    arguments = (scores, kept, now, alive, used, gone, [3, 3, 0, 100, 100, 5000])
    found, expected = OPS.first_left(*arguments), slots.first_left(*arguments)
    assert found[-1].tolist()[3:] >= [40] * 3
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def test_ops_have_the_right_schemas():
    own, marks, pins = [drawn(0, 9, 5)], [torch.ones(9) > 0], [torch.ones(9).int()]
    torch.library.opcheck(REGISTERED.fill_slots, ([torch.zeros(9)], own, [3]))
    torch.library.opcheck(REGISTERED.release_slots, (pins, marks, own))
    torch.library.opcheck(REGISTERED.first_left, ([own[0]], own, [drawn(0, 3, 9)], marks, own, own, [2]))


def test_other_tensors_are_refused():
    part, own = torch.zeros(3), torch.tensor([0])
    for slot in (-1, 3):
        with pytest.raises(ValueError, match=rf"{slot}.*\[0.*3"):
            OPS.fill_slots([part], [torch.tensor([slot])], [0])
        with pytest.raises(ValueError, match=rf"{slot}.*\[0.*3"):
            OPS.release_slots([part.int()], [part > 0], [torch.tensor([slot])])
        with pytest.raises(ValueError, match=rf"{slot}.*\[0.*3"):
            OPS.first_left([own], [torch.tensor([slot])], [part.long()], [part > 0], [own], [own], [1])
    with pytest.raises(ValueError, match=r"1 parts.*1 lists.*2 values"):
        OPS.fill_slots([part], [own], [0, 1])
    with pytest.raises(ValueError, match="contiguous"):
        OPS.fill_slots([torch.zeros(4)[::2]], [own], [0])
    with pytest.raises(ValueError, match="1 dimension"):
        OPS.release_slots([part], [part > 0], [own])
    with pytest.raises(ValueError, match="1 dimension"):
        OPS.first_left([own.int()], [own], [part.long()], [part > 0], [own], [own], [1])
    with pytest.raises(ValueError, match="1 tables"):
        OPS.first_left([own], [own], [], [], [], [], [])
