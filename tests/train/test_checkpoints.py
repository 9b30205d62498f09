import os
import re
import signal

import pytest
import torch

from meshrec.checkpoint import CheckpointError, CheckpointManager, read_manifest
from meshrec.train import RunFolder, Trainer, join
from meshrec.train.observers import Reported, Stepped
from meshrec.train.stopping import StopRequest
from tests.train.small import small as small_recipe


def trainer(recipe, folder=None, **options):
    return Trainer(recipe, recipe.data.load(), join("cpu"), folder=folder, **options)


def weights(each):
    return {name: tensor.clone() for name, tensor in each.built.model.state_dict().items()}


def stop_at(step):
    stop = StopRequest()

    def observer(event):
        if isinstance(event, Stepped) and event.step == step:
            stop.signal = 15

    return {"stop": stop, "observer": observer}


@pytest.fixture(scope="module")
def whole_run():
    """Return the recipe of an undisturbed run, its trainer, and its validation metrics."""
    recipe = small_recipe(epochs=2, checkpoint_every=4)
    whole = trainer(recipe)
    return recipe, whole, whole.run()


# In the first epoch and at its end; with MESHREC_THOROUGH before the first checkpoint and
# in the second epoch, too.
STEPS = [7, 10, 1, 13] if "MESHREC_THOROUGH" in os.environ else [7, 10]


@pytest.mark.parametrize("step", STEPS)
def test_a_run_that_was_stopped_goes_on_at_the_exact_sample(tmp_path, whole_run, step):
    recipe, whole, expected = whole_run
    folder = RunFolder(tmp_path)
    first = trainer(recipe, folder, **stop_at(step))
    assert not first.resume()
    first.run()
    assert first.stopped
    second = trainer(recipe, folder)
    assert second.resume()
    assert second.progress.step == step
    assert second.progress.position.sample == step * 100 % 1000
    assert second.run() == expected
    for name, value in weights(whole).items():
        assert torch.equal(value, weights(second)[name]), name
    assert [line["step"] for line in folder.metrics()] == []  # nobody wrote them here
    third = trainer(recipe, folder)
    assert third.resume()
    assert third.progress.step == 20
    assert third.run() == expected


def stop_one_rank_and_go_on(recipe, path, step):
    expected_trainer = trainer(recipe)
    expected = expected_trainer.run()
    folder = RunFolder(path)
    stop = StopRequest()

    def observer(event):  # of the first rank alone: the others get no signal
        if isinstance(event, Stepped) and event.step == step:
            os.kill(os.getpid(), signal.SIGINT)

    first = trainer(recipe, folder, stop=stop, observer=observer)
    assert first._steps.step.is_pipelined
    with stop.listening():
        first.run()
    assert first.stopped
    assert step <= first.progress.step <= step + 1
    second = trainer(recipe, folder)
    assert second.resume()
    assert second.progress.step == first.progress.step
    samples = recipe.training.batch_size * recipe.training.accumulate
    assert second.progress.position.sample == first.progress.step * samples % 1000
    assert second.run() == expected
    found = second.built.model.state_dict()
    for name, value in expected_trainer.built.model.state_dict().items():
        local = [each.to_local() if hasattr(each, "to_local") else each for each in (value, found[name])]
        tensors = [each.local_shards() if hasattr(each, "local_shards") else [each] for each in local]
        assert all(map(torch.equal, *tensors)), name


@pytest.mark.parametrize(("step", "accumulate"), [(3, 1), (9, 1), (2, 2)])
def test_batches_in_flight_are_read_again(ranks, tmp_path, small, step, accumulate):
    """With one batch on its way and one more read, after Ctrl-C: in an epoch, at its end, in groups."""
    recipe = small(epochs=2, checkpoint_every=4, accumulate=accumulate)
    ranks(2).run(stop_one_rank_and_go_on, recipe, tmp_path, step)


def test_how_often_and_how_many(tmp_path, small):
    folder = RunFolder(tmp_path)
    trainer(small(epochs=2, checkpoint_every=6, keep_checkpoints=2), folder).run()
    checkpoints = CheckpointManager(folder.path / "checkpoints")
    assert checkpoints.steps() == [18, 20]
    manifest = read_manifest(checkpoints.path(18))
    assert set(manifest.values) == {
        "model",
        "table_optimizer",
        "dense_optimizer",
        "progress",
        "early_stopping",
    }
    assert set(manifest.plans) == {"model"}


def test_a_full_disk_does_not_end_the_run(tmp_path, small, monkeypatch):
    folder = RunFolder(tmp_path)
    events = []
    each = trainer(small(epochs=1, checkpoint_every=4), folder, observer=events.append)

    def full(*_):
        raise CheckpointError("saving failed: OSError: No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(CheckpointManager, "async_save", full)
        each.run()
    said = [event.text for event in events if isinstance(event, Reported)]
    assert sum(bool(re.match("no checkpoint was saved: .*No space left", text)) for text in said) == 2
    assert os.listdir(folder.path / "checkpoints") == ["step-0000000010"]
