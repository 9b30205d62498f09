"""The checks of scikit-learn for estimators, with the reason for those that do not apply."""

import warnings
from unittest import SkipTest

import pytest
from sklearn.utils.estimator_checks import estimator_checks_generator

from meshrec.estimators import Classifier, Regressor

QUICK = {
    "training.max_steps": 1,
    "training.evaluate_every": 1,
    "training.epochs": 1,
    "model.fit_trees": 0,
    "model.fit_wide": False,
}
NOT_APPLICABLE = {
    "check_classifiers_train": "it asks for accuracy, which one step of training does not give",
    "check_regressors_train": "it asks for accuracy, which one step of training does not give",
    "check_array_api_input": "arrays become Arrow tables",
}


def cases():
    models = (
        ("", Classifier(options=QUICK)),
        ("regressor", Regressor(options=QUICK)),  # what both have in common is checked once
    )
    for part, model in models:
        for number, (estimator, check) in enumerate(estimator_checks_generator(model)):
            name = getattr(check, "func", check).__name__
            if part in name and name not in NOT_APPLICABLE:
                yield pytest.param(estimator, check, id=f"{type(model).__name__}-{name}-{number}")


@pytest.mark.parametrize(("estimator", "check"), list(cases()))
def test_estimator_keeps_the_rules_of_scikit_learn(estimator, check):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            check(estimator)
        except SkipTest as skipped:
            pytest.skip(str(skipped))
