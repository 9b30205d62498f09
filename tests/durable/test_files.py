import os
from pathlib import Path

import pytest

from meshrec.durable import DamageError, open_regular, read_regular, write_durably


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_durably(path, b"old")

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="space"):
        write_durably(path, b"new")
    assert path.read_bytes() == b"old"
    assert [Path(each).name for each in tmp_path.iterdir()] == ["file"]


def test_a_file_of_the_user_beside_it_stays(tmp_path):
    beside = [tmp_path / f".file.{os.getpid()}", tmp_path / ".file", tmp_path / ".file.tmp"]
    for path in beside:
        path.write_text("of the user")
    write_durably(tmp_path / "file", b"new")
    with pytest.raises(FileExistsError):
        write_durably(tmp_path / "file", b"newer", token="tmp")
    assert {path.read_text() for path in beside} == {"of the user"}
    assert (tmp_path / "file").read_bytes() == b"new"


def test_a_link_is_replaced_and_not_followed(tmp_path):
    (tmp_path / "target").write_text("kept")
    (tmp_path / "file").symlink_to(tmp_path / "target")
    write_durably(tmp_path / "file", b"new")
    assert (tmp_path / "target").read_text() == "kept"
    assert not (tmp_path / "file").is_symlink()


def test_only_regular_files_are_read(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    os.symlink("/dev/zero", tmp_path / "endless")
    (tmp_path / "file").write_bytes(b"12345")
    os.symlink(tmp_path / "file", tmp_path / "link")
    for name, kind in (("fifo", "a pipe"), ("endless", "a device"), (".", "a folder")):
        with pytest.raises(DamageError, match=f"{kind}"):
            read_regular(tmp_path / name, 1 << 20)
        with pytest.raises(DamageError, match=kind), open_regular(tmp_path / name):
            pass
    assert read_regular(tmp_path / "link", 5) == b"12345"
    with pytest.raises(DamageError, match=r"5 bytes.*4"):
        read_regular(tmp_path / "file", 4)
    with pytest.raises(FileNotFoundError):
        read_regular(tmp_path / "none", 4)


def test_only_files_are_replaced(tmp_path):
    os.mkfifo(pipe := tmp_path / "pipe")
    (device := tmp_path / "device").symlink_to("/dev/null")
    (tmp_path / "file").write_bytes(b"old")
    with (tmp_path / "file").open("rb") as file:
        (output := tmp_path / "stdout").symlink_to(f"/proc/self/fd/{file.fileno()}")
        for path in (pipe, device, output, tmp_path):
            with pytest.raises(FileExistsError, match=path.name):
                write_durably(path, b"new")
    assert (pipe.is_fifo(), device.is_char_device()) == (True, True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["device", "file", "pipe", "stdout"]
    assert (tmp_path / "file").read_bytes() == b"old"
