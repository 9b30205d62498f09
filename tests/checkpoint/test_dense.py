"""Dense weights and their optimizer, split by FSDP2 or whole under DDP: each loads what the other saved."""

import importlib.util
from pathlib import Path

import pytest

from meshrec import checkpoint

_spec = importlib.util.spec_from_file_location("checkpoint_models", Path(__file__).parent / "models.py")
models = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(models)


def saved(dense, folder):
    trainee = models.make("rw", dense=dense)
    models.train(*trainee, range(2))
    checkpoint.save(folder, models.state_of(*trainee))
    return models.whole_state(*trainee)


def loaded(dense, folder, expected):
    trainee = models.make("cw", dense=dense)
    checkpoint.load(folder, models.state_of(*trainee))
    wrong = models.differences(models.whole_state(*trainee), expected)
    models.train(*trainee, range(2, 3))
    return wrong


@pytest.mark.parametrize(("first", "second"), [("fsdp2", "ddp"), ("ddp", "fsdp2"), ("fsdp2", "fsdp2")])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_dense_state_fits_any_split(ranks, tmp_path, first, second, world_size):
    expected = ranks(2).run(saved, first, tmp_path)[0]
    assert ranks(world_size).run(loaded, second, tmp_path, expected) == [[]] * world_size
