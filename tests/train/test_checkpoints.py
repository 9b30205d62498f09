import os
import re

import pytest
import torch

from meshrec.checkpoint import CheckpointError, CheckpointManager, read_manifest
from meshrec.train import RunFolder, Trainer, join
from meshrec.train.observers import Said, Stepped
from meshrec.train.stopping import StopRequest


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


@pytest.mark.parametrize("step", [1, 7, 10, 13])
def test_a_run_that_was_stopped_goes_on_at_the_exact_sample(tmp_path, small, step):
    recipe = small(epochs=2, checkpoint_every=4)
    whole = trainer(recipe)
    expected = whole.run()
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
    said = [event.text for event in events if isinstance(event, Said)]
    assert [bool(re.match("no checkpoint was saved: .*No space left", text)) for text in said] == [True, True]
    assert os.listdir(folder.path / "checkpoints") == ["step-0000000010"]
