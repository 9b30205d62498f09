"""Metrics over sliding windows: those of the samples in the window, on any number of ranks."""

import numpy as np
import pytest
import torch
from sklearn.metrics import log_loss, roc_auc_score

from meshrec.metrics import SlidingMetrics
from meshrec.train.ranks import join

NUM, HOUR = 4000, 3600


def samples(seed=0, hours=5.0):
    rng = np.random.default_rng(seed)
    times = np.sort(rng.uniform(0, hours * HOUR, NUM))
    logits = rng.normal(-1, 1.5, NUM)
    # The rate of positives falls over time.
    labels = rng.random(NUM) < 1 / (1 + np.exp(-logits + times / 1e4))
    weights = rng.integers(0, 3, NUM).astype(float)
    columns = [torch.from_numpy(column).float() for column in (logits, labels.astype(float), weights)]
    return *columns, torch.from_numpy((1e6 * times).astype(np.int64))


def add(metrics, columns, size, rank=0, num_ranks=1):
    for number, batch in enumerate(zip(*(column.split(size) for column in columns), strict=True)):
        if number % num_ranks == rank:
            metrics.add(*batch)


def expected(columns):
    logits, labels, weights, times = (column.double().numpy() for column in columns)
    slot = HOUR / 60 * 1e6
    newest = times.max() // slot
    now = times // slot > newest - 60
    before = (times // slot > newest - 120) & ~now
    scores = 1 / (1 + np.exp(-logits))
    loss = log_loss(labels[now], scores[now], sample_weight=weights[now])
    rate = np.average(labels[before], weights=weights[before])
    background = log_loss(labels[now], np.full(now.sum(), rate), sample_weight=weights[now])
    return {
        "auc@hour": roc_auc_score(labels[now], scores[now], sample_weight=weights[now]),
        "loss@hour": loss,
        "calibration@hour": (weights * scores)[now].sum() / (weights * labels)[now].sum(),
        "normalized_entropy@hour": loss / background,
        "samples@hour": weights[now].sum(),
    }


def test_the_metrics_are_those_of_the_newest_hour():
    columns = samples()
    metrics = SlidingMetrics({"hour": HOUR, "day": 24 * HOUR})
    for part in (slice(0, 900), slice(900, 3000), slice(3000, None)):
        add(metrics, [column[part] for column in columns], 100)
        computed = metrics.compute(lambda value: [value])
    for name, value in expected(columns).items():
        assert computed[name] == pytest.approx(value, abs=3e-4 if "auc" in name else 1e-6), name
    assert computed["samples@day"] == columns[2].sum()
    assert "normalized_entropy@day" not in computed  # there was no day before


def on_ranks(columns):
    ranks = join("cpu")
    metrics = SlidingMetrics({"hour": HOUR})
    add(metrics, columns, 40, ranks.rank, ranks.size)
    computed = metrics.compute(ranks.collect)
    return computed, metrics.state_dict()


def test_all_ranks_have_the_metrics_of_all_samples_and_continue_from_a_state(ranks):
    columns = samples()
    first = [column[:3000] for column in columns]
    (computed, state), other = ranks(2).run(on_ranks, first)
    assert computed == other[0]
    alone, apart = SlidingMetrics({"hour": HOUR}), SlidingMetrics({"hour": HOUR})
    add(alone, first, 40)
    for name, value in alone.compute(lambda value: [value]).items():
        assert computed[name] == pytest.approx(value, rel=1e-12)
    apart.load_state_dict({**state})
    for metrics in (alone, apart):
        add(metrics, [column[3000:] for column in columns], 40)
    values = [metrics.compute(lambda value: [value]) for metrics in (alone, apart)]
    assert values[0] == pytest.approx(values[1])


def test_memory_is_bounded_whatever_the_times():
    metrics = SlidingMetrics({"hour": HOUR})
    times = torch.arange(5000) * 400 * 1_000_000
    add(metrics, [torch.zeros(5000), torch.arange(5000) % 2.0, torch.ones(5000), times.flip(0)], 50)
    metrics.compute(lambda value: [value])
    add(metrics, [torch.zeros(5000), torch.arange(5000) % 2.0, torch.ones(5000), times], 50)
    assert metrics.compute(lambda value: [value])["samples@hour"] == 2 * 9
    assert len(metrics.state_dict()["hour"]["slots"]) <= 120


def test_a_window_without_samples_or_of_one_class_has_no_auc():
    metrics = SlidingMetrics({"hour": HOUR})
    assert metrics.compute(lambda value: [value]) == {}
    metrics.add(torch.zeros(3), torch.ones(3), None, torch.tensor([0, 1, 2]))
    assert "auc@hour" not in metrics.compute(lambda value: [value])
    metrics.add(torch.zeros(1), torch.full((1,), 2.0), None, torch.tensor([3]))
    with pytest.raises(ValueError, match=r"labels\[0\] is 2"):
        metrics.compute(lambda value: [value])
