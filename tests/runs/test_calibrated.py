import numpy as np
import pytest
import torch
from sklearn.isotonic import IsotonicRegression

from meshrec.runs.calibrated import fit_curve


@pytest.fixture
def samples():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=4000)
    return logits, (rng.random(4000) < 1 / (1 + np.exp(-(0.5 * logits - 1)))).astype(float)


def test_platt_finds_the_slope_and_the_intercept(samples):
    curve = fit_curve("platt", *samples)
    assert curve.logits[0] == pytest.approx(0.5, abs=0.1)
    assert curve.probabilities[0] == pytest.approx(-1, abs=0.1)
    assert curve(samples[0]).mean() == pytest.approx(samples[1].mean(), abs=1e-4)


def test_isotonic_probabilities_are_those_of_scikit_learn(samples):
    logits, labels = samples
    curve = fit_curve("isotonic", logits, labels)
    expected = IsotonicRegression(y_min=0, y_max=1, out_of_bounds="clip").fit(logits, labels)
    tried = np.linspace(-5, 5, 101)
    np.testing.assert_allclose(curve(tried), expected.predict(tried), atol=1e-12)
    outputs = torch.sigmoid(curve.calibrate_logits(torch.from_numpy(tried)))
    np.testing.assert_allclose(outputs.numpy(), expected.predict(tried), atol=1e-12)


@pytest.mark.parametrize("kind", ["platt", "isotonic"])
def test_a_weight_counts_as_that_many_samples(kind, samples):
    logits, labels = (each[:200] for each in samples)
    weights = np.arange(200) % 3.0
    twice = fit_curve(kind, *(np.repeat(each, weights.astype(int)) for each in (logits, labels)))
    weighted = fit_curve(kind, logits, labels, weights)
    tried = np.linspace(-1, 1, 11)
    np.testing.assert_allclose(weighted(tried), twice(tried), atol=1e-3)


def test_labels_that_are_all_the_same_are_refused():
    with pytest.raises(ValueError, match="are 1"):
        fit_curve("isotonic", np.zeros(3), np.ones(3))
