"""Bytes flipped and files cut at random places: each is detected, none loads silently."""

import importlib.util
import logging
import os
import random
from pathlib import Path

import pytest

from meshrec.checkpoint import CheckpointManager, DamagedCheckpointError, read_manifest, verify_data

_spec = importlib.util.spec_from_file_location("checkpoint_models", Path(__file__).parent / "models.py")
models = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(models)

NUM_PLACES = 200 if "MESHREC_THOROUGH" in os.environ else 60


def damage(path, rng):
    """Flips some bits of one byte, or cuts the file off; what was there before."""
    whole = path.read_bytes()
    place = rng.randrange(len(whole))
    if rng.random() < 0.7:
        flipped = bytes([whole[place] ^ rng.randrange(1, 256)])
        path.write_bytes(whole[:place] + flipped + whole[place + 1 :])
    else:
        path.write_bytes(whole[:place])
    return whole


def verified(path):
    verify_data(path, read_manifest(path))


def save_two(folder):
    model, optimizer = models.make("mix", "adam")
    checkpoints = CheckpointManager(folder)
    for step in (1, 2):
        models.train(model, optimizer, [step])
        checkpoints.save(step, {**models.state_of(model, optimizer), "step": step})


def test_damage_at_random_places(ranks, tmp_path, caplog):
    ranks(2).run(save_two, tmp_path)
    checkpoints = CheckpointManager(tmp_path)
    model, optimizer = models.make("tw", "adam")
    state = {**models.state_of(model, optimizer), "step": None}
    newest = checkpoints.path(2)
    files = sorted(newest.iterdir())
    assert len(files) == 3
    rng = random.Random(0)
    for number in range(NUM_PLACES):
        path = files[number % len(files)]
        whole = damage(path, rng)
        caplog.clear()
        with caplog.at_level(logging.WARNING, "meshrec"):
            # One process that wants everything but the other rank's random numbers reads every file.
            with pytest.raises(DamagedCheckpointError):
                verified(newest)
            loaded = checkpoints.load_latest(state)
        path.write_bytes(whole)
        if loaded == 2:
            # Only what nobody has asked for may be damaged: the random numbers of rank 1.
            assert not caplog.text
            assert in_random_numbers(newest, path, whole, number), (path, number)
        else:
            assert (loaded, state["step"]) == (1, 1)
            assert newest.name in caplog.text
    verified(newest)


def in_random_numbers(folder, path, whole, number):
    """Whether the damage of this number lies in the random numbers of rank 1."""
    rng = random.Random(0)
    files = sorted(folder.iterdir())
    for each in range(number + 1):
        size = len(files[each % len(files)].read_bytes())
        place = rng.randrange(size)
        if rng.random() < 0.7:
            rng.randrange(1, 256)
    manifest = read_manifest(folder)
    return any(
        piece.start <= place < piece.start + size_of(record)
        for name, record in manifest.tensors.items()
        if name.startswith("random.1.")
        for piece in record.pieces
        if manifest.files[piece.file].name == path.name
    )


def size_of(record):
    return record.num_bytes
