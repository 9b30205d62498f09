"""Of a folder with a checkpoint, only the checkpoint's files are deleted."""

import os
import shutil
from pathlib import Path

import pytest
import torch

from meshrec.checkpoint import CheckpointManager, find_checkpoint, load, save
from meshrec.checkpoint.manifest import MANIFEST
from meshrec.checkpoint.removing import KIND, remove_checkpoint
from meshrec.durable import PREFIX, mark, release

STATE = {"a": torch.ones(3)}
OF_THE_USER = (
    *("data-train.safetensors", "data-0123abcd-00000.safetensors", "note-to-self.md", "note-1.json"),
    *(".manifest.json", f".manifest.json.{os.getpid()}", f"{PREFIX}notes"),
)


def put(folder: Path) -> dict[str, str]:
    """Put files of the user into a folder, and return its names with the contents of those files."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in OF_THE_USER:
        (folder / name).write_text("of the user")
    return dict.fromkeys(OF_THE_USER, "of the user")


def contents(folder: Path) -> dict[str, str]:
    """Return the files of a folder."""
    return {path.name: path.read_text() for path in folder.iterdir()}


class Unsaved:
    """An entry that cannot be saved."""

    def state_dict(self):
        raise OSError(5, "no")

    def load_state_dict(self, state):
        """Do nothing."""


def test_a_save_leaves_the_files_of_the_user(tmp_path):
    mine = put(tmp_path)
    for _ in range(2):
        save(tmp_path, STATE)
        names = {path.name for path in tmp_path.iterdir()}
        assert len(names) == len(mine) + 2  # the manifest, and the data of one save
        assert all((tmp_path / name).read_text() == text for name, text in mine.items())


def test_a_manifest_of_something_else_is_not_replaced(tmp_path):
    (tmp_path / MANIFEST).write_text('{"name": "an app"}')
    with pytest.raises(ValueError, match=MANIFEST):
        save(tmp_path, STATE)
    assert contents(tmp_path) == {MANIFEST: '{"name": "an app"}'}


@pytest.mark.parametrize("left", [b"", bytes(500), b"garbage", b"{}"])
def test_training_saves_again_over_a_checkpoint_with_a_damaged_manifest(tmp_path, left):
    checkpoints = CheckpointManager(tmp_path, keep_last=2)
    for step in (1, 2):
        checkpoints.save(step, STATE)
    (checkpoints.path(2) / MANIFEST).write_bytes(left)
    assert checkpoints.load_latest(dict(STATE)) == 1
    checkpoints.save(2, STATE)
    assert checkpoints.load_latest(dict(STATE)) == 2


def test_a_failed_save_removes_the_folders_that_it_made(tmp_path):
    (tmp_path / "empty").mkdir()
    for path in ("empty", "new/deep"):
        with pytest.raises(RuntimeError, match="no"):
            save(tmp_path / path, {"a": Unsaved(), "b": torch.ones(2)})
    assert [path.name for path in tmp_path.rglob("*")] == ["empty"]


def test_pruning_leaves_the_files_of_the_user(tmp_path):
    checkpoints = CheckpointManager(tmp_path, keep_last=1)
    mine = put(checkpoints.path(1))  # without a checkpoint
    for step in (2, 3, 4):
        checkpoints.save(step, STATE)
        if step < 4:
            put(checkpoints.path(step))
    for step in (1, 2, 3):
        assert contents(checkpoints.path(step)) == mine
    assert checkpoints.steps() == [4]


def test_a_link_is_pruned_and_what_it_leads_to_stays(tmp_path):
    checkpoints, golden = CheckpointManager(tmp_path / "run", keep_last=1), tmp_path / "golden"
    checkpoints.save(1, STATE)
    checkpoints.path(1).rename(golden)
    before = {path.name: path.read_bytes() for path in golden.iterdir()}
    for save_again in (lambda: checkpoints.save(1, STATE), lambda: checkpoints.async_save(1, STATE).wait()):
        shutil.rmtree(checkpoints.path(1), ignore_errors=True)
        checkpoints.path(1).symlink_to(golden)
        save_again()  # replaces the link, and not the checkpoint behind it
        assert not checkpoints.path(1).is_symlink()
    for step in (2, 3):
        checkpoints.path(step).symlink_to(golden)
    checkpoints.save(4, STATE)
    assert [path.name for path in checkpoints.folder.iterdir()] == ["step-0000000004"]
    assert {path.name: path.read_bytes() for path in golden.iterdir()} == before


def test_a_data_file_that_is_a_link_is_pruned_as_one(tmp_path):
    save(tmp_path / "x", STATE)
    data = next((tmp_path / "x").glob("data-*"))
    data.rename(tmp_path / "data")
    data.symlink_to(tmp_path / "data")
    remove_checkpoint(tmp_path / "x")
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


@pytest.mark.parametrize("kind", ["format 1", "damaged", "copied", "moved"])
def test_checkpoints_are_pruned_by_their_manifest(tmp_path, kind):
    checkpoints = CheckpointManager(tmp_path / "run", keep_last=1)
    path = checkpoints.path(1)
    if kind == "format 1":
        shutil.copytree(Path(__file__).parent / "format1", path)
    else:
        save(tmp_path / "x", STATE)
        shutil.copytree(tmp_path / "x", path) if kind == "copied" else save(path, STATE)
    if kind == "damaged":
        content = (path / MANIFEST).read_bytes()
        (path / MANIFEST).write_bytes(content[: len(content) // 2])
    if kind == "moved":
        checkpoints.folder.rename(tmp_path / "other")
        checkpoints = CheckpointManager(tmp_path / "other", keep_last=1)
    checkpoints.save(2, STATE)
    assert [path.name for path in checkpoints.folder.iterdir()] == ["step-0000000002"]


def test_a_save_that_was_killed_is_removed_and_its_copy_is_not(tmp_path):
    checkpoints, copies = (CheckpointManager(tmp_path / name, keep_last=1) for name in ("run", "copy"))
    left = checkpoints.path(1)
    left.mkdir(parents=True)
    release(mark(left, KIND, id="0123abcd")[1])
    names = ["data-0123abcd-00001.safetensors", "note-0123abcd-00001.json", "note-0123abcd-00001.failed"]
    for name in (*names, ".manifest.json.0123abcd", ".note-0123abcd-00001.json.ffff", "data-0123abcd.txt"):
        (left / name).write_text("")
    shutil.copytree(checkpoints.folder, copies.folder)
    for each in (checkpoints, copies):
        each.save(2, STATE)
    assert [path.name for path in left.iterdir()] == ["data-0123abcd.txt"]
    assert len(list(copies.path(1).iterdir())) == 7


def test_a_removal_that_was_cut_short_goes_on(tmp_path, monkeypatch):
    checkpoints = CheckpointManager(tmp_path, keep_last=1)
    checkpoints.save(1, STATE)
    with monkeypatch.context() as patch:
        patch.setattr("meshrec.checkpoint.removing.remove_saves", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            checkpoints.save(2, STATE)
    assert len(list(checkpoints.path(1).iterdir())) == 2  # the data, and a mark
    checkpoints.save(3, STATE)
    assert [path.name for path in tmp_path.iterdir()] == ["step-0000000003"]


def test_a_new_save_replaces_one_that_was_killed_after_its_manifest(tmp_path):
    save(tmp_path, STATE)
    data = next(tmp_path.glob("data-*")).name
    release(mark(tmp_path, KIND, id=data.split("-")[1])[1])  # the kill came before the mark was removed
    load(find_checkpoint(tmp_path), dict(STATE))
    save(tmp_path, STATE)
    assert len(list(tmp_path.iterdir())) == 2
    assert not (tmp_path / data).exists()
