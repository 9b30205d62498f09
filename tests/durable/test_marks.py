"""A mark is valid in the folder that this version wrote it to, for its owner, once its lock is free."""

import os
import shutil

import pytest

from meshrec.durable import PREFIX, mark, release, unlocked_marks


@pytest.fixture
def folder(tmp_path):
    """Return a folder with a mark that nobody holds."""
    folder = tmp_path / "folder"
    folder.mkdir()
    release(mark(folder, "kind", id="0123456789abcdef")[1])
    return folder


def test_a_mark_is_valid_once_its_lock_is_free(tmp_path):
    written, lock = mark(tmp_path, "kind")
    assert unlocked_marks(tmp_path, "kind") == []
    release(lock)
    assert unlocked_marks(tmp_path, "kind") == [written]
    assert unlocked_marks(tmp_path, "other") == []
    assert unlocked_marks(tmp_path / "none", "kind") == []


def test_a_copy_has_no_valid_mark(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "copy")
    linked = shutil.copytree(folder, tmp_path / "linked", copy_function=os.link)
    for moved in (False, True):
        assert unlocked_marks(copy, "kind", moved=moved) == []
        assert unlocked_marks(linked, "kind", moved=moved) == []


def test_a_moved_folder_is_valid_only_where_that_is_allowed(folder, tmp_path):
    moved = folder.rename(tmp_path / "moved")
    assert (unlocked_marks(moved, "kind"), len(unlocked_marks(moved, "kind", moved=True))) == ([], 1)
    shutil.copytree(moved, folder)  # restored from a backup
    assert (unlocked_marks(folder, "kind"), len(unlocked_marks(folder, "kind", moved=True))) == ([], 1)


def test_a_link_to_a_folder_has_no_marks(folder, tmp_path):
    (tmp_path / "link").symlink_to(folder)
    assert unlocked_marks(tmp_path / "link", "kind", moved=True) == []


@pytest.mark.parametrize("damage", ["cut", "changed", "linked", "renamed", "pipe", "another's", "locked"])
def test_what_is_not_a_mark_of_ours_proves_nothing(folder, tmp_path, monkeypatch, damage):
    path = next(folder.glob(f"{PREFIX}*"))
    if damage == "cut":  # the process was killed before it had written all
        path.write_bytes(path.read_bytes()[:40])
    elif damage == "changed":
        path.write_text(path.read_text().replace('"kind": "kind"', '"kind": "other"'))
    elif damage == "linked":
        path.rename(tmp_path / "mark").touch()
        path.symlink_to(tmp_path / "mark")
    elif damage == "renamed":
        path.rename(path.with_name(f"{PREFIX}ffff456789abcdef"))
    elif damage == "pipe":
        path.unlink()
        os.mkfifo(path)
    elif damage == "another's":
        monkeypatch.setattr(os, "getuid", lambda: -1)
    else:
        monkeypatch.setattr("fcntl.flock", lambda *_: (_ for _ in ()).throw(OSError(37, "no locks here")))
    assert unlocked_marks(folder, "kind") == []
    assert unlocked_marks(folder, "other") == []


def test_only_files_of_the_given_names_go_with_a_mark(folder):
    for name in ("data-01", "data-01.bak", "notes"):
        (folder / name).write_text("")
    (folder / "data-02").mkdir()
    unlocked_marks(folder, "kind")[0].remove(r"data-\d+")
    assert sorted(path.name for path in folder.iterdir()) == ["data-01.bak", "data-02", "notes"]
