"""Mapped files may be cut short without ending the process."""

import gc
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

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
    with pytest.raises(OSError, match="cannot be mapped"):
        mapped(tmp_path)  # a folder


@needs_kernels
@pytest.mark.skipif("asan" in os.environ.get("LD_PRELOAD", ""), reason="the sanitizer handles SIGBUS itself")
@pytest.mark.parametrize("how", ["signal", "another mapping"])
def test_other_faults_end_the_process_as_ever(file, how):
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
    done = subprocess.run([sys.executable, "-c", program], check=False, stderr=subprocess.DEVNULL)
    assert done.returncode == -signal.SIGBUS
