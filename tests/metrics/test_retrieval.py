import numpy as np
import pytest
import torch
import torch.distributed as dist

from meshrec import JaggedTensor
from meshrec.metrics import RetrievalMetrics

NUM_QUERIES, NUM_ITEMS = 30, 50


def queries(seed=0):
    rng = np.random.default_rng(seed)
    scores = rng.random((NUM_QUERIES, NUM_ITEMS))
    relevant = rng.random((NUM_QUERIES, NUM_ITEMS)) < 0.1
    relevant[3] = False
    ranked = torch.tensor(np.argsort(-scores, axis=1)[:, :20].copy())
    bags = JaggedTensor(torch.tensor(np.nonzero(relevant)[1]), lengths=torch.tensor(relevant.sum(1)))
    return scores, relevant, ranked, bags


def test_as_scikit_learn():
    sk = pytest.importorskip("sklearn.metrics")
    scores, relevant, ranked, bags = queries()
    metrics = RetrievalMetrics((2, 5, 20))
    metrics.update(ranked, bags)
    found = metrics.compute().window
    asked = relevant.any(1)
    for k in (2, 5, 20):
        assert found[f"ndcg@{k}"] == pytest.approx(sk.ndcg_score(relevant[asked], scores[asked], k=k))
        first = np.argsort(-scores, axis=1)[:, :k]
        recalls = [relevant[q, first[q]].sum() / relevant[q].sum() for q in np.flatnonzero(asked)]
        assert found[f"recall@{k}"] == pytest.approx(np.mean(recalls))


def test_nothing_asked_counts_for_nothing():
    metrics, nothing = RetrievalMetrics((2,)), torch.zeros(2, dtype=torch.int64)
    metrics.update(torch.tensor([[1, 2], [3, 4]]), JaggedTensor(nothing[:0], lengths=nothing))
    assert metrics.compute().window == {}


def test_windows_lifetime_and_saving():
    metrics, (_, _, ranked, bags) = RetrievalMetrics((5,)), queries()
    metrics.update(ranked, bags)
    first = metrics.compute()
    restored = RetrievalMetrics((5,))
    restored.load_state_dict(metrics.state_dict())
    assert restored.compute().lifetime == first.window
    metrics.update(ranked, bags)
    assert metrics.compute().lifetime == pytest.approx(first.window)
    assert metrics.compute().window == {}


def of_rank():
    metrics, (_, _, ranked, bags) = RetrievalMetrics((5,)), queries(dist.get_rank())
    metrics.update(ranked, bags)
    return metrics.compute().window


def test_all_ranks_count(ranks):
    found = ranks(2).run(of_rank)
    metrics = RetrievalMetrics((5,))
    for seed in (0, 1):
        _, _, ranked, bags = queries(seed)
        metrics.update(ranked, bags)
    assert found[0] == found[1] == pytest.approx(metrics.compute().window)


def test_wrong_arguments():
    _, _, ranked, bags = queries()
    with pytest.raises(ValueError, match=r"ks must be numbers >= 1, got \[0\]"):
        RetrievalMetrics((0,))
    with pytest.raises(ValueError, match="ranked lists have 20 items, k = 21 needs more"):
        RetrievalMetrics((21,)).update(ranked, bags)
    with pytest.raises(ValueError, match=r"got \[29, 20\] and 30 bags"):
        RetrievalMetrics((5,)).update(ranked[1:], bags)
