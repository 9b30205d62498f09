"""Scratch folders end with their owner, or with the next one of their kind if it was killed."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile

import pytest

from meshrec.durable import (
    DamageError,
    abandon_scratch,
    durable_folder,
    join_scratch,
    make_scratch,
    remove_scratch,
    scratch,
    scratch_folder,
)

OWNER = """
import sys, time
from meshrec.durable import scratch_folder
with scratch_folder("kind") as folder:
    print(folder, flush=True)
    time.sleep(600)
"""


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    yield tmp_path
    tempfile.tempdir = None


def left_behind(kind):
    """Return a scratch folder whose owner has ended without removing it."""
    folder = make_scratch(kind)
    (folder / "file").write_text("x")
    os.close(scratch._owned.pop(folder).lock)
    return folder


def test_a_folder_is_private_and_removed(place):
    with scratch_folder("kind") as folder:
        (folder / "file").write_text("x")
        assert folder.parent == place
        assert folder.stat().st_mode & 0o777 == 0o700
    assert list(place.iterdir()) == []


def test_the_next_owner_removes_what_a_killed_one_left(place):
    with subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True) as owner:
        left = owner.stdout.readline().strip()
        with scratch_folder("kind"):
            assert os.path.isdir(left)  # its owner lives
        owner.send_signal(signal.SIGKILL)
        owner.wait()
    with scratch_folder("other"):
        assert os.path.exists(left)
    with scratch_folder("kind"):
        assert not os.path.exists(left)
    assert list(place.iterdir()) == []


def test_folders_of_the_user_stay_whatever_their_name(place):
    left = left_behind("kind")
    shutil.copytree(left, place / "kind-copy")
    (place / "kind-empty").mkdir()
    (place / "kind-models").mkdir()
    (place / "kind-models" / "notes").write_text("x")
    (place / "kind-link").symlink_to(place / "kind-models")
    left_behind("kind").rename(place / "kind-renamed")
    gone = left_behind("kind")
    gone.rename(place / "elsewhere")
    gone.symlink_to(place / "elsewhere")
    before = {str(path) for path in place.rglob("*") if left not in (path, *path.parents)}
    with scratch_folder("kind"):
        assert not left.exists()
    assert {str(path) for path in place.rglob("*")} == before


def test_a_link_in_a_scratch_folder_is_not_followed(place):
    (place / "kept").mkdir()
    (place / "kept" / "file").write_text("x")
    (left_behind("kind") / "link").symlink_to(place / "kept")
    with scratch_folder("kind"):
        pass
    assert [path.name for path in place.rglob("*")] == ["kept", "file"]


def test_a_folder_stays_while_another_process_has_joined_it(place):
    left = left_behind("kind")
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        join_scratch(left)
        os.write(writing, b".")
        signal.pause()
    os.read(reading, 1)
    with scratch_folder("kind"):
        assert left.exists()
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with scratch_folder("kind"):
        assert not left.exists()
    join_scratch(place / "none")


def test_the_last_fork_of_a_killed_owner_removes_its_folder(place):
    folder = make_scratch("kind")
    if not os.fork():
        remove_scratch(folder)  # the parent's
        os._exit(0 if folder.exists() else 1)
    assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
    abandon_scratch(folder)
    assert list(place.iterdir()) == []


def test_a_folder_without_its_mark_is_not_left(place, monkeypatch):
    monkeypatch.setattr(scratch, "mark", lambda *_: (_ for _ in ()).throw(OSError(28, "disk full")))
    with pytest.raises(OSError, match="disk"):
        make_scratch("kind")
    assert list(place.iterdir()) == []


def test_processes_that_agree_on_a_name_make_one_folder(place):
    folder = make_scratch("kind", token="a")
    with pytest.raises(FileExistsError):
        make_scratch("kind", token="a")
    remove_scratch(folder)
    remove_scratch(folder)


def test_a_folder_appears_when_its_files_are_on_the_disk(tmp_path, monkeypatch):
    synced, target = [], tmp_path / "folder"
    sync = os.fsync

    def fsync(descriptor):
        assert not target.exists() or synced
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    with durable_folder(target) as parts:
        for name in ("a", "b"):
            (parts / name).write_text(name)
    assert sorted(os.path.basename(each) for each in synced[:2]) == ["a", "b"]
    assert synced[2:] == [str(parts), str(tmp_path)]
    assert sorted(path.name for path in target.iterdir()) == ["a", "b"]
    assert list(tmp_path.iterdir()) == [target]


def test_a_folder_that_fails_leaves_nothing(tmp_path):
    def fail(parts):
        (parts / "a").write_text("a")
        raise DamageError("no")

    with pytest.raises(DamageError), durable_folder(tmp_path / "folder") as parts:
        fail(parts)
    assert list(tmp_path.iterdir()) == []
