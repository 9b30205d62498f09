import os
from pathlib import Path

import pytest

from meshrec.durable import DamageError, durable_folder, open_regular, read_regular, write_durably


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_durably(path, b"old")

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_durably(path, b"new")
    assert path.read_bytes() == b"old"
    assert [Path(each).name for each in tmp_path.iterdir()] == ["file"]


def test_a_folder_appears_when_its_files_are_on_the_disk(tmp_path, monkeypatch):
    synced, target = [], tmp_path / "folder"
    sync = os.fsync

    def fsync(descriptor):
        assert not target.exists() or synced
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    with durable_folder(target) as scratch:
        for name in ("a", "b"):
            (scratch / name).write_text(name)
    assert sorted(Path(each).name for each in synced[:2]) == ["a", "b"]
    assert synced[2:] == [str(scratch), str(tmp_path)]
    assert (target / "b").read_text() == "b"


def test_a_folder_that_fails_leaves_nothing(tmp_path):
    def fail(scratch):
        (scratch / "a").write_text("a")
        raise KeyError

    with pytest.raises(KeyError), durable_folder(tmp_path / "folder") as scratch:
        fail(scratch)
    assert list(tmp_path.iterdir()) == []


def test_only_regular_files_are_read(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    os.symlink("/dev/zero", tmp_path / "endless")
    (tmp_path / "file").write_bytes(b"12345")
    os.symlink(tmp_path / "file", tmp_path / "link")
    for name, kind in (("fifo", "a pipe"), ("endless", "a device"), (".", "a folder")):
        with pytest.raises(DamageError, match=f"is {kind} instead of a regular file"):
            read_regular(tmp_path / name, 1 << 20)
        with pytest.raises(DamageError, match=kind), open_regular(tmp_path / name):
            pass
    assert read_regular(tmp_path / "link", 5) == b"12345"
    with pytest.raises(DamageError, match="has 5 bytes; at most 4 were expected"):
        read_regular(tmp_path / "file", 4)
    with pytest.raises(FileNotFoundError):
        read_regular(tmp_path / "none", 4)
