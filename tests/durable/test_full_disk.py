import errno
import os
import sqlite3
import sys
from types import SimpleNamespace

import pytest
import torch

from meshrec.cli import __main__ as command
from meshrec.durable import name_full_disk


@pytest.fixture
def disks(tmp_path, monkeypatch):
    """Two folders on disks of their own, of which only ``full`` has no space."""
    for name in ("full", "other"):
        (tmp_path / name).mkdir()

    def statvfs(path):
        return SimpleNamespace(f_bavail=0 if path.startswith(str(tmp_path / "full")) else 1000, f_frsize=4096)

    monkeypatch.setattr(os, "statvfs", statvfs)
    monkeypatch.chdir(tmp_path / "other")
    return tmp_path


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("path", ["full", "full/not/yet/there.json"])
def test_the_full_disk_is_named(disks, number, path):
    error = OSError(number, "no space")
    name_full_disk(error, ["x" * 5000, "null\0", disks / "other", disks / path])
    assert error.filename == str(disks / "full")


def test_a_file_that_the_system_names_stays(disks):
    named, other = OSError(errno.ENOSPC, "no space", "a"), OSError(errno.EIO, "broken")
    for error in (named, other):
        name_full_disk(error, [disks / "full"])
    assert (named.filename, other.filename) == ("a", None)


@pytest.mark.parametrize("words", [["--runs", "{}/full/runs"], ["--out={}/full/scores.parquet"]])
def test_a_command_names_the_full_disk_and_not_the_current_folder(disks, monkeypatch, capsys, words):
    def main(arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setitem(sys.modules, "writes", SimpleNamespace(main=main))
    monkeypatch.setitem(command.COMMANDS, "writes", command.Command("writes", "Write."))
    monkeypatch.setattr(sys, "argv", ["meshrec", "writes", *(word.format(disks) for word in words)])
    assert command.main() == 1
    assert f"meshrec: {disks / 'full'}: No space left on device. Make room" in capsys.readouterr().err


def test_a_run_names_its_full_disk(disks, monkeypatch, small):
    from meshrec.runs import worker
    from meshrec.runs.job import Job

    def run(rank_run):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(worker.RankRun, "run", run)
    with pytest.raises(OSError, match="space") as full:
        worker.run_rank(
            Job(recipe=small(), runs=disks / "full", name="x", device="cpu"), lambda folder: print
        )
    assert full.value.filename == str(disks / "full" / "x")


def test_writer_in_the_background_names_its_full_disk(disks, monkeypatch):
    from meshrec.checkpoint import CheckpointError, async_save, snapshot

    def write(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(snapshot, "write_data_file", write)
    pending = async_save(disks / "full" / "x", {"a": torch.ones(3)})
    with pytest.raises(CheckpointError, match=f"No space left.*{disks / 'full'}"):
        pending.wait()


def test_study_names_its_full_disk(tmp_path):
    from meshrec.train.tuning import _named_errors

    study = tmp_path / "study.db"

    def fill():
        connection = sqlite3.connect(study)
        try:
            connection.execute("PRAGMA max_page_count = 1")  # as if the disk had no more
            connection.execute("CREATE TABLE trials (number INTEGER)")
        except sqlite3.Error as error:
            raise RuntimeError("An exception is raised during the commit") from error  # as Optuna does
        finally:
            connection.close()

    with pytest.raises(OSError, match="No space left") as full, _named_errors(study):
        fill()
    assert (full.value.errno, full.value.filename) == (errno.ENOSPC, str(study))
    with pytest.raises(RuntimeError, match="other"), _named_errors(study):
        raise RuntimeError("other")
