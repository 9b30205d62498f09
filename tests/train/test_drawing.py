"""Models that draw from Python's and NumPy's generators: seeded by the run, and resumed with it."""

import os
import random
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import nn

from meshrec.train import DLRMConfig, RunFolder, Trainer, join
from meshrec.train.observers import Stepped
from meshrec.train.stopping import StopRequest


class Drawing(nn.Module):
    """Multiplies logits by numbers that it draws, as user code that augments data does."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.built_with = inner, (random.random(), float(np.random.rand()))

    def forward(self, dense, sparse):
        return self.inner(dense, sparse) * (0.5 + random.random()) * (0.5 + np.random.rand())


@dataclass(frozen=True, kw_only=True)
class DrawingConfig(DLRMConfig):
    """A DLRM inside a model that draws."""

    def build(self, dataset):
        return Drawing(super().build(dataset))


def drawing(recipe):
    model = DrawingConfig(embedding_dim=8, bottom=(8,), top=(8,))
    return replace(recipe, model=model)


def trainer(recipe, folder=None, **options):
    return Trainer(recipe, recipe.data.load(), join("cpu"), folder=folder, **options)


def weights(each):
    """Every element that this rank holds."""
    state = each.built.model.state_dict().values()
    local = [value.to_local() if hasattr(value, "to_local") else value for value in state]
    parts = [value.local_shards() if hasattr(value, "local_shards") else [value] for value in local]
    return [part.clone() for values in parts for part in values]


def train_and_resume(recipe, path, step):
    """What the ranks drew at first; raises where a resumed run is not the undisturbed one."""
    recipe, stop = drawing(recipe), StopRequest()
    whole = trainer(recipe)
    begins_with = (random.random(), float(np.random.rand()))
    whole.run()

    def observer(event):
        if isinstance(event, Stepped) and event.step == step:
            stop.signal = 15

    random.seed(99)  # an earlier run of this process counts for nothing
    first = trainer(recipe, RunFolder(path), stop=stop, observer=observer)
    assert (random.random(), float(np.random.rand())) == begins_with
    first = trainer(recipe, RunFolder(path), stop=stop, observer=observer)
    random.random()
    np.random.rand()  # as the undisturbed run did
    first.run()
    assert first.stopped
    second = trainer(recipe, RunFolder(path))
    assert second.resume()
    second.run()
    assert all(map(torch.equal, weights(whole), weights(second)))
    model = whole.built.model
    return begins_with, getattr(model, "module", model).built_with


@pytest.mark.parametrize("step", [3, 10] if "MESHREC_THOROUGH" in os.environ else [3])
def test_a_resumed_run_draws_what_an_undisturbed_one_does(tmp_path, small, step):
    python, numpy = random.getstate(), np.random.get_state()
    try:
        train_and_resume(small(epochs=2, checkpoint_every=4), tmp_path, step)
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def test_ranks_build_with_the_same_numbers_and_train_with_their_own(ranks, tmp_path, small):
    first, second = ranks(2).run(train_and_resume, small(epochs=1, checkpoint_every=4), tmp_path, 5)
    assert first[1] == second[1]
    assert first[0] != second[0]
