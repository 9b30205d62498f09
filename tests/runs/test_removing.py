"""Of a run's folder, only files that MeshRec wrote are deleted."""

import shutil

import pytest
import torch

from meshrec.checkpoint import CheckpointManager
from meshrec.runs.removing import remove_run, remove_unstarted
from meshrec.train.run_folder import CONFIG, RunFolder, new_run


def started(path, **config):
    """Return a run that has ended, with a checkpoint and a delta."""
    folder = new_run(path.name, "small", path.parent)
    folder.write_json(CONFIG, {"recipe": {"name": "small", "data": {}, "model": {}}, **config}, seal=True)
    folder.write_state("finished")
    for name in ("checkpoints", "best"):
        CheckpointManager(path / name).save(1, {"a": torch.ones(2)})
    (path / "deltas").mkdir()
    names = ("00000001.json", "00000001.rows.safetensors", "00000001.dense.safetensors")
    # The last one as a kill leaves it.
    for name in (*names, ".00000002.json.0123456789abcdef"):
        (path / "deltas" / name).write_text("")
    for name in ("log_rank0.txt", "metrics.jsonl", "report.html", "events.out.tfevents.1.host.2.0"):
        (path / name).write_text("")
    (path / "source" / "package").mkdir(parents=True)
    for name in ("recipe.py", "package/part.py"):
        (path / "source" / name).write_text("")
    return folder


CODE = {"code": {"files": {"recipe.py": "", "package/part.py": "", "../../outside.py": ""}}}


def test_a_run_is_removed_whole(tmp_path):
    (tmp_path / "outside.py").write_text("")
    assert remove_run(started(tmp_path / "runs" / "a", **CODE)) == []
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["outside.py", "runs"]


def test_files_of_the_user_in_a_run_stay_and_are_named(tmp_path):
    folder = started(tmp_path / "a", **CODE)
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "step-0000000001").mkdir()
    (tmp_path / "far" / "step-0000000001" / "kept").write_text("")
    mine = [
        *("notes.txt", ".config.json.123", "data-a.safetensors", "log_rank0.txt.bak", "source/mine.py"),
        *("checkpoints/step-0000000001/notes", "checkpoints/readme", "deltas/mine.json"),
    ]
    for name in mine:
        (folder.path / name).write_text("of the user")
    shutil.rmtree(folder.path / "best")
    (folder.path / "best").symlink_to(tmp_path / "far")
    kept = remove_run(folder)
    assert kept == sorted({"best", *(name.split("/")[0] for name in mine)})
    assert {(folder.path / name).read_text() for name in mine} == {"of the user"}
    files = [path for path in folder.path.rglob("*") if path.is_file()]
    assert len(files) == len(mine)
    assert (tmp_path / "far" / "step-0000000001" / "kept").exists()


def test_of_a_link_to_a_run_the_link_is_removed(tmp_path):
    folder = started(tmp_path / "a")
    (tmp_path / "b").symlink_to(folder.path)
    assert remove_run(RunFolder(tmp_path / "b")) == []
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert (folder.path / CONFIG).exists()


def test_links_below_the_copy_of_the_source_are_not_followed(tmp_path):
    (tmp_path / "mine" / "empty").mkdir(parents=True)
    (tmp_path / "mine" / "part.py").write_text("of the user")
    names = ["far/part.py", "far/empty/part.py", "package/../../../mine/part.py", f"{tmp_path}/mine/part.py"]
    folder = started(tmp_path / "a", code={"files": dict.fromkeys([*names, "package/part.py"], "")})
    (folder.path / "source" / "far").symlink_to(tmp_path / "mine")
    assert remove_run(folder) == ["source"]
    assert sorted(path.name for path in (tmp_path / "mine").iterdir()) == ["empty", "part.py"]
    assert sorted(path.name for path in (folder.path / "source").iterdir()) == ["far", "recipe.py"]


def test_a_start_that_failed_in_a_linked_folder_leaves_it_empty(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "a").symlink_to(tmp_path / "disk")
    folder = new_run("a", "small", tmp_path)
    folder.log(0).write_text("")
    remove_unstarted(folder)
    assert list((tmp_path / "disk").iterdir()) == []
    assert (tmp_path / "a").is_symlink()


def test_a_copied_run_is_one_and_a_model_with_a_config_is_none(tmp_path):
    shutil.copytree(started(tmp_path / "a", **CODE).path, tmp_path / "b")
    assert remove_run(RunFolder(tmp_path / "b")) == []
    (tmp_path / "model").mkdir()
    for config in ('{"architectures": ["Bert"]}', '{"recipe": "cake"}', '{"recipe": {"name": "cake"}}'):
        (tmp_path / "model" / CONFIG).write_text(config)
        (tmp_path / "model" / "state.json").write_text("{}")
        with pytest.raises(ValueError, match="model"):
            remove_run(RunFolder(tmp_path / "model"))
    with pytest.raises(ValueError, match="resume"):
        new_run("model", "small", tmp_path, resume=True)
    assert len(list((tmp_path / "model").iterdir())) == 2


def test_a_running_run_stays(tmp_path):
    folder = started(tmp_path / "a")
    folder.write_state("running")
    with pytest.raises(ValueError, match="running"):
        remove_run(folder)


def test_a_start_that_failed_leaves_no_folder(tmp_path):
    folder = new_run("a", "small", tmp_path)
    folder.log(0).write_text("")
    folder.error(0).write_text("")
    folder.write_json("features.json", {})
    (folder.path / "features.arrow").write_bytes(b"")
    (folder.path / f".features.arrow.{'0' * 16}").write_bytes(b"")  # of a process that was killed
    remove_unstarted(folder)
    assert list(tmp_path.iterdir()) == []
    remove_unstarted(folder)


def test_a_start_that_failed_leaves_what_it_did_not_create(tmp_path):
    (tmp_path / "empty").mkdir()
    for name in ("empty", "new"):
        folder = new_run(name, "small", tmp_path)
        folder.log(0).write_text("")
        if name == "new":
            (folder.path / "notes").write_text("")
        remove_unstarted(folder)
    assert sorted(path.name for path in tmp_path.rglob("*") if path.name[0] != ".") == [
        "empty",
        "new",
        "notes",
    ]
    with pytest.raises(ValueError, match="holds"):
        new_run("new", "small", tmp_path)
    unknown = tmp_path / "unknown"
    unknown.mkdir()
    (unknown / "log_rank0.txt").write_text("")
    remove_unstarted(RunFolder(unknown))
    assert (unknown / "log_rank0.txt").exists()
