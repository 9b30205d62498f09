import numpy as np
import pytest
import torch

from meshrec.data import Position, synthetic_clicks
from meshrec.data.synthetic import Teacher, zipf

SMALL = {"num_samples": 10_000, "num_validation": 6_000, "num_embeddings": 50}


def test_samples_are_a_function_of_the_seed():
    first, again, other = (next(synthetic_clicks(**SMALL, seed=seed).train.batches(64)) for seed in (1, 1, 2))
    assert torch.equal(first.dense, again.dense)
    assert torch.equal(first.sparse.values(), again.sparse.values())
    assert not torch.equal(first.dense, other.dense)


def test_shapes_and_splits():
    data = synthetic_clicks(**SMALL, ids_per_feature=3, num_dense=2, num_features=4)
    batch = next(data.train.batches(100))
    batch.sparse.validate()
    assert batch.dense.shape == (100, 2)
    assert batch.sparse.keys() == [feature.name for feature in data.features]
    assert batch.sparse.length_per_key() == [300] * 4
    assert int(batch.sparse.values().max()) < 50
    assert (data.train.num_samples, data.validation.num_samples) == (10_000, 6_000)
    held_out = next(data.validation.batches(100))
    assert not torch.equal(held_out.dense, batch.dense)
    assert sum(len(each) for each in data.train.batches(999)) == 10_000


def test_every_epoch_has_the_same_samples_in_another_order():
    data = synthetic_clicks(**SMALL)
    first, second = (
        torch.cat([batch.dense[:, 0] for batch in data.train.batches(512, position=Position(epoch, 0))])
        for epoch in (0, 1)
    )
    assert not torch.equal(first, second)
    assert torch.equal(first.sort().values, second.sort().values)


def test_the_best_auc_is_that_of_the_teacher():
    sklearn_metrics = pytest.importorskip("sklearn.metrics")
    data = synthetic_clicks(**SMALL, seed=4)
    teacher = Teacher(seed=4, bias=-1.0, signal=1.5)
    labels, probabilities = [], []
    for batch in data.validation.batches(1000):
        labels.append(batch.labels.numpy())
        ids = [jagged.values().numpy()[:, None] for jagged in batch.sparse.to_dict().values()]
        probabilities.append(teacher.probabilities(batch.dense.numpy(), ids))
    labels, probabilities = np.concatenate(labels), np.concatenate(probabilities)
    assert data.best_auc == pytest.approx(sklearn_metrics.roc_auc_score(labels, probabilities), abs=1e-12)
    assert 0.75 < data.best_auc < 0.9
    assert labels.mean() == pytest.approx(probabilities.mean(), abs=0.02)


def test_ids_follow_zipf():
    for exponent in (1.0, 1.2):
        counts = np.bincount(zipf(np.random.default_rng(0).random(200_000), 100, exponent), minlength=100)
        frequent = np.sort(counts)[::-1]
        assert len(counts) == 100
        # P(rank) of the continuous law: the integral of x ** -exponent from rank to rank + 1
        weights = np.diff(np.log(np.arange(1, 102)) if exponent == 1 else np.arange(1, 102.0) ** -0.2)
        expected = 200_000 * weights / weights.sum()
        assert np.allclose(frequent[:10], expected[:10], rtol=0.05)


def test_without_validation_there_is_no_best_auc():
    data = synthetic_clicks(num_samples=10, num_validation=0)
    assert (data.validation, data.best_auc) == (None, None)


def test_wrong_sizes():
    with pytest.raises(ValueError, match=r"num_embeddings.*1.*2 features.*\[5\]"):
        synthetic_clicks(num_features=2, num_embeddings=[5])
    with pytest.raises(ValueError, match="num_samples=0"):
        synthetic_clicks(num_samples=0)
