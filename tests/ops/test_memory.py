import copy
import gc
import os
import subprocess
import sys
import weakref

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from meshrec.ops import memory, operators
from meshrec.ops.library import has_kernels
from meshrec.ops.memory import (
    empty_pages,
    frozen_objects,
    keep_freed_memory,
    return_freed_memory,
    use_huge_pages,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_table_with_huge_pages_holds_what_is_written(dtype):
    """Three huge pages and a bit, from an address inside one."""
    memory = torch.empty(3 * 2**21 + 12345, dtype=dtype)[77:]
    use_huge_pages(memory)
    memory.copy_(torch.arange(memory.numel()) % 251)
    use_huge_pages(memory)  # and what was there before stays
    assert torch.equal(memory, (torch.arange(memory.numel()) % 251).to(dtype))


@pytest.mark.parametrize("shape", [(0,), (0, 4), (1,), (3, 5)])
def test_small_tensors_are_left_as_they_are(shape):
    memory = torch.ones(shape)
    use_huge_pages(memory)
    assert torch.equal(memory, torch.ones(shape))


def test_other_devices_are_left_alone():
    use_huge_pages(torch.empty(2**22, device="meta"))


def test_memory_must_be_one_piece():
    with pytest.raises(ValueError, match="use_huge_pages"):
        use_huge_pages(torch.ones(4, 6)[:, ::2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_tables_begin_with_a_page(dtype):
    table = empty_pages((2**20, 3), dtype, None)
    assert (table.shape, table.dtype, table.device.type) == ((2**20, 3), dtype, "cpu")
    assert table.data_ptr() % 4096 == 0
    assert table.untyped_storage().nbytes() == table.nbytes
    table.fill_(2)
    before, copied = table, copy.deepcopy(torch.nn.Parameter(table))
    del table
    assert torch.equal(before, copied.data)


def test_small_tables_and_other_devices_are_as_ever():
    assert empty_pages((3, 5), torch.float16, torch.device("cpu")).shape == (3, 5)
    assert empty_pages((0, 5), torch.float32, None).numel() == 0
    assert empty_pages((2**20, 4), torch.float32, torch.device("meta")).is_meta
    with FakeTensorMode():
        assert isinstance(empty_pages((2**20, 4), torch.float32, None), FakeTensor)


@pytest.mark.skipif(not has_kernels, reason="torch has its own words")
def test_memory_that_is_not_there():
    with pytest.raises(RuntimeError, match="allocate 4503599627370496"):
        operators.new_buffer(torch.ones(1), 2**50)


@pytest.mark.skipif(not has_kernels, reason="torch has its own words")
@pytest.mark.parametrize("size", [-1, 2**62])
def test_sizes_that_no_memory_has(size):
    with pytest.raises(ValueError, match=f"{size}"):
        operators.new_buffer(torch.ones(1), size)


def test_opcheck():
    torch.library.opcheck(torch.ops.meshrec.use_huge_pages.default, (torch.zeros(64, 8),))


FAULTS = """
import resource, sys, torch
from meshrec.ops.memory import keep_freed_memory
def step():
    held = [torch.ones(1 << 21) for _ in range(4)]  # 32 MiB
kept = keep_freed_memory()
for _ in range(3):
    step()
faults = []
for _ in range(5):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    step()
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(int(kept), sorted(faults)[2])  # the median: a system short of memory takes pages away now and then
"""


needs_malloc = pytest.mark.skipif(
    "asan" in os.environ.get("LD_PRELOAD", ""), reason="the sanitizer allocates by itself"
)


def kept_and_faults(**environment):
    done = subprocess.run(
        [sys.executable, "-c", FAULTS], env={**os.environ, **environment}, capture_output=True, check=True
    )
    return tuple(map(int, done.stdout.split()))


@pytest.mark.skipif("glibc" not in str(os.confstr("CS_GNU_LIBC_VERSION")), reason="another C library")
@needs_malloc
def test_freed_memory_is_kept_for_the_next_step():
    kept, faults = kept_and_faults()
    assert kept
    assert faults < 100


@needs_malloc
@pytest.mark.parametrize(
    "choice", [{"MALLOC_TRIM_THRESHOLD_": "1000000"}, {"GLIBC_TUNABLES": "glibc.malloc.top_pad=0"}]
)
def test_what_the_user_chose_stays(choice):
    assert kept_and_faults(**choice)[0] == 0


BETWEEN_BLOCKS = """
import torch
from meshrec.ops.memory import keep_freed_memory, return_freed_memory
def used():  # pages of this process in bytes
    return [int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("RssAnon")][0]
keep_freed_memory()
blocks = [torch.ones(1 << 18) for _ in range(64)]  # 1 MiB each
kept, before = blocks[::2], used()
del blocks
freed = used()
return_freed_memory()
print(before - freed, before - used(), all(block.sum() == 1 << 18 for block in kept))
"""


@pytest.mark.skipif("glibc" not in str(os.confstr("CS_GNU_LIBC_VERSION")), reason="another C library")
@needs_malloc
def test_freed_memory_between_blocks_is_returned_on_request():
    done = subprocess.run([sys.executable, "-c", BETWEEN_BLOCKS], capture_output=True, check=True, text=True)
    by_itself, on_request, is_whole = done.stdout.split()
    assert int(by_itself) < 8 << 20
    assert int(on_request) > 24 << 20
    assert is_whole == "True"


def test_other_systems_are_left_alone(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not keep_freed_memory()
    return_freed_memory()


def test_a_table_that_does_not_fit_is_torch_s_error():
    with pytest.raises(RuntimeError, match="allocate"):
        empty_pages((2**52,), torch.float32, None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_a_new_buffer_has_the_type_and_the_device(dtype):
    like = torch.zeros(3, dtype=dtype)
    for size in (0, 5, 2**18):
        buffer = operators.new_buffer(like, size)
        assert (buffer.shape, buffer.dtype, buffer.device) == ((size,), dtype, like.device)
    assert operators.new_buffer(like.to("meta"), 5).is_meta
    torch.library.opcheck(torch.ops.meshrec.new_buffer.default, (like, 0))


BUFFERS = """
import os, random, threading, torch
from meshrec.ops.memory import keep_freed_memory
new = lambda count: torch.ops.meshrec.new_buffer(torch.empty(0), count)
torch.set_num_threads(1)  # a forked process has no others
keep_freed_memory()

first = new(2**20)
address, view = first.data_ptr(), first[5:]
del first
assert new(2**20).data_ptr() != address  # a view keeps all of it
del view
again = new(2**20)
print(int(again.data_ptr() == address), again.data_ptr() % 64)

def mix(seed):
    draw, held = random.Random(seed), []
    for number in range(2000):
        if held and draw.random() < 0.5:
            buffer, value = held.pop(draw.randrange(len(held)))
            assert (buffer[0], buffer[-1], int(buffer.sum())) == (value, value, value * buffer.numel())
        else:
            value = draw.randrange(50)
            held.append((new(draw.choice([1, 2**15, 2**16, 3 * 2**16 + 7])).fill_(value), value))
            if len(held) > 12:
                held.pop(0)

threads = [threading.Thread(target=mix, args=(seed,)) for seed in range(3)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
buffer = new(2**20).fill_(1)
child = os.fork()
if child == 0:
    other = new(2**20).fill_(2)
    os._exit(0 if buffer.sum() == 2**20 else 1)
assert os.waitpid(child, 0)[1] == 0 and buffer.sum() == 2**20
del buffer

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
before = resident()
held = [new(2**23).fill_(1) for _ in range(12)]  # 384 MiB
most = resident() - before
del held
print(most >> 20, (resident() - before) >> 20)
"""


@pytest.mark.skipif(
    not has_kernels or sys.platform != "linux", reason="the compiled kernels keep them, on Linux"
)
@pytest.mark.skipif(torch.__version__ < "2.11", reason="needs a function of torch 2.11")
@pytest.mark.skipif("asan" in os.environ.get("LD_PRELOAD", ""), reason="the sanitizer allocates by itself")
def test_buffers_serve_again_when_they_are_free_and_never_before(run_code):
    done = run_code(BUFFERS)
    same, rest, most, kept = map(int, done.stdout.split())
    assert (same, rest) == (1, 0)
    assert most > 360
    assert kept < 260  # MiB: what is beyond goes back to the system


def test_frozen_objects_are_collected_again_afterwards(monkeypatch):
    class Mine:
        pass

    frozen_by_pytest = gc.get_freeze_count()
    gc.unfreeze()
    monkeypatch.setitem(memory._frozen, "by_program", False)
    try:
        mine = Mine()
        mine.own, found = mine, weakref.ref(mine)
        with frozen_objects():
            assert gc.get_freeze_count() > 1000
            later = Mine()
            later.own, seen = later, weakref.ref(later)
            del mine, later
            gc.collect()
            assert seen() is None
            assert found() is not None
        gc.collect()
        assert found() is None
    finally:
        if frozen_by_pytest:
            gc.freeze()


def test_a_block_inside_a_block_does_not_stop_later_ones(monkeypatch):
    frozen_by_pytest = gc.get_freeze_count()
    gc.unfreeze()
    monkeypatch.setitem(memory._frozen, "by_program", False)
    try:
        for _ in range(2):
            with frozen_objects():
                with frozen_objects():
                    pass
                assert gc.get_freeze_count() > 1000
            assert gc.get_freeze_count() == 0
    finally:
        if frozen_by_pytest:
            gc.freeze()


def test_objects_that_the_program_froze_stay_frozen():
    gc.freeze()
    before = gc.get_freeze_count()
    with frozen_objects():
        pass
    # Some of them may have been freed since, when their last reference went.
    assert gc.get_freeze_count() > before // 2 > 0
