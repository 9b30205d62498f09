"""Whatever plan and number of ranks saved, any other loads: the same bits, and the same training from there
on.

Every plan meets every plan, and every number of ranks every number, though not all four in every combination;
``MESHREC_THOROUGH=1 pytest tests/checkpoint/test_matrix.py`` has these too.
"""

import importlib.util
import os
from pathlib import Path

import pytest
import torch

from meshrec import checkpoint, fuse

_spec = importlib.util.spec_from_file_location("checkpoint_models", Path(__file__).parent / "models.py")
models = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(models)

WORLDS = [1, 2, 4]
STEPS, MORE = range(2), range(2, 4)


def state_of_both(trainees):
    """Models under both optimizers as one state, so that one checkpoint carries both."""
    return {
        f"{optimizer}_{entry}": item
        for optimizer, trainee in trainees.items()
        for entry, item in models.state_of(*trainee).items()
    }


def values_of_both(trainees):
    return {
        f"{optimizer}.{name}": value
        for optimizer, trainee in trainees.items()
        for name, value in models.whole_state(*trainee).items()
    }


def unsharded(folder):
    """Trains without any sharding, saves, trains on; the truth before and after."""
    trainees = {}
    for optimizer, spec in models.SPECS.items():
        model = fuse(models.Model(), optimizer=spec)
        trainees[optimizer] = (model, torch.optim.Adam(model.over.parameters(), lr=0.01))
    for trainee in trainees.values():
        models.train(*trainee, STEPS)
    checkpoint.save(folder / "unsharded", state_of_both(trainees))
    before = values_of_both(trainees)
    for trainee in trainees.values():
        models.train(*trainee, MORE)
    return before, values_of_both(trainees)


def save_under(kind, folder):
    """Loads the unsharded checkpoint into a plan, and saves it from there."""
    trainees = {optimizer: models.make(kind, optimizer) for optimizer in models.SPECS}
    state = state_of_both(trainees)
    checkpoint.load(folder / "unsharded", state)
    world_size = models.default_env().world.size
    checkpoint.save(folder / f"{kind}-{world_size}", state)


def load_all(kind, folder, before):
    """Loads every checkpoint into one plan; what is not what was saved, and the state some steps later."""
    trainees = {optimizer: models.make(kind, optimizer) for optimizer in models.SPECS}
    state = state_of_both(trainees)
    wrong = []
    for path in sorted(folder.iterdir()):
        if not meet(path.name, f"{kind}-{models.default_env().world.size}"):
            continue
        for trainee in trainees.values():
            with torch.no_grad():
                for parameter in trainee[0].parameters():
                    parameter.fill_(-1)
        checkpoint.load(path, state)
        wrong += [(path.name, name) for name in models.differences(values_of_both(trainees), before)]
    for trainee in trainees.values():
        models.train(*trainee, MORE)
    return wrong, values_of_both(trainees)


def meet(saver, loader):
    """For each two plans one of nine pairs of worlds: each plan meets all worlds on either side."""
    if saver == "unsharded" or "MESHREC_THOROUGH" in os.environ:
        return True
    (saved_kind, saved_size), (kind, size) = saver.split("-"), loader.split("-")
    left, right = models.KINDS.index(saved_kind), models.KINDS.index(kind)
    worlds = WORLDS.index(int(saved_size)), WORLDS.index(int(size))
    return worlds == ((left + right) % 3, (left + 2 * right) % 3)


def test_all_plans_and_all_worlds_meet():
    names = [(kind, size) for kind in models.KINDS for size in WORLDS]
    met = {(*a, *b) for a in names for b in names if meet("{}-{}".format(*a), "{}-{}".format(*b))}
    for left, right in ((0, 2), (0, 3), (1, 2), (1, 3)):
        wanted = {(a[left % 2], b[right % 2]) for a in names for b in names}
        assert {(each[left], each[right]) for each in met} == wanted


@pytest.fixture(scope="module")
def saved(ranks, made_once):
    def make(folder):
        checkpoints = folder / "checkpoints"
        checkpoints.mkdir(parents=True)
        truth = ranks(1).run(unsharded, checkpoints)[0]
        for world_size in WORLDS:
            for kind in models.KINDS:
                ranks(world_size).run(save_under, kind, checkpoints)
        assert len(list(checkpoints.iterdir())) == len(WORLDS) * len(models.KINDS) + 1
        torch.save(truth, folder / "truth.pt")

    folder = made_once("matrix", make)
    return folder / "checkpoints", *torch.load(folder / "truth.pt")


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("kind", models.KINDS)
def test_every_plan_loads_what_every_plan_saved(ranks, saved, kind, world_size):
    folder, before, after = saved
    for wrong, values in ranks(world_size).run(load_all, kind, folder, before):
        assert wrong == []
        for name, value in values.items():
            torch.testing.assert_close(
                torch.as_tensor(value), torch.as_tensor(after[name]), rtol=1e-5, atol=1e-6, msg=name
            )
