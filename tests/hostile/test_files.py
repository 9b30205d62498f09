"""Damaged files of checkpoints: verify and load refuse them, whatever stands in place of a file."""

import random

import pytest
import torch

from meshrec.checkpoint import CheckpointError, load, read_manifest, save, verify_data
from tests.hostile.damage import Tally, harm, number


@pytest.fixture
def folder(tmp_path):
    torch.manual_seed(0)
    save(tmp_path, {"a": torch.rand(50, 8), "b": [torch.arange(5), "text"], "c": 0.5})
    return tmp_path


def check(folder):
    with pytest.raises(CheckpointError):
        verify_data(folder, read_manifest(folder))


def check_load(folder):
    """Loads everything but nothing that the damage touched comes out as another value."""
    state = {"a": None, "b": None, "c": None}
    try:
        load(folder, state)
    except CheckpointError:
        return
    torch.manual_seed(0)
    assert torch.equal(state["a"], torch.rand(50, 8))
    assert torch.equal(state["b"][0], torch.arange(5))
    assert (state["b"][1], state["c"]) == ("text", 0.5)


def test_damaged_files_of_checkpoints(folder):
    tally, draw = Tally("damaged checkpoints"), random.Random(13)
    files = sorted(folder.iterdir())
    sound = {path: path.read_bytes() for path in files}
    while tally.tried < 2 * number(40):
        path = draw.choice(files)
        what, mend = harm(path, draw)
        if path.is_file() and path.stat().st_size == len(sound[path]) and path.read_bytes() == sound[path]:
            mend()
            continue  # the damage was none
        tally.attempt(f"verify, {what}", lambda: check(folder))
        tally.attempt(f"load, {what}", lambda: check_load(folder))
        mend()
    check_sound(folder)
    tally.finish()


def check_sound(folder):
    verify_data(folder, read_manifest(folder))


def test_links_that_lead_in_a_circle(folder):
    for path in sorted(folder.iterdir()):
        content = path.read_bytes()
        path.unlink()
        path.symlink_to(path.name)
        check(folder)
        with pytest.raises(CheckpointError):
            load(folder, {"a": None})
        path.unlink()
        path.write_bytes(content)
    check_sound(folder)
