import errno
import os
import shutil

import pytest

from meshrec.planner.measured import PhaseTime, read_phases, write_phases
from meshrec.train.run_folder import CONFIG, RunFolder, all_runs, find_run, flatten, new_run, to_json


def started(folder: RunFolder) -> RunFolder:
    folder.write_json(CONFIG, {})
    return folder


def test_runs_are_numbered_and_found(tmp_path):
    first, second = (started(new_run(None, "small", tmp_path)) for _ in range(2))
    assert [first.path.name, second.path.name] == ["small-001", "small-002"]
    assert new_run(None, "small", tmp_path, resume=True) == second
    assert {run.path.name for run in all_runs(tmp_path)} == {"small-001", "small-002"}
    assert find_run("small-001", tmp_path) == find_run(first.path) == first


def test_a_folder_without_room_for_its_mark_is_not_left(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr("meshrec.train.run_folder.mark", full)
    for name in ("mine", None):
        with pytest.raises(ValueError, match="no space"):
            new_run(name, "small", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_names_are_not_taken_twice(tmp_path):
    mine = started(new_run("mine", "small", tmp_path))
    assert new_run("mine", "small", tmp_path, resume=True) == mine
    with pytest.raises(ValueError, match="--name"):
        new_run("mine", "small", tmp_path)
    with pytest.raises(ValueError, match="resume"):
        new_run("other", "small", tmp_path, resume=True)
    with pytest.raises(ValueError, match="resume"):
        new_run(None, "large", tmp_path, resume=True)
    with pytest.raises(ValueError, match=r"'other'.*--runs"):
        find_run("other", tmp_path)


@pytest.mark.parametrize("name", ["../mine", "mine/", "/tmp/mine", "..", ""])
def test_a_name_is_no_path(tmp_path, name):
    with pytest.raises(ValueError, match="--runs"):
        new_run(name, "small", tmp_path / "runs")


def test_a_folder_that_is_not_a_run_is_refused_with_what_is_in_it(tmp_path):
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "thesis.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"thesis.txt"):
        new_run("project", "small", tmp_path)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ValueError, match="folder"):
        new_run("file", "small", tmp_path)
    (tmp_path / "small-001").write_text("mine")
    assert new_run(None, "small", tmp_path).path.name == "small-002"


def test_a_start_that_was_killed_is_started_again_and_its_copy_is_not(tmp_path):
    new_run("killed", "small", tmp_path).log(0).write_text("")
    shutil.copytree(tmp_path / "killed", tmp_path / "copy")
    assert new_run("killed", "small", tmp_path).path.name == "killed"
    with pytest.raises(ValueError, match=r"log_rank0.txt"):
        new_run("copy", "small", tmp_path)
    (tmp_path / "empty").mkdir()
    assert new_run("empty", "small", tmp_path) == new_run("empty", "small", tmp_path)


@pytest.mark.parametrize("name", [None, "mine"])
def test_a_folder_that_cannot_be_made(tmp_path, name):
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(ValueError, match="--runs"):
        new_run(name, "small", tmp_path / "runs")


def test_metrics_survive_a_cut_and_a_return(tmp_path):
    folder = RunFolder(tmp_path)
    assert folder.metrics() == []
    for step in (1, 2, 3):
        folder.append_metrics({"step": step})
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 4, "\xff": 1}\n{"step": 4, "lo')
    assert [line["step"] for line in folder.metrics()] == [1, 2, 3]
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n')
    for kind in ("validation", "test"):
        folder.append_metrics({"step": 2, "kind": kind})
    folder.remove_lines_after(2, evaluated=True)
    kept = [{"step": 1}, {"step": 2}]
    assert folder.metrics() == [*kept, {"step": 2, "kind": "validation"}]
    write_phases(folder.phases, [PhaseTime("dense", 0, 0.5, step) for step in (1, 2, 3)])
    with folder.phases.open("a") as file:
        file.write('{"phase": "de')
    folder.remove_lines_after(2, evaluated=False)
    assert folder.metrics() == kept
    assert [time.step for time in read_phases(folder.phases)] == [1, 2]
    assert not folder.whole_phases.exists()


def test_a_recipe_as_json(small):
    config = to_json(small())
    assert config["tables"] == config["tables"] | {"type": "RowWiseAdagrad", "lr": 0.1}
    assert dict(flatten(config))["training.batch_size"] == 100


def test_a_sealed_file_that_was_changed_is_named(tmp_path):
    folder = RunFolder(tmp_path)
    config = {"recipe": {"lr": 0.1, "rows": {3: 1, 20: 2}}}
    folder.write_json(CONFIG, config, seal=True)
    sound = (tmp_path / CONFIG).read_text()
    assert folder.read_json(CONFIG) == {"recipe": {"lr": 0.1, "rows": {"3": 1, "20": 2}}}
    (tmp_path / CONFIG).write_text(sound.replace("0.1", "0.5"))
    with pytest.raises(ValueError, match=r"config.json.*'crc32'"):
        folder.read_json(CONFIG)
    (tmp_path / CONFIG).write_text(sound[:-20])
    with pytest.raises(ValueError, match=r"config.json.*config.json.*JSON"):
        folder.read_json(CONFIG)
    (tmp_path / CONFIG).unlink()
    os.mkfifo(tmp_path / CONFIG)
    with pytest.raises(ValueError, match=r"config.json"):
        folder.read_json(CONFIG)
