"""A run whose checkpoints are in a store goes on on another host, by its name or by the ID of its launch."""

import pytest

from meshrec.checkpoint.stored import ObjectStore
from meshrec.cli.train import main
from meshrec.runs.host_folder import LAUNCH_VARIABLE
from meshrec.train.run_folder import RunFolder
from meshrec.train.stored_run import find_launched_run

RECIPE = "tests/train/small.py:small"


def trained(tmp_path, host, *options):
    words = [RECIPE, "--quiet", "--runs", str(tmp_path / host), "--out", f"file://{tmp_path}/store"]
    assert main([*words, "--name", "mine", "--training.checkpoint-every", "10", *options]) == 0
    return RunFolder(tmp_path / host / "mine")


def test_a_run_moves_to_another_host(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    run = trained(tmp_path, "one", "--training.max-steps", "5")
    assert not (run.path / "checkpoints").exists() or not list((run.path / "checkpoints").iterdir())
    weights = (run.read_json("summary.json") or {})["checkpoints"]["weights"]
    assert weights is not None  # brought back for the commands that follow
    assert weights.startswith(str(run.path))
    names = ObjectStore(f"file://{tmp_path}/store/mine").names()
    assert {name.partition("/")[0] for name in names} == {"best", "checkpoints", "run"}
    moved = trained(tmp_path, "other", "--resume", "--training.max-steps", "10")
    config = moved.read_json("config.json")
    assert [start["from_step"] for start in config["starts"]] == [0, 5]
    steps = [line["step"] for line in moved.metrics() if line["kind"] == "train"]
    assert steps[0] == 5
    assert steps[-1] == 10


def test_the_run_of_a_launch_is_found_behind_damaged_files(tmp_path):
    store = ObjectStore(f"file://{tmp_path}")
    files = {"a": b'\xff{"id": "x"}', "b": b"{", "c": b"[]", "d": b'{"id": "x"}', "e": b'{"id": "y"}'}
    for name, content in files.items():
        path = tmp_path / name / "run" / "launch.json"
        path.parent.mkdir(parents=True)
        path.write_bytes(content)
    assert find_launched_run("x", "launch.json", store) == "d"
    assert find_launched_run("z", "launch.json", store) is None


def test_deltas_need_a_folder(tmp_path):
    with pytest.raises(ValueError, match="publish_every"):
        trained(tmp_path, "one", "--training.publish-every", "5")
    assert LAUNCH_VARIABLE == "MESHREC_LAUNCH"


def test_one_place(tmp_path):
    with pytest.raises(ValueError, match="place"):
        main([RECIPE, "--runs", str(tmp_path / "a"), "--out", str(tmp_path / "b")])
