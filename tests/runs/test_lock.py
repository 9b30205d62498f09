"""The locks of a run's folder, and starts of one run at the same time."""

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

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


def start(runs, *options):
    command = [sys.executable, "-m", "meshrec", "train", *options, "--runs", str(runs), "--name", "mine"]
    return subprocess.Popen(
        [*command, "--quiet"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT}/src"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("nproc", [1, 2])
def test_two_starts_with_one_name_do_not_both_train(tmp_path, nproc):
    options = ("tests/train/small.py:small", "--nproc", str(nproc), "--training.epochs", "100000")
    both = [start(tmp_path, *options, "--training.checkpoint-every", "10") for _ in range(2)]
    try:
        deadline = time.monotonic() + 240
        while all(each.poll() is None for each in both) and time.monotonic() < deadline:
            time.sleep(0.1)
        (second,) = [each for each in both if each.poll() is not None]
        (first,) = [each for each in both if each is not second]
        _, errors = second.communicate(timeout=60)
        assert second.returncode == 1
        # One that comes late, because the machine is busy, finds what the first has written.
        found = (f"is in use: process {first.pid} on", "has a run already; take another --name")
        assert any(f"{tmp_path / 'mine'} {words}" in errors for words in found)
        assert "Traceback" not in errors
        while not list(tmp_path.glob("mine/checkpoints/*/manifest.json")) and time.monotonic() < deadline:
            time.sleep(0.1)
        with pytest.raises(ValueError, match=f"{first.pid}"):
            train.main(["--resume", "--runs", str(tmp_path), "--name", "mine", "--quiet"])
        first.send_signal(signal.SIGTERM)
        _, errors = first.communicate(timeout=240)
        assert json.loads((tmp_path / "mine" / "summary.json").read_text())["state"] == "stopped", errors
    finally:
        for each in both:
            each.kill()
            each.wait()
            each.stdout.close()
            each.stderr.close()
