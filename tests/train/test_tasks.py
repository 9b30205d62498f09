"""Several labels and weights of samples, from columns to scores."""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
import torch

from meshrec.data.features import Features, Hashed, Label, Vocabulary
from meshrec.optim import RowWiseAdagrad
from meshrec.train import (
    BinaryCrossEntropy,
    DenseOptimizer,
    DLRMConfig,
    Frame,
    Huber,
    MultiTaskConfig,
    Placement,
    Recipe,
    SquaredError,
    Task,
    Tasks,
    Trainer,
    Training,
    join,
)


def table(num: int = 1500) -> pa.Table:
    rng = np.random.default_rng(0)
    users = rng.integers(0, 20, num)
    ids = [[int(each)] for each in users]
    return pa.table(
        {
            "click": rng.random(num) < 0.1 + 0.8 * (users % 2),
            "price": users + rng.normal(size=num),
            "user": [f"u{each}" for each in users],
            "w": rng.random(num),
            "ids": ids,
            "weights": [[0.5]] * num,
        }
    )


CLICK, PRICE = Label(column="click"), Label(column="price", kind="number")


def recipe(labels, loss, model, **features) -> Recipe:
    columns = (Vocabulary(name="user"), Hashed(name="ids", num_embeddings=64, weights="weights"))
    return Recipe(
        name="tasks",
        data=Frame(
            train=table(), split_by="random", features=Features(labels=labels, features=columns, **features)
        ),
        model=model,
        loss=loss,
        tables=RowWiseAdagrad(lr=0.1),
        dense=DenseOptimizer(lr=0.02),
        training=Training(batch_size=50, epochs=5),
        placement=Placement(sharded=False),
    )


def trained(recipe) -> Trainer:
    trainer = Trainer(recipe, recipe.data.load(), join("cpu"))
    trainer.run()
    return trainer


@pytest.mark.parametrize("mixture", ["shared_bottom", "mmoe", "ple"])
def test_several_labels_are_learned_at_once(mixture):
    loss = Tasks(tasks=(Task("click", BinaryCrossEntropy()), Task("price", SquaredError(), 0.1)))
    found = trained(recipe((CLICK, PRICE), loss, MultiTaskConfig(mixture=mixture, embedding_dim=8))).test
    assert found["click/auc"] > 0.85
    assert found["price/r2"] > 0.5
    assert found["auc"] == found["click/auc"]


def test_numbers_are_learned_and_the_best_weights_have_the_least_loss():
    found = trained(recipe((PRICE,), Huber(), DLRMConfig(embedding_dim=8), weight="w"))
    assert found.test["r2"] > 0.5
    assert found.evaluator.early.best_auc == pytest.approx(-found.validation["loss"])


def test_samples_without_weight_are_not_learned():
    data = table()
    none = data.set_column(3, "w", pa.array(np.where(data["click"].to_numpy(), 0.0, 1.0)))
    base = recipe((CLICK,), BinaryCrossEntropy(), DLRMConfig(embedding_dim=8), weight="w")
    found = trained(replace(base, data=replace(base.data, train=none)))
    assert found.test.keys() == {"loss", "accuracy"}  # clicks have no weight in metrics either
    logits = torch.cat([each.logits_B for each in found.predict(found.dataset.test)])
    assert torch.sigmoid(logits).mean() < 0.2  # it has seen no click


def test_models_of_several_labels_want_several():
    with pytest.raises(ValueError, match="several"):
        trained(recipe((CLICK,), BinaryCrossEntropy(), MultiTaskConfig()))


def test_labels_and_losses_go_together():
    one, two = BinaryCrossEntropy(), Tasks(tasks=(Task("a", BinaryCrossEntropy()), Task("b", SquaredError())))
    for labels, loss, message in (
        ((CLICK, PRICE), one, r"labels are \['click', 'price'\], and the loss is for 1"),
        ((CLICK,), two, r"labels are \['click'\], and the loss is for 2"),
        ((PRICE,), one, "label 'price' is a number, and BinaryCrossEntropy takes 0 to 1"),
    ):
        with pytest.raises(ValueError, match=message):
            recipe(labels, loss, DLRMConfig()).check(1)


def test_data_of_damaged_rows_alone_trains_nothing():
    nothing = recipe((CLICK,), BinaryCrossEntropy(), DLRMConfig(embedding_dim=8), weight="price")
    negative = table().set_column(
        table().column_names.index("price"), "price", pa.array([-1.0] * table().num_rows)
    )
    with pytest.raises(ValueError, match="'frame'"):
        trained(replace(nothing, data=replace(nothing.data, train=negative, on_error="skip")))
