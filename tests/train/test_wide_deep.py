from dataclasses import replace

import pytest
import torch

from meshrec.train import Trainer, WideDeepConfig, join


def test_numbers_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match=r"model\.dropout is 1; it must be in \[0, 1\)"):
        WideDeepConfig(dropout=1)
    with pytest.raises(ValueError, match=r"model\.layers is \(\); it must be one size or more"):
        WideDeepConfig(layers=())
    with pytest.raises(ValueError, match=r"model\.members is 0; it must be at least 1"):
        WideDeepConfig(members=0)


def test_a_lookup_is_pulled_by_how_rarely_a_value_occurs(small):
    dataset = replace(small().data, num_samples=1000).load()
    model = WideDeepConfig(shrinkage=2.0, wide_scale=3.0).build(dataset)
    expected = [2.0 * each.num_embeddings / 1000 / each.average_length for each in dataset.features]
    assert torch.allclose(model.shrink[:, 1], torch.tensor(expected))
    assert torch.allclose(model.shrink[:, 0], 9 * torch.tensor(expected))
    assert not WideDeepConfig().build(dataset).shrinks


@pytest.mark.parametrize("members", [1, 3])
def test_members_learn_and_score_as_one(small, members):
    recipe = replace(small(epochs=4), model=WideDeepConfig(members=members))
    trainer = Trainer(recipe, recipe.data.load(), join("cpu"))
    trainer.run()
    assert trainer.validation["auc"] > 0.6
    scored = next(iter(trainer.predict(trainer.dataset.validation)))
    assert scored.logits_B.dim() == 1
