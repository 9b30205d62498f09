"""Mapped files may be cut short without ending the process."""

import gc
import os
import signal
from pathlib import Path

import pytest
import torch

import meshrec
from meshrec.ops import mapping
from meshrec.ops.library import has_kernels
from meshrec.ops.mapping import lost_pages, map_file

needs_kernels = pytest.mark.skipif(not has_kernels, reason="needs the kernels")
SIZE = 1 << 18


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(os.urandom(SIZE))
    return path


def mapped(path, num_bytes=SIZE):
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return map_file(descriptor, num_bytes)
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("library", ["kernel", "torch"])
def test_content_is_that_of_the_file_and_writing_stays_here(file, monkeypatch, library):
    if library == "torch":
        monkeypatch.setattr(mapping, "_library", None)
    content = file.read_bytes()
    found = mapped(file, SIZE - 5)
    assert found.content.numpy().tobytes() == content[:-5]
    found.content.zero_()
    assert file.read_bytes() == content
    assert lost_pages(found) == 0


@needs_kernels
@pytest.mark.parametrize("width", [1, 24, 1500])
def test_lookups_in_a_mapping_with_missing_pages_give_the_same_rows(file, width):
    numbers = torch.randint(-100, 100, (SIZE // 4,)).float()
    file.write_bytes(numbers.numpy().tobytes())
    found = mapped(file)
    mapping.expect_misses(found)
    mapping.expect_misses(found)
    num_rows = SIZE // 4 // width
    tables = [
        memory[: num_rows * width].view(num_rows, width)
        for memory in (found.content.view(torch.float32), numbers)
    ]
    ids = torch.randint(0, num_rows, (500,))
    offsets = torch.arange(0, 501, 5)
    config = meshrec.EmbeddingBagConfig(
        name="t", num_embeddings=num_rows, embedding_dim=width, feature_names=["f"]
    )
    outputs = []
    for table in tables:
        module = meshrec.EmbeddingBagCollection([config], device="meta")
        module.embedding_bags["t"].weight = torch.nn.Parameter(table, requires_grad=False)
        batch = meshrec.KeyedJaggedTensor(["f"], ids, lengths=offsets.diff())
        outputs.append(module(batch).values())
        with pytest.raises(ValueError, match="outside"):
            module(meshrec.KeyedJaggedTensor(["f"], ids + num_rows, lengths=offsets.diff()))
    assert torch.equal(*outputs)


def test_the_memory_of_this_process_is_known():
    assert 1 << 20 < mapping.memory_limit() < 1 << 50


@needs_kernels
def test_lost_pages_read_as_zeros_and_are_counted(file):
    found, content = mapped(file), file.read_bytes()
    os.truncate(file, SIZE // 2)
    assert found.content.numpy().tobytes() == content[: SIZE // 2] + bytes(SIZE // 2)
    assert lost_pages(found) == SIZE // 2 // os.sysconf("SC_PAGESIZE")


@needs_kernels
def test_memory_is_given_back_with_the_last_tensor(file):
    def is_mapped():
        return str(file) in Path("/proc/self/maps").read_text()

    found = mapped(file)
    part = found.content[10:20].view(torch.int16)
    del found
    gc.collect()
    assert is_mapped()
    assert part.shape == (5,)
    del part
    gc.collect()
    assert not is_mapped()


@needs_kernels
def test_what_cannot_be_mapped_is_an_error(tmp_path):
    with pytest.raises(OSError, match="mapped"):
        mapped(tmp_path)  # a folder


@needs_kernels
@pytest.mark.skipif("asan" in os.environ.get("LD_PRELOAD", ""), reason="the sanitizer handles SIGBUS itself")
@pytest.mark.parametrize("how", ["signal", "another mapping"])
def test_other_faults_end_the_process_as_ever(run_code, file, how):
    program = f"""
import mmap, os, signal
from meshrec.ops.mapping import map_file
file = open({str(file)!r}, "r+b")
found = map_file(file.fileno(), {SIZE})
if {how!r} == "signal":
    os.kill(os.getpid(), signal.SIGBUS)
other = mmap.mmap(file.fileno(), {SIZE})
os.truncate({str(file)!r}, 0)
found.content.sum()
other[{SIZE} - 1]
"""
    done = run_code(program, check=False)
    assert done.returncode == -signal.SIGBUS
