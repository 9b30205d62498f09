from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score

from meshrec.train.linear import Regression, columns, first_samples, fitted_again, regression


def labelled(reader, dataset):
    samples = first_samples(reader)
    return columns(dataset, samples, samples.dense), samples.labels.double().numpy()


def test_weights_are_those_of_the_penalty_that_predicts_best(small):
    dataset = replace(small().data, num_samples=2000, num_validation=2000).load()
    train, judged = labelled(dataset.train, dataset), labelled(dataset.validation, dataset)
    found, penalty = regression(train, judged)
    fits = [
        LogisticRegression(C=1 / penalty, max_iter=500, tol=1e-8).fit(train[0][:, :-1], train[1])
        for penalty in (300.0, 100.0, 30.0, 10.0, 3.0, 1.0, 0.3)
    ]
    areas = [roc_auc_score(judged[1], fit.decision_function(judged[0][:, :-1])) for fit in fits]
    best = fits[int(np.argmax(areas))]
    assert np.allclose(found, np.append(best.coef_, best.intercept_), atol=2e-3)
    assert penalty == pytest.approx(1 / best.C)
    half = (train[0][:1000], train[1][:1000])
    again = LogisticRegression(C=best.C, max_iter=500, tol=1e-8).fit(half[0][:, :-1], half[1])
    refitted = fitted_again(Regression(found, penalty), half)
    assert np.allclose(refitted, np.append(again.coef_, again.intercept_), atol=2e-3)


def test_every_tenth_sample_chooses_where_there_is_no_validation_data(small):
    dataset = small().data.load()
    data, labels = labelled(dataset.train, dataset)
    chooses = np.arange(len(labels)) % 10 == 9
    expected = regression((data[~chooses], labels[~chooses]), (data[chooses], labels[chooses]))
    assert np.array_equal(regression((data, labels)).weights, expected.weights)


def test_one_class_chooses_the_strongest_penalty(small):
    dataset = small().data.load()
    train = labelled(dataset.train, dataset)
    found, _ = regression(train, (train[0], np.zeros_like(train[1])))
    expected = LogisticRegression(C=1 / 300, max_iter=500, tol=1e-8).fit(train[0][:, :-1], train[1])
    assert np.allclose(found[:-1], expected.coef_, atol=2e-3)


@pytest.mark.parametrize("shared", [False, True])
def test_columns_are_a_tables_rows_in_the_order_of_the_tables(shared, small):
    dataset = small().data.load()
    samples = first_samples(dataset.train)
    found = columns(dataset, samples, samples.dense, shared=shared).toarray()
    assert found.shape == (1000, 3 * 50 + 2 + 1)
    ids = torch.stack([samples.sparse[key].values() for key in list(samples.sparse.keys())], dim=1)
    assert np.array_equal(found[:, :150].reshape(1000, 3, 50).argmax(2), ids.numpy())
    assert np.allclose(found[:, 150:152], samples.dense.numpy())
    assert (found[:, 152] == 1).all()
