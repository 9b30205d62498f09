import hashlib
import os
import zlib

import pytest

from meshrec.durable import (
    DIGESTS,
    DamageError,
    digests,
    read_digests,
    sha256_of,
    verify_folder,
    write_digests,
)
from meshrec.durable.digests import BLOCK, parse_digests


@pytest.fixture
def folder(tmp_path, monkeypatch):
    for name, size in (("a", 0), ("b c", 1), ("d", BLOCK), ("e", BLOCK + 5)):
        (tmp_path / name).write_bytes(os.urandom(size))
    write_digests(tmp_path)
    return tmp_path


def test_digests_are_those_of_the_standard_library(folder):
    found = read_digests(folder)
    assert list(found) == ["a", "b c", "d", "e"]
    for name, digest in found.items():
        content = (folder / name).read_bytes()
        assert digest.num_bytes == len(content)
        assert digest.sha256 == hashlib.sha256(content).hexdigest() == sha256_of(folder / name)
        assert digest.checksums == tuple(
            zlib.crc32(content[start : start + BLOCK]) for start in range(0, len(content), BLOCK)
        )
    verify_folder(folder, found, sha256=True)
    assert (folder / DIGESTS).read_text().splitlines()[1].startswith("file 0 e3b0c442")


@pytest.mark.parametrize("place", [0, BLOCK - 1, BLOCK, BLOCK + 4])
def test_a_flipped_bit_is_named_with_its_block(folder, place):
    content = bytearray((folder / "e").read_bytes())
    content[place] ^= 64
    (folder / "e").write_bytes(content)
    first = place // BLOCK * BLOCK
    with pytest.raises(DamageError, match=f"{first:,}"):
        verify_folder(folder, read_digests(folder))


def test_other_sizes_files_and_kinds_are_told(folder):
    found = read_digests(folder)
    (folder / "b c").write_bytes(b"12")
    with pytest.raises(DamageError, match=r"2 bytes.*1"):
        verify_folder(folder, found)
    (folder / "b c").unlink()
    with pytest.raises(DamageError, match="read"):
        verify_folder(folder, found)
    os.mkfifo(folder / "b c")
    with pytest.raises(DamageError, match="pipe"):
        verify_folder(folder, found)


def test_a_forged_file_is_found_by_its_sha256(folder):
    """Four bytes more can give any CRC-32; here the checksum is rewritten, and the SHA-256 is not."""
    found = read_digests(folder)
    forged = os.urandom(1)
    (folder / "b c").write_bytes(forged)
    found["b c"] = found["b c"]._replace(checksums=(zlib.crc32(forged),))
    verify_folder(folder, {"b c": found["b c"]})
    with pytest.raises(DamageError, match="SHA-256"):
        verify_folder(folder, {"b c": found["b c"]}, sha256=True)


def test_every_flipped_bit_of_the_digests_is_seen(folder):
    content = (folder / DIGESTS).read_bytes()
    for place in range(8 * len(content)):
        damaged = bytearray(content)
        damaged[place // 8] ^= 1 << (place % 8)
        with pytest.raises(DamageError):
            parse_digests(bytes(damaged), "it")


SHA = "0" * 64


@pytest.mark.parametrize(
    "lines",
    [
        [],
        ["meshrec-digests 2"],
        ["meshrec-digests 1", f"file 1 {SHA} - a"],
        ["meshrec-digests 1", f"file 0 {SHA} 00000000 a"],
        ["meshrec-digests 1", f"file {1 << 61} {SHA} 00000000 a"],
        ["meshrec-digests 1", f"file 1 {SHA} 00000000 ../a"],
        ["meshrec-digests 1", f"file 1 {SHA} 00000000 .."],
        ["meshrec-digests 1", f"file 1 {SHA} 0000000g a"],
        ["meshrec-digests 1", f"file 1 {SHA[1:]} 00000000 a"],
        ["meshrec-digests 1", *[f"file 1 {SHA} 00000000 a"] * 2],
        ["meshrec-digests 1", "", f"file 1 {SHA} 00000000 a"],
    ],
)
def test_lines_that_cannot_be_are_told(lines):
    content = "".join(f"{line}\n" for line in lines).encode()
    with pytest.raises(DamageError):
        parse_digests(content + f"end {zlib.crc32(content):08x}\n".encode(), "it")


def test_long_work_says_how_far_it_is(folder, monkeypatch, caplog):
    monkeypatch.setattr(digests, "_LOG_SECONDS", 0.0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    caplog.set_level("INFO", "meshrec")
    verify_folder(folder, read_digests(folder))
    assert "verifying" in caplog.text
    assert "e: 0.0 of 0.0 GB after" in caplog.text
