"""The recipe of the ranker, on generated impressions in order of time."""

from dataclasses import replace

import numpy as np
import pytest

from meshrec.data.synthetic_impressions import synthetic_impressions
from meshrec.train import HSTURankerConfig, Placement, SyntheticImpressions, Trainer, join, resolve

SMALL = SyntheticImpressions(num_users=60, num_items=40, longest=20, history=8)


def small(placement, **training):
    recipe = resolve("hstu_ranker")
    steps = {"batch_size": 32, "max_steps": 6, "evaluate_every": None, **training}
    return replace(
        recipe,
        data=SMALL,
        model=HSTURankerConfig(embedding_dim=8, width=16, num_heads=2, num_blocks=2, dropout=0.0),
        placement=placement,
        training=replace(recipe.training, **steps),
    )


def trained(recipe):
    trainer = Trainer(recipe, recipe.data.load(), join("cpu"))
    trainer.run()
    return trainer.validation


def test_data_comes_in_order_of_time_and_has_eleven_tables():
    dataset = SMALL.load()
    assert len(dataset.tables(8)) == 11
    last = 0
    for reader in (dataset.train, dataset.validation, dataset.test):
        for batch in reader.batches(64):
            times = batch.sparse["times"]
            own = times.values()[times.offsets()[1:] - 1]
            assert (own.diff() >= 0).all()
            assert own[0] >= last
            last = int(own[-1])
    assert 0.6 < dataset.best_auc < 0.95


def test_a_history_holds_what_the_user_did_before():
    dataset = synthetic_impressions(num_users=3, num_items=9, longest=30, history=4)
    samples = [
        batch for reader in (dataset.train, dataset.validation, dataset.test) for batch in reader.batches(1)
    ]
    seen = {}
    for batch in samples:
        bags = {name: each.values().tolist() for name, each in batch.sparse.to_dict().items()}
        past = seen.setdefault(bags["user"][0], [])
        kept = list(zip(bags["history_item"], bags["history_action"], bags["times"], strict=False))
        assert kept == past[-4:]
        past.append((bags["item"][0], int(batch.labels[0]), bags["times"][-1]))


def test_sizes_are_checked():
    with pytest.raises(ValueError, match=r"longest 1.*2"):
        synthetic_impressions(longest=1)
    dataset = SMALL.load()
    with pytest.raises(ValueError, match="sequence"):
        HSTURankerConfig().build(replace(dataset, features=dataset.features[:6]))


def test_ranks_and_plans_train_alike(ranks):
    (alone,) = (trained(small(Placement(sharded=False))),)
    placement = Placement(sharding_types=("row_wise",))
    for balance in (True, False):
        for found in ranks(2).run(trained, small(placement, balance=balance)):
            assert found == pytest.approx(alone, rel=1e-4)
    assert np.isfinite([*alone.values()]).all()
