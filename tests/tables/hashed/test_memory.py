import logging
import os
import sys
from pathlib import Path

import pytest
import torch

from meshrec.ops import memory
from meshrec.tables.hashed import memory as growing
from meshrec.tables.hashed.memory import GrowingRows

ROW = [torch.full((1, 16), 0.5), torch.full((1,), 0.25)]


def resident():
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def make(is_reserved, max_rows=1 << 32):
    with pytest.MonkeyPatch.context() as patch:
        if not is_reserved:
            patch.setattr(growing, "reserve_pages", lambda *_: None)
        return GrowingRows(ROW, max_rows=max_rows, name="table 't0'")


@pytest.mark.parametrize("is_reserved", [True, False])
def test_rows_stay_while_others_come(is_reserved):
    rows = make(is_reserved)
    assert rows.is_reserved is is_reserved
    weight, state = rows.tensors
    for num_rows in (1, 5, 64, 65, 1000, 100_000, 3):
        before = rows.num_rows
        rows.grow(num_rows)
        assert rows.num_rows == max(before, num_rows)
        new = slice(before, rows.num_rows)
        assert bool((weight[new] == 0.5).all())
        assert bool((state[new] == 0.25).all())
        weight[new] = state[new] = before + 1.0
    assert rows.tensors[0] is weight  # those who hold the tensors see all rows
    assert len(weight) == len(state) == 1 << 17
    expected = torch.tensor([1.0, 2.0, 6.0, 65.0, 66.0, 1001.0])[
        torch.bucketize(torch.arange(100_000), torch.tensor([1, 5, 64, 65, 1000]), right=True)
    ]
    assert torch.equal(state[:100_000], expected)
    assert torch.equal(weight[:100_000], expected[:, None].expand(-1, 16))


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the system does not tell")
def test_reserved_rows_never_move_and_take_memory_as_they_come():
    before = resident()
    rows = make(True)  # 256 GiB of weights
    rows.grow(10)
    address, much = rows.tensors[0].data_ptr(), 300_000
    assert resident() - before < 1 << 25
    rows.grow(much)
    assert rows.tensors[0].data_ptr() == address
    taken = resident() - before
    assert much * 68 - (1 << 21) < taken < much * 68 + (1 << 25)


def test_a_refusal_is_said_once(monkeypatch, caplog):
    def refuse(*_, **__):
        raise OSError("Cannot allocate memory")

    with caplog.at_level(logging.WARNING):
        monkeypatch.setattr(memory.mmap, "mmap", refuse)
        rows = GrowingRows(ROW, max_rows=1000, name="table 't0'")
        rows.grow(10)
        rows.grow(900)
    assert [record.getMessage() for record in caplog.records] == [
        "table 't0': the system does not reserve 68,000 bytes of address space for 1,000 rows on cpu; rows "
        "are moved to twice the room whenever the room is full"
    ]
    assert rows.tensors[0].shape == (1000, 16)  # and never more than there may be


@pytest.mark.skipif(sys.platform != "linux", reason="limits of address space are those of Linux")
def test_a_limit_of_address_space_is_a_refusal(run_code):
    """In a process of its own: a limit cannot be raised again."""
    program = """
import resource, torch
from meshrec.tables.hashed.memory import GrowingRows
resource.setrlimit(resource.RLIMIT_AS, (1 << 36, 1 << 36))
rows = GrowingRows([torch.ones(1, 64)], max_rows=1 << 32, name="t0")
rows.grow(1000)
assert not rows.is_reserved
assert int(rows.tensors[0][:1000].sum()) == 64_000
"""
    done = run_code(program)
    assert "t0: the system does not reserve 1,099,511,627,776 bytes" in done.stderr


@pytest.mark.parametrize("is_reserved", [True, False])
def test_too_many_rows_change_nothing(is_reserved):
    rows = make(is_reserved, max_rows=100)
    rows.grow(70)
    with pytest.raises(ValueError, match=r"'t0'.*101 rows.*100"):
        rows.grow(101)
    assert (rows.num_rows, len(rows.tensors[0])) == (70, 100)


def test_other_devices_have_no_such_memory():
    assert memory.reserve_pages((10, 4), torch.float32, torch.device("meta")) is None
    assert memory.reserve_pages((0, 4), torch.float32, None) is None
    assert memory.reserve_pages((1 << 60, 8), torch.float32, None) is None
