import fcntl
import json
import math
import os
import resource
import signal
import subprocess
import sys
import textwrap
import time

import pytest
import torch

from meshrec.checkpoint import snapshot as snapshots
from meshrec.checkpoint.agreement import CheckpointError
from meshrec.checkpoint.data_file import TensorPart, Written
from meshrec.checkpoint.snapshot import Snapshot, failure_of
from meshrec.tables.streamed import streamed_parts
from meshrec.tables.table import Rectangle, RowBlock, RowPart


def start(tmp_path, tensor):
    parts = [TensorPart("a", (0, 0), tuple(tensor.shape), tensor)]
    return Snapshot.start(tmp_path / "data", parts, tmp_path / "note.json")


def test_what_changes_afterwards_is_not_written(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    tensor = torch.rand(1000, 64)
    before = tensor.clone()
    snapshot = start(tmp_path, tensor)
    tensor.zero_()
    snapshot.wait()
    assert not snapshot.is_running
    assert torch.equal(safetensors.load_file(tmp_path / "data")["a"], before)
    written = Written.from_json(json.loads((tmp_path / "note.json").read_text()))
    assert written.file.num_bytes == (tmp_path / "data").stat().st_size


def mapped(path, shape, *, shared):
    tensor = torch.from_file(str(path), shared=shared, size=math.prod(shape)).view(shape)
    return tensor.copy_(torch.rand(shape))


@pytest.mark.parametrize("kind", ["shared file", "file", "shared memory"])
def test_memory_that_processes_share_is_frozen(tmp_path, kind):
    safetensors = pytest.importorskip("safetensors.torch")
    if kind == "shared memory":
        tensor = torch.rand(20_000, 64).share_memory_()
    else:
        (tmp_path / "rows").write_bytes(bytes(20_000 * 64 * 4))
        tensor = mapped(tmp_path / "rows", (20_000, 64), shared=kind == "shared file")
    before = tensor.clone()
    snapshot = start(tmp_path, tensor[1:])
    tensor.zero_()
    snapshot.wait()
    assert torch.equal(safetensors.load_file(tmp_path / "data")["a"], before[1:])


class MappedTable:
    """Rows in a file that is mapped into memory; a snapshot copies them."""

    parts = (RowPart("weight", torch.float32, False),)

    def __init__(self, rows):
        self.rows, self.rectangle, self.num_open = rows, Rectangle(0, 0, len(rows), 0, rows.shape[1]), 0

    def stream(self, columns=None, *, keys=None):
        for first in range(*keys, 100):
            block = range(first, min(first + 100, keys[1]))
            yield RowBlock(block, columns, {"weight": self.rows[block.start : block.stop, slice(*columns)]})

    def snapshot(self):
        frozen = MappedTable(self.rows.clone())
        frozen.close = lambda: self.count(-1)
        self.count(1)
        return frozen

    def count(self, number):
        self.num_open += number


@pytest.mark.parametrize("ends", ["waited for", "seen", "killed", "not begun"])
def test_a_table_gives_a_snapshot_and_takes_it_back(tmp_path, monkeypatch, ends):
    (tmp_path / "rows").write_bytes(bytes(20_000 * 64 * 4))
    table = MappedTable(mapped(tmp_path / "rows", (20_000, 64), shared=True))
    before = table.rows.clone()
    weight = streamed_parts(table)["weight"]
    if ends == "not begun":
        monkeypatch.setattr(os, "fork", refuse)
        with pytest.raises(OSError, match="processes"):
            start(tmp_path, weight)
        assert table.num_open == 0
        return
    parts = [
        TensorPart("a", (0, 0), (19_000, 64), weight[:19_000]),
        TensorPart("b", (0, 0), (9, 3), weight[:9, :3]),
    ]
    snapshot = Snapshot.start(tmp_path / "data", parts, tmp_path / "note.json")
    assert table.num_open == 1  # for all its parts
    table.rows.zero_()
    if ends == "killed":
        snapshot.kill()
    elif ends == "seen":
        while snapshot.is_running:
            time.sleep(0.001)
    else:
        snapshot.wait()
        found = pytest.importorskip("safetensors.torch").load_file(tmp_path / "data")
        assert torch.equal(found["a"], before[:19_000])
        assert torch.equal(found["b"], before[:9, :3])
    snapshot.kill()
    assert table.num_open == 0


def refuse():
    raise OSError("no more processes")


def test_failures_say_why(tmp_path):
    (tmp_path / "data").write_text("in the way")
    with pytest.raises(CheckpointError, match="FileExistsError"):
        start(tmp_path, torch.rand(2, 2)).wait()
    assert not failure_of(tmp_path / "note.json").exists()


def test_a_killed_writer_is_noticed(tmp_path):
    snapshot = start(tmp_path, torch.rand(2000, 2000))
    os.kill(snapshot._pid, signal.SIGKILL)
    with pytest.raises(CheckpointError, match="background"):
        snapshot.wait()
    other = start(tmp_path / "..", torch.rand(2, 2))
    other.kill()
    assert not other.is_running


@pytest.mark.parametrize("num_stuck", [1, 3])
def test_a_writer_that_does_not_begin_is_replaced(tmp_path, monkeypatch, num_stuck):
    """As where a thread was just becoming known to Python."""
    fork, children = os.fork, []

    def forked():
        children.append(fork())
        if children[-1] == 0 and len(children) <= num_stuck:
            signal.pause()
        return children[-1]

    monkeypatch.setattr(os, "fork", forked)
    monkeypatch.setattr(snapshots, "_START_TIMEOUT", 0.2)
    if num_stuck < 3:
        monkeypatch.setattr(snapshots, "_TRIES", 100)  # the second may be slow as well
        start(tmp_path, torch.rand(2, 2)).wait()
        written = Written.from_json(json.loads((tmp_path / "note.json").read_text()))
        assert written.file.num_bytes == (tmp_path / "data").stat().st_size
    else:
        with pytest.raises(CheckpointError, match="3 processes"):
            start(tmp_path, torch.rand(2, 2))
    assert len(children) >= min(3, num_stuck + 1)
    assert not any(map(_is_alive, children[:num_stuck]))


def test_it_begins_in_a_process_with_many_files(tmp_path, monkeypatch):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2048:
        pytest.skip(f"no more than {hard} files can be open")
    pipe = os.pipe

    def high():
        found = []
        for descriptor in pipe():
            found.append(fcntl.fcntl(descriptor, fcntl.F_DUPFD, 1500))
            os.close(descriptor)
        return tuple(found)

    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    try:
        monkeypatch.setattr(os, "pipe", high)
        start(tmp_path, torch.rand(2, 2)).wait()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_it_dies_with_its_parent(tmp_path):
    """No writer is left behind when a rank is killed."""
    script = """
        import os, signal, sys, torch
        from pathlib import Path
        from meshrec.checkpoint import snapshot
        from meshrec.checkpoint.data_file import TensorPart
        def forever(*_):
            signal.pause()
        snapshot.write_data_file = forever
        folder = Path(sys.argv[1])
        part = TensorPart("a", (0,), (2,), torch.rand(2))
        child = snapshot.Snapshot.start(folder / "data", [part], folder / "note")
        print(child._pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    process = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)], capture_output=True, text=True
    )
    child = int(process.stdout)
    deadline = time.monotonic() + 30
    while _is_alive(child) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not _is_alive(child)


def _is_alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
