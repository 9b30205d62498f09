"""The commands on data in a bucket, with faults, and with a run that is killed in the middle of a read."""

import json
import os
import signal
import subprocess
import sys

import pyarrow.parquet as pq
import pytest

from meshrec.cli.evaluate import main as evaluate
from meshrec.cli.inspect import main as inspect
from meshrec.cli.predict import main as predict
from meshrec.cli.train import main as train
from tests.data.faulty_store import started
from tests.train.clicks import clicks

# Trains on rows that are read again in every epoch, as those of large sources are.
UNCACHED = """
import sys
from meshrec.data import streaming
from meshrec.cli.train import main
streaming.MAX_CACHED_VALUES = 0
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def store(monkeypatch):
    with started(monkeypatch) as store:
        yield store


def test_a_run_killed_in_the_middle_of_a_read_ends_like_one_on_local_files(store, tmp_path, capsys):
    folder = tmp_path / "clicks"
    folder.mkdir()
    for part in range(2):
        pq.write_table(clicks(400, seed=part), folder / f"{part}.parquet", row_group_size=100)
        store.put(f"clicks/{part}.parquet", clicks(400, seed=part), row_group_size=100)
    # A fault now and then, also while the data is inspected.
    store.fault = lambda number, *_: 503 if number % 10 == 9 else None
    options = ["--training.batch-size", "50", "--training.epochs", "2", "--training.checkpoint-every", "4"]
    for name, data in (("here", str(folder)), ("stored", store.address("clicks/*.parquet"))):
        recipe = str(tmp_path / f"{name}.py")
        assert inspect([data, "--label", "clicked", "--out", recipe]) == 0
        words = [recipe + ":recipe", "--runs", str(tmp_path), "--name", name, "--quiet", *options]
        if name == "here":
            assert train(words) == 0
            continue
        # Reads of the second epoch go on until one stalls, after a checkpoint.
        checkpoint = tmp_path / "stored" / "checkpoints" / "step-0000000016"

        def fault(number, method, _, checkpoint=checkpoint):
            return "stall" if method == "GET" and checkpoint.exists() and not store.stalled.is_set() else None

        store.fault = fault
        run = subprocess.Popen([sys.executable, "-c", UNCACHED, *words], start_new_session=True)
        try:
            assert store.stalled.wait(120)
        finally:
            os.killpg(run.pid, signal.SIGKILL)
            run.wait()
        assert not (tmp_path / "stored" / "summary.json").exists()
        assert train([*words, "--resume"]) == 0
    here, stored = (json.loads((tmp_path / name / "summary.json").read_text()) for name in ("here", "stored"))
    assert stored["samples"] == here["samples"]
    assert stored["test"] == here["test"]
    capsys.readouterr()
    for name, data in (("here", str(folder)), ("stored", store.address("clicks"))):
        assert evaluate([str(tmp_path / name), "--data", data]) == 0
        scores = str(tmp_path / f"{name}.parquet")
        assert predict([str(tmp_path / name), "--data", data, "--out", scores]) == 0
    assert pq.read_table(tmp_path / "stored.parquet").equals(pq.read_table(tmp_path / "here.parquet"))
