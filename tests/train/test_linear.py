from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score

from meshrec.train.linear import (
    LabelledSamples,
    Regression,
    design_matrix,
    first_samples,
    fit_regression,
    refit_regression,
    weights_of,
)


def labelled(reader, dataset):
    samples = first_samples(reader)
    return LabelledSamples.of(samples, design_matrix(dataset, samples, samples.dense))


def test_weights_are_those_of_the_penalty_that_predicts_best(small):
    dataset = replace(small().data, num_samples=2000, num_validation=2000).load()
    train, judged = labelled(dataset.train, dataset), labelled(dataset.validation, dataset)
    found, penalty = fit_regression(train, judged)
    fits = [
        LogisticRegression(C=1 / penalty, max_iter=500, tol=1e-8).fit(train[0][:, :-1], train[1])
        for penalty in (300.0, 100.0, 30.0, 10.0, 3.0, 1.0, 0.3)
    ]
    areas = [roc_auc_score(judged[1], fit.decision_function(judged[0][:, :-1])) for fit in fits]
    best = fits[int(np.argmax(areas))]
    assert np.allclose(found, np.append(best.coef_, best.intercept_), atol=2e-3)
    assert penalty == pytest.approx(1 / best.C)
    half = train.where(slice(1000))
    again = LogisticRegression(C=best.C, max_iter=500, tol=1e-8).fit(half[0][:, :-1], half[1])
    refitted = refit_regression(Regression(found, penalty), half)
    assert np.allclose(refitted, np.append(again.coef_, again.intercept_), atol=2e-3)


def test_every_tenth_sample_chooses_where_there_is_no_validation_data(small):
    dataset = small().data.load()
    samples = labelled(dataset.train, dataset)
    chooses = np.arange(len(samples.labels)) % 10 == 9
    expected = fit_regression(samples.where(~chooses), samples.where(chooses))
    assert np.array_equal(fit_regression(samples).weights, expected.weights)


def test_samples_count_by_their_weights(small):
    dataset = small().data.load()
    train = labelled(dataset.train, dataset)
    weights = np.random.default_rng(0).random(len(train.labels)) * (np.arange(len(train.labels)) % 3 > 0)
    found, penalty = fit_regression(train._replace(weights=weights), train)
    expected = LogisticRegression(C=1 / penalty, max_iter=500, tol=1e-8)
    expected.fit(train.inputs[:, :-1], train.labels, sample_weight=weights)
    assert np.allclose(found, np.append(expected.coef_, expected.intercept_), atol=2e-3)


def test_weights_of_samples_have_the_mean_1_where_they_are_above_0(small):
    batch = replace(
        first_samples(small().data.load().train), weights=torch.tensor([0.0, 4.0, 8.0] + [0.0] * 997)
    )
    assert weights_of(batch)[:3].tolist() == pytest.approx([0, 2 / 3, 4 / 3])
    with pytest.raises(ValueError, match=r"weights.*0"):
        weights_of(replace(batch, weights=torch.zeros(1000)))


def test_one_class_chooses_the_strongest_penalty(small):
    dataset = small().data.load()
    train = labelled(dataset.train, dataset)
    found, _ = fit_regression(train, train._replace(labels=np.zeros_like(train.labels)))
    expected = LogisticRegression(C=1 / 300, max_iter=500, tol=1e-8).fit(train[0][:, :-1], train[1])
    assert np.allclose(found[:-1], expected.coef_, atol=2e-3)


@pytest.mark.parametrize("shared", [False, True])
def test_columns_are_a_tables_rows_in_the_order_of_the_tables(shared, small):
    dataset = small().data.load()
    samples = first_samples(dataset.train)
    found = design_matrix(dataset, samples, samples.dense, shared=shared).toarray()
    assert found.shape == (1000, 3 * 50 + 2 + 1)
    ids = torch.stack([samples.sparse[key].values() for key in list(samples.sparse.keys())], dim=1)
    assert np.array_equal(found[:, :150].reshape(1000, 3, 50).argmax(2), ids.numpy())
    assert np.allclose(found[:, 150:152], samples.dense.numpy())
    assert (found[:, 152] == 1).all()
