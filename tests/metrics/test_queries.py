import numpy as np
import pytest
import torch
from sklearn.metrics import ndcg_score

from meshrec.metrics import query_metrics
from meshrec.metrics.queries import places_within


def test_ndcg_is_scikit_learns():
    rng = np.random.default_rng(0)
    scores, labels, queries, expected = [], [], [], []
    for query in range(30):
        num = int(rng.integers(2, 20))
        truth, said = rng.integers(0, 4, num), rng.normal(size=num)
        if truth.any():
            expected.append(ndcg_score([2.0**truth - 1], [said], k=5))
        scores, labels = [*scores, *said], [*labels, *truth]
        queries += [query] * num
    order = rng.permutation(len(scores))
    found = query_metrics(
        *(torch.tensor(np.array(each)[order]) for each in (scores, labels, queries)), ks=(5,)
    )
    assert found["ndcg@5"] == pytest.approx(np.mean(expected))


def test_places_and_mrr():
    queries = torch.tensor([7, 3, 7, 7, 3])
    scores = torch.tensor([0.1, 0.5, 0.9, 0.1, 0.6])
    assert places_within(scores, torch.unique(queries, return_inverse=True)[1]).tolist() == [2, 2, 1, 3, 1]
    labels = torch.tensor([1.0, 1.0, 0.0, 0.0, 0.0])
    assert query_metrics(scores, labels, queries)["mrr"] == 0.5


def test_queries_without_a_good_sample_are_left_out():
    zeros = torch.zeros(4)
    assert query_metrics(zeros, zeros, torch.tensor([0, 0, 1, 1])) == {}
    assert query_metrics(zeros[:0], zeros[:0], zeros[:0]) == {}
