import sys

import pytest
import torch

from meshrec.ops import memory, prefault
from meshrec.ops.memory import HUGE_PAGE, reserve_pages
from meshrec.ops.prefault import GrowingRegion, PagePrefaulter

ROW_BYTES = (64, 4, 1, 5.5)


@pytest.fixture
def taken(monkeypatch):
    addresses = []
    monkeypatch.setattr(prefault, "populate_pages", lambda address, _: addresses.append(address) or True)
    return addresses


def growing(num_bytes=1 << 34):
    tensors = [reserve_pages((num_bytes,), torch.uint8, None) for _ in ROW_BYTES]
    return tensors, [GrowingRegion(*each) for each in zip(tensors, ROW_BYTES, strict=True)]


def test_steps_take_as_many_pages_as_their_rows_fill_and_never_many_at_once(taken):
    tensors, parts = growing()
    pages = PagePrefaulter(parts)
    step, num_rows, numbers, late = 20_000, 1_000_000, [], 0
    pages.grow(num_rows)
    for _ in range(2000):
        late += sum(part.num_rows < num_rows + step for part in parts)
        num_rows += step
        before = len(taken)
        pages.grow(num_rows)
        numbers.append(len(taken) - before)
    assert tensors
    assert max(numbers) <= 1  # each step fills 0.7 pages
    assert late < 20  # until the lead is there
    lead = sum(part.num_rows * part.row_bytes for part in parts) - num_rows * sum(ROW_BYTES)
    assert 0 < lead < 8 * step * sum(ROW_BYTES) + len(parts) * HUGE_PAGE


def test_a_table_that_does_not_grow_takes_nothing(taken):
    tensors, parts = growing()
    pages = PagePrefaulter(parts)
    assert tensors
    for num_rows in (10, 10, 10_000, 10_000, 9000):
        pages.grow(num_rows)
    assert taken == []


def test_many_rows_at_once_need_no_pages_in_advance_that_others_have_filled(taken):
    tensors, parts = growing()
    pages = PagePrefaulter(parts)
    pages.grow(50_000_000)
    ends = [each.data_ptr() + int(5e7 * size) for each, size in zip(tensors, ROW_BYTES, strict=True)]
    assert taken
    for address in taken:
        assert any(-HUGE_PAGE < address - end < 5e7 * 64 / 16 + HUGE_PAGE for end in ends)


def test_memory_that_is_gone_or_refused_is_left_alone(monkeypatch):
    tensors, parts = growing()
    pages, calls = PagePrefaulter(parts), []
    monkeypatch.setattr(prefault, "populate_pages", lambda *given: calls.append(given) or False)
    del tensors[0]
    for num_rows in range(1_000_000, 30_000_000, 1_000_000):
        pages.grow(num_rows)
    assert len(calls) == len(parts) - 1


@pytest.mark.skipif(sys.platform != "linux", reason="the system has no such call")
def test_taken_pages_are_zeros_and_written_ones_stay():
    rows = reserve_pages((4 * HUGE_PAGE,), torch.uint8, None)
    rows[:HUGE_PAGE] = 7
    start = rows.data_ptr() + -rows.data_ptr() % 4096
    if not memory.populate_pages(start, 2 * HUGE_PAGE):
        pytest.skip("the system is older than Linux 5.14")
    assert bool((rows[:HUGE_PAGE] == 7).all())
    assert int(rows[HUGE_PAGE:].sum()) == 0
    assert not memory.populate_pages(start, 1 << 50)
