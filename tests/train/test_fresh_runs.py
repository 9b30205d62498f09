"""What servers follow stays right where training is killed, goes on from before, and goes on otherwise.

``MESHREC_THOROUGH`` draws four lives of a run in place of one.
"""

import os
import random
from dataclasses import replace

import pytest
import torch

from meshrec.checkpoint import CheckpointManager, DeltaPublisher, load
from meshrec.modules.embedding_modules import TableCollection
from meshrec.serve.fresh import Deltas, apply_deltas
from meshrec.train import RunFolder, Trainer, join
from meshrec.train.observers import Stepped
from meshrec.train.progress import origin_of


class Killed(Exception):
    """In place of a signal."""


class Package:
    """Weights of a checkpoint, and the deltas that they follow."""

    def __init__(self, recipe, checkpoint, folder, dataset=None):
        model = recipe.model.build(dataset or recipe.data.load())
        for child in model.modules():
            if isinstance(child, TableCollection):
                child.to_empty(device=torch.device("cpu"))
        load(checkpoint, {"model": model})
        self.about = {"run": folder.path.name, **origin_of(checkpoint)}
        self.weights = {name: tensor.detach() for name, tensor in model.named_parameters()}
        self.deltas = Deltas(folder.path / "deltas", self.about, self.weights)

    def is_the_model(self, model) -> bool:
        apply_deltas(self.deltas)
        assert self.deltas.freshness.reason == ""
        named = dict(model.named_parameters())
        return all(torch.equal(weight, named[name].detach().cpu()) for name, weight in self.weights.items())


def draw(small, rng):
    """Return a recipe of 2 epochs with 20 steps each, before batches are accumulated."""
    every = {name: rng.choice([2, 3, 4, 5, 7]) for name in ("checkpoint_every", "publish_every")}
    recipe = small(
        epochs=2,
        keep_checkpoints=rng.choice([1, 3]),
        evaluate_every=rng.choice([3, 4]),
        accumulate=rng.choice([1, 2]),
        batch_size=20,
        **every,
    )
    return replace(recipe, data=replace(recipe.data, num_samples=400, num_validation=200, num_test=100))


class Life:
    """A run whose training is killed and goes on, and all that was ever exported of it."""

    def __init__(self, recipe, folder, rng):
        self.recipe, self.folder, self.rng, self.packages, self.num_compared = recipe, folder, rng, {}, 0

    def train(self, kill):
        """From the last checkpoint to the end of the step ``kill``, or of the run."""

        def observer(event):
            trainer.saver.wait()  # which may take an older one away
            self.export()
            if isinstance(event, Stepped) and event.step == kill:
                raise Killed

        trainer = Trainer(
            self.recipe, self.recipe.data.load(), join("cpu"), folder=self.folder, observer=observer
        )
        trainer.resume()
        try:
            trainer.run()
        except Killed:
            trainer.saver.wait()

    def export(self):
        for name in ("checkpoints", "best"):
            found = CheckpointManager(self.folder.path / name).latest()
            if found is not None and self.rng.random() < 0.5:
                key = (found, origin_of(found)["published"])
                self.packages.setdefault(key, Package(self.recipe, found, self.folder))

    def published(self, model):
        for package in self.packages.values() if self.rng.random() < 0.7 else ():
            assert package.is_the_model(model), package.about
            self.num_compared += 1


@pytest.mark.parametrize("seed", range(4 if "MESHREC_THOROUGH" in os.environ else 1))
def test_a_server_has_the_weights_of_training_whatever_happens_to_it(small, tmp_path, monkeypatch, seed):
    rng = random.Random(seed)
    life = Life(draw(small, rng), RunFolder(tmp_path), rng)
    write = DeltaPublisher.publish

    def publish(self, step, **options):
        before = self.last
        write(self, step, **options)
        if self.last != before:
            life.published(self._model)

    monkeypatch.setattr(DeltaPublisher, "publish", publish)
    for kill in (rng.randrange(2, 15), rng.randrange(2, 30), None):
        life.train(kill)
        # Other rows than before.
        life.recipe = replace(life.recipe, data=replace(life.recipe.data, seed=rng.randrange(2)))
    assert life.num_compared > 5
    last = Package(life.recipe, CheckpointManager(tmp_path / "checkpoints").latest(), life.folder)
    for package in life.packages.values():
        apply_deltas(package.deltas)
        for name, weight in last.weights.items():
            assert torch.equal(package.weights[name], weight), (package.about, name)
