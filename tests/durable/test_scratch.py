"""Scratch folders end with their owner, or with the next one of their kind if it was killed."""

import os
import signal
import subprocess
import sys
import tempfile

import pytest

from meshrec.durable import scratch, scratch_folder

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


def test_a_folder_is_private_and_removed(place):
    with scratch_folder("kind") as folder:
        (folder / "file").write_text("x")
        assert folder.parent == place
        assert folder.stat().st_mode & 0o777 == 0o700
    assert list(place.iterdir()) == []


def test_the_next_owner_removes_what_a_killed_one_left(place):
    (place / "kind-of-others").symlink_to(place.parent)
    with subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True) as owner:
        left = owner.stdout.readline().strip()
        with scratch_folder("kind"):
            assert os.path.isdir(left)  # its owner lives
        owner.send_signal(signal.SIGKILL)
        owner.wait()
    with scratch_folder("kind"):
        assert not os.path.exists(left)
    assert [path.name for path in place.iterdir()] == ["kind-of-others"]


def test_a_folder_that_its_owner_has_not_locked_yet_stays(place, monkeypatch):
    (place / ".kind-new").mkdir()
    with scratch_folder("kind") as folder:
        assert sorted(path.name for path in place.iterdir()) == [".kind-new", folder.name]
    monkeypatch.setattr(scratch, "_SECONDS_TO_LOCK", 0.0)
    with scratch_folder("kind"):
        assert not (place / ".kind-new").exists()
