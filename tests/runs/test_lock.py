"""The locks of a run's folder, and starts of one run at the same time."""

import json
import multiprocessing
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest

from meshrec.__main__ import command
from meshrec.cli import train
from meshrec.runs.lock import RunLock, claim_run, rank_lock
from meshrec.train.run_folder import CONFIG, RunFolder

ROOT = Path(__file__).parents[2]
FORK = multiprocessing.get_context("fork")


def hold_until_killed(path, kind, told):
    folder = RunFolder(path)
    with RunLock(folder) if kind == "start" else rank_lock(folder, 1):
        told.send("held")
        signal.pause()


@pytest.fixture
def holding(tmp_path):
    """``holding("start")``: another process that holds the lock of the folder, or of a rank in it."""
    processes = []

    def hold(kind):
        here, there = FORK.Pipe(duplex=False)
        process = FORK.Process(target=hold_until_killed, args=(tmp_path, kind, there))
        process.start()
        processes.append(process)
        assert here.poll(60)
        assert here.recv() == "held"
        return process

    yield hold
    for process in processes:
        process.kill()
        process.join()


def test_the_second_start_is_told_who_holds_the_run(tmp_path, holding):
    other = holding("start")
    with pytest.raises(ValueError, match=f"{other.pid}") as told:
        RunLock(RunFolder(tmp_path))
    assert f"stop it (kill {other.pid}), or take another --name" in str(told.value)


def test_a_damaged_lock_file_still_says_that_the_folder_is_in_use(tmp_path, holding):
    holding("start")
    (tmp_path / ".lock").write_bytes(b'\xff{"pid": 1}')
    with pytest.raises(ValueError, match="in use: process, not known yet"):
        RunLock(RunFolder(tmp_path))


@pytest.mark.parametrize("kind", ["start", "rank"])
def test_a_lock_of_a_dead_process_does_not_block(tmp_path, holding, kind):
    other = holding(kind)
    other.kill()
    other.join()
    assert [path.name for path in tmp_path.iterdir()]  # it could not tidy up
    with RunLock(RunFolder(tmp_path)) as folder:
        assert json.loads((folder.path / ".lock").read_text())["pid"] == os.getpid()
    assert not (tmp_path / ".lock").exists()


def test_ranks_that_outlive_their_launcher_keep_the_folder(tmp_path, holding):
    other = holding("rank")
    for _ in range(2):  # the attempt leaves nothing locked
        with pytest.raises(ValueError, match=f"rank 1.*{other.pid}"):
            RunLock(RunFolder(tmp_path))
    with pytest.raises(ValueError, match=f"rank 1.*{other.pid}"):
        rank_lock(RunFolder(tmp_path), 1).__enter__()


def test_one_process_has_a_folder_once_as_well(tmp_path):
    lock = RunLock(RunFolder(tmp_path))
    with pytest.raises(ValueError, match=f"{os.getpid()}"):
        RunLock(RunFolder(tmp_path))
    lock.release()
    lock.release()
    with RunLock(RunFolder(tmp_path)):
        pass


def test_a_removed_folder_takes_no_newer_lock_along(tmp_path):
    (tmp_path / "mine").mkdir()
    old = RunLock(RunFolder(tmp_path / "mine"))
    shutil.rmtree(tmp_path / "mine")
    (tmp_path / "mine").mkdir()
    with RunLock(RunFolder(tmp_path / "mine")):
        old.release()
        assert (tmp_path / "mine" / ".lock").exists()


def test_a_forked_child_does_not_keep_the_lock(tmp_path):
    lock = RunLock(RunFolder(tmp_path))
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, b"1")
        signal.pause()
    try:
        os.read(read, 1)
        os.unlink(lock._path)
        lock._path.touch()
        lock.release()
        with RunLock(RunFolder(tmp_path)):
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(read)
        os.close(write)


def test_a_run_that_began_before_the_lock_is_seen(tmp_path, monkeypatch):
    """Another start trains and ends between the look at the folder and the lock."""
    from meshrec.runs import lock

    def slowly(*arguments, **options):
        folder = new_run(*arguments, **options)
        folder.write_json(CONFIG, {})
        return folder

    new_run = lock.new_run
    monkeypatch.setattr(lock, "new_run", slowly)
    with pytest.raises(ValueError, match="run"):
        claim_run("mine", "small", tmp_path)
    assert not (tmp_path / "mine" / ".lock").exists()


def run_command(errors, words):
    """Run MeshRec's command as this process, which the fork server started with all modules imported."""
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT), 2)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.chdir(ROOT)
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.argv = ["meshrec", *words]
    command()


def until(condition):
    deadline = time.monotonic() + 240
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert condition()


@pytest.mark.parametrize("nproc", [1, 2])
def test_two_starts_with_one_name_do_not_both_train(tmp_path, nproc):
    runs, server = tmp_path / "runs", multiprocessing.get_context("forkserver")
    words = ["train", "tests/train/small.py:small", "--runs", str(runs), "--name", "mine", "--quiet"]
    words += ["--nproc", str(nproc), "--training.epochs", "100000", "--training.checkpoint-every", "10"]
    files = [tmp_path / name for name in ("a", "b")]
    both = [server.Process(target=run_command, args=(file, words)) for file in files]
    try:
        for each in both:
            each.start()
        until(lambda: not all(each.is_alive() for each in both))
        second = next(index for index, each in enumerate(both) if not each.is_alive())
        first = 1 - second
        assert both[first].is_alive()
        assert both[second].exitcode == 1
        errors = files[second].read_text()
        # One that comes at the same moment does not know the other yet. One that comes late, because the
        # machine is busy, finds what the first has written.
        in_use = (f"is in use: process {both[first].pid} on", "is in use: process, not known yet")
        found = (*in_use, "has a run already; take another --name")
        assert any(f"{runs / 'mine'} {words}" in errors for words in found), errors
        assert "Traceback" not in errors
        until(lambda: list(runs.glob("mine/checkpoints/*/manifest.json")))
        with pytest.raises(ValueError, match=f"{both[first].pid}"):
            train.main(["--resume", "--runs", str(runs), "--name", "mine", "--quiet"])
        both[first].terminate()
        both[first].join(240)
        summary = json.loads((runs / "mine" / "summary.json").read_text())
        assert summary["state"] == "stopped", files[first].read_text()
    finally:
        for each in both:
            each.kill()
            each.join()
            each.close()
