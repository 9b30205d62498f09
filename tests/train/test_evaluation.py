import math
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from meshrec.data.features import Features, Label, Vocabulary
from meshrec.metrics import binary_metrics
from meshrec.optim import Adam
from meshrec.train import (
    DenseOptimizer,
    Parquet,
    Ranking,
    Recipe,
    Trainer,
    Training,
    WideDeepConfig,
    join,
)
from meshrec.train.baselines import baselines
from meshrec.train.evaluation import OutputWindow, evaluate, outputs_of
from meshrec.train.explaining import explain
from meshrec.train.step import Outputs
from meshrec.train.watch import LossError


def test_the_window_is_emptied():
    window = OutputWindow()
    window.add([Outputs(torch.tensor(1.0), torch.tensor([1.0, -1.0]), torch.tensor([1.0, 0.0]))])
    assert window.take(join("cpu"))["auc"] == 1.0
    assert window.is_empty


def test_the_window_takes_sample_weights():
    window, weights = OutputWindow(), torch.tensor([1.0, 0.0, 1.0])
    logits, labels = torch.tensor([1.0, 2.0, -1.0]), torch.tensor([1.0, 0.0, 0.0])
    window.add([Outputs(torch.tensor(1.0), logits, labels, weights)])
    window.add([Outputs(torch.tensor(1.0), logits[:1], labels[:1])])
    expected = binary_metrics(torch.tensor([1.0, -1.0, 1.0]), torch.tensor([1.0, 0.0, 1.0]))
    assert window.take(join("cpu")) == pytest.approx(expected)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_dense_values_that_training_refuses_are_not_scored(small, value):
    recipe = small()
    dataset = recipe.data.load()
    (batch,) = dataset.validation.batches(dataset.validation.num_samples)
    batch.dense[3, 1] = value

    class One:
        def batches(self, *_, **__):
            yield batch

    trainer = Trainer(recipe, dataset, join("cpu"))
    with pytest.raises(ValueError, match="NaN"):
        next(trainer.predict(One()))


def test_evaluation_sees_every_sample_and_leaves_training_mode_on(small):
    recipe = small()
    dataset = recipe.data.load()
    trainer = Trainer(recipe, dataset, join("cpu"))
    found = evaluate(trainer.built.model, dataset.validation, join("cpu"))
    assert trainer.built.model.training
    (batch,) = dataset.validation.batches(dataset.validation.num_samples)
    with torch.no_grad():
        expected = binary_metrics(trainer.built.model(batch.dense, batch.sparse).squeeze(1), batch.labels)
    assert found == pytest.approx(expected)


def weighted_run(folder, weight_of_noise=0.0):
    """Return a trained recipe whose rows contradict their label half of the time, with that weight."""
    rng = np.random.default_rng(0)
    item, is_noise = rng.integers(0, 6, 600), rng.random(600) < 0.5
    label, weight = (item % 2 == 0) != is_noise, np.where(is_noise, weight_of_noise, 2.0)
    pq.write_table(pa.table({"i": item, "w": weight, "y": label.astype(int)}), folder / "d.parquet")
    features = Features(labels=(Label(column="y"),), features=(Vocabulary(name="i"),), weight="w")
    recipe = Recipe(
        name="weighted",
        data=Parquet(train=(str(folder / "d.parquet"),), split_by="random", features=features),
        model=WideDeepConfig(),
        tables=Adam(lr=0.01),
        dense=DenseOptimizer(lr=0.01),
        training=Training(batch_size=64, epochs=1),
    )
    trainer = Trainer(recipe, recipe.data.load(), join("cpu"))
    trainer.run()
    return trainer


