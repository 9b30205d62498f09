import numpy as np
import pytest
import torch
import torch.distributed as dist

from meshrec.metrics import place_intervals, place_metrics

NUM_QUERIES, NUM_ITEMS, KS = 30, 50, (2, 5, 20)


def queries(seed=0):
    """Return scores, the relevant item of each query, its rank among all items, and losses."""
    rng = np.random.default_rng(seed)
    scores, relevant = rng.random((NUM_QUERIES, NUM_ITEMS)), rng.integers(0, NUM_ITEMS, NUM_QUERIES)
    own = scores[np.arange(NUM_QUERIES), relevant]
    places = torch.from_numpy(1.0 + (scores > own[:, None]).sum(1))
    return scores, relevant, places, torch.from_numpy(rng.random(NUM_QUERIES))


def test_as_scikit_learn():
    sk = pytest.importorskip("sklearn.metrics")
    scores, relevant, places, losses = queries()
    found = place_metrics(losses, places, ks=KS)
    is_relevant = np.arange(NUM_ITEMS) == relevant[:, None]
    for k in KS:
        assert found[f"ndcg@{k}"] == pytest.approx(sk.ndcg_score(is_relevant, scores, k=k))
        top = sk.top_k_accuracy_score(relevant, scores, k=k, labels=np.arange(NUM_ITEMS))
        assert found[f"recall@{k}"] == pytest.approx(top)
        assert found[f"mrr@{k}"] == pytest.approx(float(((places <= k) / places).mean()))
    assert found["mrr"] == pytest.approx(sk.label_ranking_average_precision_score(is_relevant, scores))
    assert found["loss"] == pytest.approx(float(losses.mean()))


def test_queries_without_a_rank_count_for_the_loss_only():
    _, _, places, losses = queries()
    some = place_metrics(losses, torch.where(torch.arange(NUM_QUERIES) < 10, places, 0.0))
    expected = place_metrics(losses[:10], places[:10])
    assert some == {**expected, "loss": pytest.approx(float(losses.mean()))}
    assert place_metrics(losses, torch.zeros(NUM_QUERIES)).keys() == {"loss"}
    assert place_metrics(losses[:0], places[:0]) == {}


def of_rank():
    _, _, places, losses = queries(dist.get_rank())
    return place_metrics(losses, places, ks=KS), place_metrics(losses, places, ks=KS, gather=False)


def test_all_ranks_count(ranks):
    parts = [queries(seed)[2:] for seed in (0, 1)]
    whole = place_metrics(*(torch.cat([part[i] for part in parts]) for i in (1, 0)), ks=KS)
    for (found, own), (places, losses) in zip(ranks(2).run(of_rank), parts, strict=True):
        assert found == pytest.approx(whole)
        assert own == pytest.approx(place_metrics(losses, places, ks=KS))


def test_intervals_hold_the_metric_and_shrink_with_the_number_of_queries():
    _, _, places, losses = queries()
    widths = []
    for copies in (1, 16):
        many = place_intervals(losses.repeat(copies), places.repeat(copies), ks=KS)
        for name, value in place_metrics(losses, places, ks=KS).items():
            assert many[name].low <= value <= many[name].high
        widths.append(many["mrr"].high - many["mrr"].low)
    assert widths[1] < widths[0] / 2
    with pytest.raises(ValueError, match="num must be at least 2 and confidence in"):
        place_intervals(losses, places, num=1)
    with pytest.raises(ValueError, match="intervals need queries that are all ranked"):
        place_intervals(losses, places * 0)
