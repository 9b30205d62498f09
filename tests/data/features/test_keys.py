"""Features whose values are 64-bit keys: what rows they get, what a model gets of them, and a training."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import meshrec
from meshrec.data.dataset import Feature, embedding_bag_configs
from meshrec.data.features import Features, Key, Label, hashes_of
from meshrec.tables.hashed.keys import LFU, LRU, MinCount


def test_integers_are_their_own_keys():
    key = Key(name="item", max_rows=10)
    integers = pa.array([5, -1, None, 2**63 - 1, -(2**63)])
    assert key.rows_of(integers).tolist() == [5, -1, Key.missing_key, 2**63 - 1, -(2**63)]
    assert key.rows_of(pa.array([7, 7]).dictionary_encode()).tolist() == [7, 7]
    assert key.row_of(12) == 12


def test_texts_have_the_hash_of_their_bytes():
    key, texts = Key(name="item", max_rows=10), pa.array(["a", "b", "", None, "a"])
    keys = key.rows_of(texts)
    assert keys[:2].tolist() == hashes_of(texts)[:2].view(np.int64).tolist()
    assert keys[2:].tolist() == [Key.missing_key, Key.missing_key, keys[0]]
    assert key.rows_of(texts.dictionary_encode()).tolist() == keys.tolist()


def test_models_get_a_table_with_hashed_keys():
    key = Key(name="item", max_rows=10, min_count=3, evict="lfu", seed=7, table="items")
    found = Features(labels=(Label(column="y"),), features=(key, Key(name="last", max_rows=10)))
    item, last = (each.feature() for each in found.ids)
    assert item.keys == meshrec.Hashed(max_rows=10, admit=MinCount(3), evict=LFU(), seed=7)
    assert last.keys == meshrec.Hashed(max_rows=10, evict=LRU())
    tables = embedding_bag_configs([item, last], 8)
    assert [(table.name, table.keys, table.num_embeddings) for table in tables] == [
        ("items", item.keys, 10),
        ("last", last.keys, 10),
    ]
    with pytest.raises(ValueError, match="'items'"):
        embedding_bag_configs([item, Feature(name="x", num_embeddings=10, table="items")], 8)


def test_keys_are_saved(tmp_path):
    key = Key(name="item", max_rows=10, min_count=3, evict="error")
    features = Features(labels=(Label(column="y"),), features=(key,))
    features.save(tmp_path / "features.json")
    assert Features.load(tmp_path / "features.json") == features


@pytest.mark.parametrize("wrong", [{"evict": "never"}, {"min_count": 0}, {"max_rows": 0}])
def test_mistakes_are_named(wrong):
    with pytest.raises(ValueError, match="'item'"):
        Key(**({"name": "item", "max_rows": 10} | wrong))


def test_a_recipe_trains_on_raw_keys(tmp_path):
    from meshrec.optim import Adam
    from meshrec.train import DenseOptimizer, DLRMConfig, Parquet, Recipe, Training
    from meshrec.train.ranks import join
    from meshrec.train.trainer import Trainer

    rng = np.random.default_rng(0)
    users = rng.integers(-(2**63), 2**63, 50)[rng.integers(0, 50, 4000)]
    items = np.array([f"item {each}" for each in rng.integers(0, 300, 4000)])
    data = pa.table({"user": users, "item": items, "y": (users > 0).astype(np.int64)})
    pq.write_table(data, tmp_path / "data.parquet")
    features = Features(
        labels=(Label(column="y"),),
        features=(Key(name="user", max_rows=64), Key(name="item", max_rows=100, min_count=2)),
    )
    recipe = Recipe(
        name="keys",
        data=Parquet(train=str(tmp_path / "data.parquet"), split_by="random", features=features),
        model=DLRMConfig(embedding_dim=8, bottom=(8,), top=(16,)),
        tables=Adam(lr=0.05),
        dense=DenseOptimizer(lr=0.01),
        training=Training(batch_size=100, epochs=3, evaluate_every=30),
    )
    trainer = Trainer(recipe, recipe.data.load(), join("cpu"))
    assert trainer.run()["auc"] > 0.9
