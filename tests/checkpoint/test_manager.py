import logging
import shutil

import pytest
import torch

from meshrec.checkpoint import CheckpointManager, DamagedCheckpointError, manager
from meshrec.checkpoint.manifest import MANIFEST
from meshrec.checkpoint.removing import KIND
from meshrec.durable import mark, release


def value(step):
    return {"a": torch.full((50,), float(step)), "step": step}


def flip(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_the_last_and_every_nth_are_kept(tmp_path):
    checkpoints = CheckpointManager(tmp_path, keep_last=2, keep_every=10)
    assert checkpoints.latest() is None
    assert checkpoints.load_latest(value(0)) is None
    for step in range(5, 40, 5):
        if step % 2:
            checkpoints.save(step, value(step))
        else:
            checkpoints.async_save(step, value(step))
    checkpoints.wait()
    assert checkpoints.steps() == [10, 20, 30, 35]
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step-{s:010d}" for s in (10, 20, 30, 35)]
    assert checkpoints.latest() == checkpoints.path(35)
    state = value(0)
    assert checkpoints.load_latest(state) == state["step"] == 35


def test_what_is_saved_after_going_back_is_kept(tmp_path):
    checkpoints = CheckpointManager(tmp_path, keep_last=1)
    for step in (10, 20):
        CheckpointManager(tmp_path).save(step, value(step))
    flip(next(checkpoints.path(20).glob("data-*")))
    state = value(0)
    assert checkpoints.load_latest(state) == 10
    checkpoints.save(12, value(12))
    assert checkpoints.load_latest(state) == state["step"] == 12
    checkpoints.async_save(14, value(14)).wait()
    assert checkpoints.load_latest(state) == state["step"] == 14
    assert checkpoints.steps() == [14, 20]
    checkpoints.save(20, value(20))
    assert checkpoints.steps() == [20]
    checkpoints.save(15, value(15))
    checkpoints.remove_after(15)
    assert checkpoints.steps() == [15]


def test_damaged_ones_are_named_and_passed_over(tmp_path, caplog):
    checkpoints = CheckpointManager(tmp_path, keep_last=9)
    for step in range(1, 7):
        checkpoints.save(step, value(step))
    data = {step: next(checkpoints.path(step).glob("data-*")) for step in range(1, 7)}
    flip(data[6])
    data[5].write_bytes(data[5].read_bytes()[:-1])
    data[4].unlink()
    flip(checkpoints.path(3) / MANIFEST)
    (checkpoints.path(2) / MANIFEST).unlink()
    state = value(0)
    with caplog.at_level(logging.WARNING):
        assert checkpoints.load_latest(state) == 1
    assert state["a"].eq(1).all()
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert [step for step in range(2, 7) if any(str(checkpoints.path(step)) in line for line in lines)] == [
        2,
        3,
        4,
        5,
        6,
    ]
    assert checkpoints.steps() == [1, 6]


def test_none_loads_silently(tmp_path, caplog):
    checkpoints = CheckpointManager(tmp_path)
    checkpoints.save(1, value(1))
    flip(next(checkpoints.path(1).glob("data-*")))
    with pytest.raises(DamagedCheckpointError, match="nothing"):
        checkpoints.load_latest(value(0))


def test_unfinished_ones_are_removed_by_the_next_save(tmp_path):
    checkpoints = CheckpointManager(tmp_path)
    (tmp_path / "notes").mkdir()
    for step in (2, 3):
        folder = checkpoints.path(step)
        folder.mkdir()
        (folder / "data-0123abcd-00000.safetensors").touch()
    release(mark(folder, KIND, id="0123abcd")[1])
    checkpoints.save(4, value(4))
    assert next(checkpoints.path(2).iterdir()).name == "data-0123abcd-00000.safetensors"  # without a mark
    assert not checkpoints.path(3).exists()
    shutil.rmtree(checkpoints.path(2))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes", checkpoints.path(4).name]


def test_a_failed_background_save_is_told_by_the_next_call(tmp_path, monkeypatch):
    checkpoints = CheckpointManager(tmp_path)
    checkpoints.save(1, value(1))
    monkeypatch.setattr(manager.CheckpointManager, "_remove_old", lambda self, saved: 1 / 0)
    checkpoints.async_save(2, value(2))
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        checkpoints.wait()
    checkpoints.wait()
    assert checkpoints.steps() == [1, 2]


@pytest.mark.parametrize("options", [{"keep_last": 0}, {"keep_every": 0}])
def test_something_must_be_kept(tmp_path, options):
    with pytest.raises(ValueError, match=r"keep_last.*keep_every.*1"):
        CheckpointManager(tmp_path, **options)


def with_ranks(folder):
    checkpoints = CheckpointManager(folder)
    checkpoints.async_save(1, value(1))
    checkpoints.save(2, value(2))
    state = value(0)
    return checkpoints.load_latest(state), state["step"], checkpoints.steps()


def test_ranks_agree(ranks, tmp_path):
    assert ranks(2).run(with_ranks, tmp_path) == [(2, 2, [1, 2])] * 2
