"""The CRC-32 kernel gives zlib's values, for every length and alignment."""

import os
import zlib

import pytest
import torch

from meshrec.ops import checksums
from meshrec.ops.checksums import crc32, crc32_of_file
from meshrec.ops.library import has_kernels


@pytest.fixture(params=["kernel", "zlib"])
def library(request, monkeypatch):
    if request.param == "zlib":
        monkeypatch.setattr(checksums, "_library", None)
    elif not has_kernels:
        pytest.skip("no compiled kernels")
    return request.param


def test_the_kernel_is_there():
    assert (checksums._library is not None) == has_kernels


@pytest.mark.parametrize("before", [0, 1, 0xFFFFFFFF, 0x12345678])
def test_every_length_and_alignment(library, monkeypatch, before):
    monkeypatch.setattr(checksums, "_SMALL", 0)
    memory = bytearray(os.urandom(1200))
    for length in [*range(1, 300), 511, 512, 513, 1000, 1100]:
        for start in (0, 1, 7, 16):
            part = memoryview(memory)[start : start + length]
            assert crc32(part, before) == zlib.crc32(part, before)


def test_constants_and_large_memory(library):
    content = bytearray(3 << 20)
    for fill in (0, 255, 17):
        content[:] = bytes([fill]) * len(content)
        assert crc32(memoryview(content)) == zlib.crc32(content)
    assert crc32(b"123456789") == 0xCBF43926
    assert crc32(bytes(content)) == zlib.crc32(content)
    assert crc32(b"") == 0


def test_parts_of_a_file(library, tmp_path):
    content = torch.randint(0, 256, (1_000_003,), dtype=torch.uint8).numpy().tobytes()
    (tmp_path / "file").write_bytes(content)
    descriptor = os.open(tmp_path / "file", os.O_RDONLY)
    try:
        for offset, length in [(0, len(content)), (1, 4097), (999_999, 4), (5, 0), (3, 700_001)]:
            expected = zlib.crc32(content[offset : offset + length], 9)
            assert crc32_of_file(descriptor, offset, length, 9) == expected
        assert crc32_of_file(descriptor, 0, len(content) + 1) is None
        assert crc32_of_file(descriptor, 2_000_000, 1) is None
    finally:
        os.close(descriptor)