def test_sample_weights_count_in_all_metrics(tmp_path):
    trainer = weighted_run(tmp_path)
    assert trainer.validation["auc"] == trainer.test["auc"] == 1.0
    for data, reader in (("validation", trainer.dataset.validation), ("test", trainer.dataset.test)):
        logits, labels, weights = outputs_of(trainer.built.model, reader, join("cpu"))
        counts = weights > 0
        assert 0 < int(counts.sum()) < len(counts)
        expected = binary_metrics(logits[counts], labels[counts])
        assert getattr(trainer, data) == pytest.approx(expected)
        sizes = [float(labels[counts].sum()), float((1 - labels[counts]).sum())]
        assert [trainer.evaluator.curves[data][name] for name in ("positive", "negative")] == pytest.approx(
            sizes
        )
    for baseline in baselines(trainer.dataset):
        expected = 0.5 if baseline.name == "global mean" else 1.0
        assert baseline.quality["test"]["auc"] == expected, baseline.name
    reader = trainer.dataset.validation
    explained = explain(trainer.built.model, trainer.dataset, reader, join("cpu"))
    assert all(metrics.get("auc", 1.0) == 1.0 for metrics in explained.slices["i"].values())


def test_validation_data_without_weight_is_refused(tmp_path):
    trainer = weighted_run(tmp_path)
    batches = list(trainer.dataset.validation.batches(1000))
    for batch in batches:
        batch.weights.zero_()

    size = sum(len(batch) for batch in batches)

    class Reader:
        num_samples = size

        def batches(self, *_, **__):
            yield from batches

    trainer.evaluator._dataset = SimpleNamespace(validation=Reader())
    with pytest.raises(ValueError, match=r"validation.*0"):
        trainer.evaluator.validate(1)


def test_rows_of_equal_scores_are_ranked_in_no_order(tmp_path):
    queries, labels = np.repeat(np.arange(60), 8), np.tile([3.0, 2, 1, 0, 0, 0, 0, 0], 60)
    table = pa.table({"q": queries, "i": np.arange(480), "y": labels})  # the best rows come first
    pq.write_table(table, tmp_path / "q.parquet")
    features = Features(
        labels=(Label(column="y", kind="number"), Label(column="q", kind="query")),
        features=(Vocabulary(name="i"),),
    )
    recipe = Recipe(
        name="ties",
        data=Parquet(
            train=(str(tmp_path / "q.parquet"),), split_by="hash", split_column="q", features=features
        ),
        model=WideDeepConfig(),
        loss=Ranking(),
        tables=Adam(lr=0.01),
        dense=DenseOptimizer(lr=0.01),
        training=Training(batch_size=32, epochs=1),
    )
    trainer = Trainer(recipe, recipe.data.load(), join("cpu"))
    trainer.run()
    gains, discounts = 2 ** np.array([3.0, 2, 1, 0, 0, 0, 0, 0]) - 1, 1 / np.log2(np.arange(2, 10))
    expected = gains.mean() * discounts.sum() / (gains @ discounts)
    assert trainer.test["ndcg@10"] == pytest.approx(expected)  # held-out items are all unseen
    for parameter in trainer.built.model.parameters():
        parameter.data.fill_(math.nan)
    with pytest.raises(LossError, match=r"NDCG@10 on the validation data is nan: (\d+) of \1 scores"):
        trainer.evaluator.validate(9)


def test_nan_scores_of_clicks_end_a_run_with_their_number(tmp_path):
    rng = np.random.default_rng(0)
    table = pa.table({"i": rng.integers(0, 9, 200), "y": rng.integers(0, 2, 200)})
    pq.write_table(table, tmp_path / "c.parquet")
    features = Features(labels=(Label(column="y"),), features=(Vocabulary(name="i"),))
    data = Parquet(train=(str(tmp_path / "c.parquet"),), split_by="random", features=features)
    recipe = Recipe(name="nan", data=data, model=WideDeepConfig(embedding_dim=4, layers=(4,)))
    trainer = Trainer(recipe, recipe.data.load(), join("cpu"))
    for parameter in trainer.built.model.parameters():
        parameter.data.fill_(math.nan)
    with pytest.raises(LossError, match=r"validation data is nan: (\d+) of \1 scores"):
        trainer.evaluator.validate(9)
