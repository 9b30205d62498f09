from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from meshrec.cli.train import main as train
from meshrec.data.synthetic_impressions import synthetic_impressions
from meshrec.runs.explained import explain_run, names_of_rows
from meshrec.train import (
    BinaryCrossEntropy,
    Log,
    Placement,
    RunFolder,
    SquaredError,
    Trainer,
    Training,
    join,
    resolve,
)
from meshrec.train.explaining import _permutations, explain

RECIPE = """
from meshrec.data.features import Features, Label, Number, Vocabulary
from meshrec.optim import Adam
from meshrec.train import DenseOptimizer, DLRMConfig, Parquet, Recipe, Training
def recipe():
    features = Features(
        labels=(Label(column="clicked"),),
        features=(
            Vocabulary(name="kind"), Vocabulary(name="noise"), Number(name="size"), Number(name="void"),
        ),
    )
    return Recipe(
        name="tiny",
        data=Parquet(train=("data.parquet",), split_by="random", features=features),
        model=DLRMConfig(embedding_dim=4, bottom=(8,), top=(16, 8)),
        tables=Adam(lr=0.02),
        dense=DenseOptimizer(lr=0.01),
        training=Training(batch_size=64, epochs=4),
    )
"""


def write(folder):
    rng = np.random.default_rng(0)
    num = 3000
    kind, noise = rng.integers(0, 4, num), rng.integers(0, 5, num)
    size, void = rng.normal(size=num), rng.normal(size=num)
    chance = 1 / (1 + np.exp(-(1.5 * (kind - 1.5) + 1.5 * size)))
    table = {
        "kind": np.array(["a", "b", "c", "d"])[kind],
        "noise": noise,
        "size": size,
        "void": void,
        "clicked": (rng.random(num) < chance).astype(int),
    }
    pq.write_table(pa.table(table), folder / "data.parquet")
    (folder / "recipe.py").write_text(RECIPE)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("explained")
    write(folder)
    arguments = [f"{folder / 'recipe.py'}:recipe", "--runs", str(folder), "--name", "r", "--quiet"]
    assert train(arguments) == 0
    return RunFolder(folder / "r")


def test_what_the_label_depends_on_is_important(run):
    found = run.read_json("summary.json")["explained"]
    assert set(list(found["importance"])[:2]) == {"kind", "size"}
    assert found["importance"]["kind"] > 0.05
    assert abs(found["importance"]["noise"]) < 0.03
    assert abs(found["importance"]["void"]) < 0.03
    assert set(found["slices"]["kind"]) == {"a", "b", "c", "d"}
    samples = sum(each["samples"] for each in found["slices"]["kind"].values())
    assert samples == found["samples"] > 200
    page = run.report.read_text()
    assert "What the model reads" in page


def test_rows_of_a_vocabulary_have_names(run):
    names = names_of_rows(run, {"noise": [0, 1, 2, 3]})["noise"]
    assert names[0] == "missing"
    assert names[1] == "unseen"
    assert set(names.values()) - {"missing", "unseen"} <= set("01234")


def check_ranks(folder):
    recipe = resolve(f"{folder}/recipe.py:recipe")
    dataset = recipe.data.load()
    trainer = Trainer(recipe, dataset, join("cpu"))
    trainer.run()
    found = explain(trainer.built.model, dataset, dataset.validation, trainer.ranks)
    assert found is not None
    assert found.samples > 200
    assert set(list(found.importance)[:2]) == {"kind", "size"}
    assert explain_run(trainer, RunFolder(folder / "none"))["importance"] == found.importance


def test_all_ranks_take_part(tmp_path, ranks):
    write(tmp_path)
    ranks(2).run(check_ranks, tmp_path)


def trained(recipe):
    trainer = Trainer(recipe, recipe.data.load(), join("cpu"))
    trainer.run()
    return explain_run(trainer, RunFolder(Path("none")))


def test_the_order_of_a_history_is_important_where_the_next_item_follows_from_the_last(tmp_path):
    num_users, length = 200, 13
    users = np.repeat(np.arange(num_users), length)
    steps = np.tile(np.arange(length), num_users)
    # Every other item follows from the one before. The validation item of each user does.
    drawn = np.random.default_rng(0).integers(0, 10, len(steps))
    items = np.where(steps % 2 == 1, 10 + np.roll(drawn, 1), drawn)
    log = pa.table({"user": users, "item": items, "time": steps})
    pq.write_table(log, tmp_path / "log.parquet")
    recipe = replace(
        resolve("sasrec"),
        data=Log(log=(str(tmp_path / "log.parquet"),), history=10, exclude_seen=False),
        placement=Placement(sharded=False),
        training=Training(batch_size=32, epochs=25),
    )
    found = trained(recipe)
    assert found["metric"] == "ndcg@10"
    assert set(found["importance"]) == {"history", "order of history"}
    assert found["importance"]["history"] > 0.2
    assert found["importance"]["order of history"] > 0.1
    assert found["slices"] == {}


def test_losses_without_a_leading_metric_are_compared_by_the_loss(tmp_path):
    write(tmp_path)
    text = RECIPE.replace('Label(column="clicked")', 'Label(column="size2", kind="number")')
    (tmp_path / "recipe.py").write_text(text)
    table = pq.read_table(tmp_path / "data.parquet")
    pq.write_table(table.append_column("size2", table["size"]), tmp_path / "data.parquet")
    recipe = resolve(f"{tmp_path}/recipe.py:recipe")
    data = replace(recipe.data, train=(str(tmp_path / "data.parquet"),))
    found = trained(replace(recipe, data=data, loss=SquaredError(), placement=Placement(sharded=False)))
    assert found["metric"] == "loss"
    assert next(iter(found["importance"])) == "size"
    assert found["importance"]["size"] > 0.5
    assert abs(found["importance"]["void"]) < 0.1


def test_sequences_with_times_are_shuffled_together():
    dataset = synthetic_impressions(num_users=9, num_items=9, longest=9, history=4)
    (batch, *_) = dataset.train.batches(8)
    permutations = dict(_permutations(dataset, BinaryCrossEntropy()))
    before = batch.sparse.to_dict()
    name = next(iter(permutations))
    assert "history_item" in name
    assert "times" not in name
    after = permutations[name](batch).sparse.to_dict()
    pairs = {key: [bag.tolist() for bag in before[key].to_dense()] for key in ("history_item", "times")}
    moved = {key: [bag.tolist() for bag in after[key].to_dense()] for key in ("history_item", "times")}
    together = sorted(zip(pairs["history_item"], pairs["times"], strict=True))
    assert sorted(zip(moved["history_item"], moved["times"], strict=True)) == together
    reordered = permutations[f"order of {name}"](batch).sparse.to_dict()
    of_users = [sorted(bag.tolist()) for bag in reordered["history_item"].to_dense()]
    assert of_users == [sorted(bag) for bag in pairs["history_item"]]
    assert torch.equal(reordered["times"].values(), before["times"].values())
