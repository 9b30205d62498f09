from dataclasses import replace

import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score

from meshrec.train.baselines import baselines


def one_hot(reader):
    (batch,) = reader.batches(reader.num_samples)
    ids = [torch.nn.functional.one_hot(batch.sparse[key].values(), 50) for key in list(batch.sparse.keys())]
    return torch.cat([batch.dense, *ids], dim=1), batch


def test_baselines_are_what_they_say(small):
    dataset = replace(small().data, num_samples=2000, num_validation=2000).load()
    found = {each.name: each.quality for each in baselines(dataset)}
    assert list(found) == ["global mean", "item popularity", "logistic regression"]
    assert found["global mean"]["auc"] == 0.5
    (features, train), (judged, validation) = one_hot(dataset.train), one_hot(dataset.validation)
    rates = {
        item: (train.labels[train.sparse["f0"].values() == item].sum() + 5 * train.labels.mean())
        / ((train.sparse["f0"].values() == item).sum() + 5)
        for item in range(50)
    }
    scores = torch.stack([rates[item] for item in validation.sparse["f0"].values().tolist()])
    assert found["item popularity"]["auc"] == pytest.approx(
        roc_auc_score(validation.labels, scores), abs=1e-6
    )
    expected = 0.0
    for strength in (10.0, 3.0, 1.0):
        fit = LogisticRegression(C=1 / strength, max_iter=500).fit(features, train.labels)
        expected = max(expected, roc_auc_score(validation.labels, fit.predict_proba(judged)[:, 1]))
    assert found["logistic regression"]["auc"] == pytest.approx(expected, abs=2e-3)
