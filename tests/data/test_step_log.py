"""The log of steps: what is in it after a kill, and what is repeated."""

import json
import logging

import pytest

from meshrec.data.faults import DataError
from meshrec.data.step_log import StepLog

POSITIONS = [{"a": [number, 0, 10 * number]} for number in range(6)]


def test_steps_after_a_position_are_repeated(tmp_path):
    path = tmp_path / "steps.jsonl"
    assert StepLog(path).resume({}, 8) == []
    log = StepLog(path)
    log.resume({}, 8)
    log.append(POSITIONS[:2])
    log.append(POSITIONS[2:])
    assert StepLog(path).resume({}, 8) == POSITIONS
    assert StepLog(path).resume(POSITIONS[1], 8) == POSITIONS[2:]
    # Earlier steps are gone now.
    assert len(path.read_text().splitlines()) == 1 + 5
    assert StepLog(path).resume(POSITIONS[5], 8) == []


def test_a_checkpoint_removes_earlier_steps(tmp_path):
    log = StepLog(tmp_path / "steps.jsonl")
    log.resume({}, 8)
    log.append(POSITIONS)
    log.prune(POSITIONS[3])
    log.prune({"a": ["unknown", 0, 0]})
    assert StepLog(tmp_path / "steps.jsonl").resume(POSITIONS[3], 8) == POSITIONS[4:]


def test_an_incomplete_line_is_no_step(tmp_path):
    path = tmp_path / "steps.jsonl"
    log = StepLog(path)
    log.resume({}, 8)
    log.append(POSITIONS)
    for size in range(path.stat().st_size - 1, 0, -1):
        path.write_bytes(path.read_bytes()[:size])
        num_lines = path.read_bytes().count(b"\n")
        copy = tmp_path / "copy.jsonl"
        copy.write_bytes(path.read_bytes())
        assert StepLog(copy).resume({}, 8) == POSITIONS[: max(num_lines - 2, 0)]


@pytest.mark.parametrize(
    ("position", "step_rows", "named"), [(POSITIONS[2], 4, "4"), ({"a": ["?"]}, 8, "steps")]
)
def test_other_steps_are_told_once_and_not_repeated(tmp_path, caplog, position, step_rows, named):
    log = StepLog(tmp_path / "steps.jsonl")
    log.resume({}, 8)
    log.append(POSITIONS)
    with caplog.at_level(logging.WARNING):
        assert StepLog(tmp_path / "steps.jsonl").resume(position, step_rows) == []
    (record,) = caplog.records
    assert named in record.getMessage()


@pytest.mark.parametrize("text", ["no\njson\n", "[]\n{}\n", json.dumps({"a": 1}) + "\n"])
def test_another_file_is_not_overwritten(tmp_path, text):
    path = tmp_path / "notes.txt"
    path.write_text(text)
    with pytest.raises(DataError, match=r"notes\.txt"):
        StepLog(path).resume({}, 8)
    assert path.read_text() == text
