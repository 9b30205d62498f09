from dataclasses import replace

import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score

from meshrec.train.baselines import baselines
from meshrec.train.trees import has_trees


def one_hot(reader):
    (batch,) = reader.batches(reader.num_samples)
    ids = [torch.nn.functional.one_hot(batch.sparse[key].values(), 50) for key in list(batch.sparse.keys())]
    return torch.cat([batch.dense, *ids], dim=1), batch


def test_baselines_are_what_they_say(small):
    dataset = replace(small().data, num_samples=2000, num_validation=20_000).load()
    told = []
    results = list(baselines(dataset, told.append))
    found = {each.name: each.quality for each in results}
    for each in results:
        for data, curves in each.curves.items():
            rates = torch.tensor(curves["roc"])
            area = torch.trapezoid(rates[:, 1], rates[:, 0]).item()
            assert area == pytest.approx(each.quality[data]["auc"], abs=0.005), (each.name, data)
    assert [sorted(each.curves) for each in results] == [["test", "validation"]] * len(results)
    names = ["global mean", "item popularity", "logistic regression"]
    assert list(found) == names + ["LightGBM"] * has_trees()
    assert all(set(each) == {"validation", "test"} for each in found.values())
    assert found["global mean"]["validation"]["auc"] == 0.5
    assert len(told) > 20
    assert all(0 <= done <= 1 for done in told)
    (features, train), (judged, validation) = one_hot(dataset.train), one_hot(dataset.validation)
    rates = {
        item: (train.labels[train.sparse["f0"].values() == item].sum() + 5 * train.labels.mean())
        / ((train.sparse["f0"].values() == item).sum() + 5)
        for item in range(50)
    }
    scores = torch.stack([rates[item] for item in validation.sparse["f0"].values().tolist()])
    # On all 20,000 rows, which are several batches.
    assert found["item popularity"]["validation"]["auc"] == pytest.approx(
        roc_auc_score(validation.labels, scores), abs=1e-6
    )
    fits = [
        LogisticRegression(C=1 / strength, max_iter=500, tol=1e-8).fit(features, train.labels)
        for strength in (300.0, 100.0, 30.0, 10.0, 3.0, 1.0, 0.3)
    ]
    quality = [roc_auc_score(validation.labels, fit.predict_proba(judged)[:, 1]) for fit in fits]
    assert found["logistic regression"]["validation"]["auc"] == pytest.approx(max(quality), abs=1e-4)


def test_they_end_at_once_when_asked_to(small):
    def stop(done):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(baselines(small().data.load(), stop))
