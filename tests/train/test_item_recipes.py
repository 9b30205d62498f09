"""Recipes that rank items, and those on histories, on made-up movies."""

import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.sparse import csr_matrix

from meshrec import JaggedTensor
from meshrec.data import Feature, Interactions, next_items
from meshrec.metrics.named import quality
from meshrec.model_parallel import get_unwrapped_module
from meshrec.models import evaluate_targets
from meshrec.models.next_item import NO_ITEM, ItemChunk
from meshrec.optim import SGD
from meshrec.train import (
    DenseOptimizer,
    MovieLensSequences,
    NextItem,
    Placement,
    SASRecConfig,
    Schedule,
    Trainer,
    TwoTowerConfig,
    join,
    resolve,
)
from meshrec.train import ranking_baselines as ranking
from meshrec.train.baselines import baselines
from meshrec.train.ranking_baselines import ranking_baselines

NUM_USERS = 30
NEXT_ITEM = ["sasrec", "hstu", "bert4rec", "gru4rec", "two_tower"]
PLAIN = Placement(sharded=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from tests.train.movies import write_movies  # ranks, which run functions of this file, have no tests

    return write_movies(tmp_path_factory.mktemp("ml-circle"))


def small(name, folder, placement=PLAIN, **training):
    recipe = resolve(name)
    steps = {"batch_size": 32, "epochs": 1, "max_steps": 3, "evaluate_every": None, "patience": None}
    return replace(
        recipe,
        data=replace(recipe.data, path=folder),
        model=replace(recipe.model, embedding_dim=8),
        placement=placement,
        training=replace(recipe.training, **{**steps, **training}),
    )


def trained(recipe):
    trainer = Trainer(recipe, recipe.data.load(), join("cpu"))
    trainer.run()
    return trainer


@pytest.mark.parametrize("name", ["din", "deepfm", "dcn", "mmoe", "movielens_dlrm"])
def test_recipes_of_clicks_train(name, folder):
    trainer = trained(small(name, folder))
    assert 0 < trainer.test["auc"] < 1
    assert trainer.progress.step == 3


@pytest.mark.parametrize("name", NEXT_ITEM)
def test_recipes_of_next_items_train_and_rank_all_items(name, folder):
    trainer = trained(small(name, folder))
    assert set(trainer.test) == {
        "loss",
        "mrr",
        *(f"{name}@{k}" for name in ("recall", "ndcg", "mrr") for k in (10, 50, 200)),
    }
    assert quality(trainer.test) == trainer.test["ndcg@10"]


def places(recipe):
    """What an untrained model, the same on any ranks, says of validation data."""
    trainer = Trainer(recipe, recipe.data.load(), join("cpu"))
    return trainer.evaluate(trainer.dataset.validation), list(trainer.predict(trainer.dataset.validation))


@pytest.mark.parametrize("name", NEXT_ITEM)
def test_sharded_models_say_the_same(name, folder, ranks):
    recipe = small(name, folder)
    expected, _ = places(recipe)
    sharded = replace(recipe, placement=Placement(sharding_types=("row_wise",)))
    for found, scored in ranks(2).run(places, sharded):
        assert found == pytest.approx(expected, rel=1e-5)
        assert sum(len(each.logits_B) for each in scored) == NUM_USERS // 2


# Each model, and each kind of negatives with two models. With MESHREC_THOROUGH, all models with all kinds.
TRAINED_ON_TWO_RANKS = {
    "uniform": ["sasrec", "gru4rec"],
    "popular": ["bert4rec", "hstu"],
    "in_batch": ["hstu", "gru4rec"],
    None: ["two_tower"],
}
if "MESHREC_THOROUGH" in os.environ:
    TRAINED_ON_TWO_RANKS |= dict.fromkeys(["uniform", "popular", "in_batch"], NEXT_ITEM[:-1])


def learned(recipes):
    """Validation metrics and weights after a few steps of each recipe."""
    found = []
    for recipe in recipes:
        trainer = trained(recipe)
        state = get_unwrapped_module(trainer.built.model).state_dict()
        weights = {name: getattr(each, "full_tensor", each.clone)() for name, each in state.items()}
        found.append((trainer.validation, weights))
    return found


@pytest.mark.parametrize(
    ("negatives", "rule"), [("uniform", "adam"), ("popular", "sgd"), ("in_batch", "sgd"), (None, "sgd")]
)
def test_training_on_two_ranks_equals_one_process(negatives, rule, folder, ranks):
    """All ranks draw the same negatives and hide the same items, so it does not matter which has a sample.

    Weights are compared with SGD. Adam divides by the size of the gradient, and so makes much of the rounding
    where a gradient is 0 but for that, as those of the biases of keys in a softmax are. The metrics do not
    depend on these.
    """
    recipes = []
    for name in TRAINED_ON_TWO_RANKS[negatives]:
        recipe = small(name, folder, batch_size=8, max_steps=5)
        recipe = replace(recipe, schedule=Schedule())
        if rule == "sgd":
            recipe = replace(recipe, dense=DenseOptimizer(kind="sgd", lr=0.1), tables=SGD(lr=0.1))
        if negatives is not None:
            softmax = replace(recipe.model.softmax, negatives=negatives, num_negatives=20)
            recipe = replace(recipe, model=replace(recipe.model, dropout=0.0, softmax=softmax))
        recipes.append(recipe)
    expected = learned(recipes)
    sharded = [replace(each, placement=Placement(sharding_types=("row_wise",))) for each in recipes]
    for found in ranks(2).run(learned, sharded):
        for (metrics, weights), (alone, weights_alone) in zip(found, expected, strict=True):
            assert metrics == pytest.approx(alone, rel=1e-5)
            assert weights.keys() == weights_alone.keys()
            for name, own in weights_alone.items() if rule == "sgd" else ():
                bound = 1e-5 * float(own.abs().max())
                torch.testing.assert_close(weights[name], own, rtol=1e-5, atol=bound, msg=name)


def check_training(recipes):
    for recipe in recipes:
        found = []
        for pipeline in (True, False):
            each = replace(recipe, training=replace(recipe.training, pipeline=pipeline))
            found.append(trained(each).validation)
        assert found[0] == found[1]


def test_training_on_two_ranks_is_the_same_with_and_without_pipeline(folder, ranks):
    placement = Placement(sharding_types=("row_wise", "data_parallel"))
    recipes = [small(name, folder, placement) for name in (*NEXT_ITEM, "din")]
    ranks(2).run(check_training, recipes)


def test_baselines_rank_as_their_definitions_say(folder):
    dataset = MovieLensSequences(path=folder).load()
    found = {each.name: each.quality["test"] for each in ranking_baselines(dataset)}
    (train,), (test,) = dataset.train.batches(1000), dataset.test.batches(1000)
    (validation,) = dataset.validation.batches(1000)
    ids = dataset.catalogue["item"].values()
    counts = torch.bincount(train.sparse["item"].values(), minlength=int(ids[-1]) + 1)[ids].double()
    had = [{*each.tolist()} for each in validation.sparse["seen"].to_dense()]
    users = torch.stack([torch.tensor([float(item in each) for item in ids.tolist()]) for each in had])
    lengths = users.sum(0).sqrt()
    cosines = (users.T @ users) / (lengths[:, None] * lengths) * (1 - torch.eye(len(ids)))
    follows = torch.zeros(len(ids), len(ids))
    places = {item: place for place, item in enumerate(ids.tolist())}
    for history, targets in zip(*(train.sparse[key].to_dense() for key in ("history", "item")), strict=True):
        for before, after in zip(history.tolist(), targets.tolist(), strict=True):
            follows[places[before], places[after]] += 1
    hits = dict.fromkeys(found, 0.0)
    for target, seen in zip(
        test.sparse["item"].values().tolist(), test.sparse["seen"].to_dense(), strict=True
    ):
        at = [places[item] for item in seen.tolist()]
        scores = {
            "item popularity": counts,
            "item-kNN": cosines[at].sum(0).double() + 1e-9 * counts,
            "last-item Markov chain": follows[at[-1]].double() + 1e-9 * counts,
        }
        left = [place for place in range(len(ids)) if place not in at and place != places[target]]
        for name, score in scores.items():
            own = score[places[target]]
            above, equal = (score[left] > own + 1e-12).sum(), ((score[left] - own).abs() <= 1e-12).sum()
            # The mean over all orders of the target and its ties.
            hits[name] += float(torch.clamp((10 - above) / (equal + 1), 0, 1)) / NUM_USERS
    assert {name: each["recall@10"] for name, each in found.items()} == pytest.approx(hits)


def test_baselines_do_not_depend_on_blocks(folder, monkeypatch, caplog):
    dataset = MovieLensSequences(path=folder).load()
    expected = {baseline.name: baseline.quality["test"] for baseline in ranking_baselines(dataset)}
    for name, size in [("_BLOCK", 300), ("_TRANSITIONS", 1)]:
        monkeypatch.setattr(ranking, name, size)
        for baseline in ranking_baselines(dataset):
            assert baseline.quality["test"] == pytest.approx(expected[baseline.name])
    (validation,) = dataset.validation.batches(1000)
    num_items = [len({*seen.tolist()}) for seen in validation.sparse["seen"].to_dense()]
    monkeypatch.setattr(ranking, "_MAX_PAIRS", sum(num_items[::2]))
    monkeypatch.setattr(ranking, "_BATCH", 3)
    with caplog.at_level("INFO", "meshrec"):
        rows = ranking._BaselineEvaluator(dataset, NextItem(), lambda share: None)._items_of_users()
    assert np.diff(rows.indptr).tolist() == num_items[::2]
    assert f"{len(num_items[::2])} of {len(num_items)} users" in caplog.text


def test_sparse_scores_are_ranked_like_a_whole_matrix():
    random = np.random.default_rng(0)
    ids, num = torch.arange(40) * 3, 60
    # Few different values, so that there are ties; the first samples have no score, and the last no target.
    dense = random.integers(0, 3, (num, 40)) * (random.random((num, 40)) < 0.3) * 1.0
    dense[:5] = 0.0
    prior = torch.from_numpy(random.integers(1, 4, 40) / 64)
    target = ids[random.integers(0, 40, num)]
    target[-1] = NO_ITEM
    lengths = torch.from_numpy(random.integers(0, 6, num))
    seen = JaggedTensor(torch.from_numpy(random.integers(0, 120, int(lengths.sum()))), lengths=lengths)
    for bags in (None, seen):
        found = ranking._SparseRanking(ids.numpy(), prior.numpy()).evaluate(csr_matrix(dense), target, bags)
        scores = torch.from_numpy(dense)
        logs = (scores / scores.sum(1, keepdim=True).clamp(min=1e-300) + prior).log()
        position = (target // 3).clamp(min=0)
        one = torch.eye(num, dtype=torch.float64)
        chunks = iter([ItemChunk(ids, logs.T)])
        expected = evaluate_targets(one, logs[:, position].T, target, chunks, seen=bags)
        assert expected[:, 2].max() > 5
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_own_items_are_baselines_where_users_may_take_an_item_again():
    num_users, baskets = 20, [0, 0, 0, 0, 1, 1, 1]
    users = np.repeat(np.arange(num_users), len(baskets))
    log = Interactions(
        name="repeats",
        offsets=np.arange(num_users + 1) * len(baskets),
        items=2 * users + np.tile(baskets, num_users),
        times=np.tile(np.arange(len(baskets)), num_users),
        rows=np.arange(len(users)),
        num_rows=len(users),
        item=Feature(name="item", num_embeddings=2 * num_users),
        catalogue=np.arange(2 * num_users),
    )
    dataset = next_items(log, history=10, exclude_seen=False)
    found = {each.name: each.quality["test"] for each in ranking_baselines(dataset, loss=NextItem(ks=(1,)))}
    assert found["own most frequent items"]["recall@1"] == 0
    assert found["own recent items"]["recall@1"] == 1
    without_repeats = ranking_baselines(next_items(log, history=10), loss=NextItem(ks=(1,)))
    assert not any(baseline.name.startswith("own") for baseline in without_repeats)


def test_several_labels_have_their_own_baselines(folder):
    recipe = small("mmoe", folder)
    found = {each.name: each.quality["test"] for each in baselines(recipe.data.load())}
    each_alone = small("movielens_dlrm", folder).data
    for label, threshold in (("from_4", 4.0), ("from_5", 5.0)):
        alone = {
            each.name: each.quality["test"]
            for each in baselines(replace(each_alone, liked_from=(threshold,)).load())
        }
        for name, metrics in alone.items():
            assert found[name][f"{label}/auc"] == metrics["auc"]


def test_what_does_not_fit(folder):
    recipe = small("sasrec", folder)
    with pytest.raises(ValueError, match="NextItem"):
        NextItem().sum(torch.zeros(3), torch.ones(3), None)
    with pytest.raises(ValueError, match="catalogue"):
        TwoTowerConfig().build(replace(recipe.data.load(), catalogue=None))
    dataset = recipe.data.load()
    with pytest.raises(ValueError, match=r"name.*\[\]"):
        SASRecConfig().build(replace(dataset, features=dataset.features[1:]))
    with pytest.raises(ValueError, match="catalogue"):
        next(ranking_baselines(replace(recipe.data.load(), item=None)))
    with pytest.raises(ValueError, match=r"loss.ks.*\[0\]"):
        NextItem(ks=(0,))


@pytest.mark.parametrize("name", NEXT_ITEM)
def test_a_feature_called_seen_that_is_not_declared_is_warned_of(name, folder, caplog):
    recipe = small(name, folder)
    dataset = recipe.data.load()
    recipe.model.build(dataset)
    assert not caplog.records
    recipe.model.build(replace(dataset, seen=None))
    assert "Set Dataset(seen='seen') to leave them out" in caplog.text
