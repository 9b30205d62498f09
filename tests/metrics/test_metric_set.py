import math

import pytest
import torch
import torch.distributed as dist
from sklearn.metrics import average_precision_score

from meshrec.metrics import MetricSet, binary_metrics


def samples(num=4000):
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(num, generator=generator) - 1
    labels = (torch.rand(num, generator=generator) < torch.sigmoid(logits)).float()
    return logits, labels, torch.rand(num, generator=generator)


def close(found, expected):
    assert found.keys() == expected.keys()
    assert found["auc"] == pytest.approx(expected["auc"], abs=1e-5)
    others = expected.keys() - {"auc"}
    assert [found[name] for name in others] == pytest.approx([expected[name] for name in others], rel=1e-9)


def test_windows_and_lifetime():
    metrics, (logits, labels, weights) = MetricSet(), samples()
    for part in range(0, 3000, 500):
        at = slice(part, part + 500)
        metrics.update(logits[at, None], labels[at], weights[at])
    metrics.compute()
    metrics.update(logits[3000:], labels[3000:], weights[3000:])
    found = metrics.compute()
    close(found.window, binary_metrics(logits[3000:], labels[3000:], weights[3000:]))
    close(found.lifetime, binary_metrics(logits, labels, weights))
    assert metrics.compute().window == {}


def test_many_samples_are_summed_up_on_the_way():
    metrics, (logits, labels, _) = MetricSet(), samples(70_000)
    metrics.update(logits, labels)
    assert metrics._pending == []
    close(metrics.compute().window, binary_metrics(logits, labels))


def test_probabilities_serve_too():
    metrics, (logits, labels, _) = MetricSet(), samples()
    metrics.update_probabilities(torch.sigmoid(logits.double()), labels)
    close(metrics.compute().window, binary_metrics(logits, labels))
    metrics.update_probabilities(torch.tensor([0.0, 1.0]), torch.tensor([0.0, 1.0]))
    assert metrics.compute().window["loss"] == pytest.approx(0, abs=1e-10)


def test_metrics_of_torchmetrics_can_join():
    classification = pytest.importorskip("torchmetrics.classification")
    metrics = MetricSet(extra={"exact": classification.BinaryAUROC()})
    logits, labels, _ = samples()
    metrics.update(logits[:2000], labels[:2000])
    metrics.compute()
    metrics.update(logits[2000:], labels[2000:])
    found = metrics.compute()
    assert found.window["exact"] == pytest.approx(found.window["auc"], abs=1e-5)
    assert found.lifetime["exact"] == pytest.approx(binary_metrics(logits, labels)["auc"], abs=1e-6)
    assert "exact" not in metrics.compute().window


def test_saving_and_loading():
    metrics, (logits, labels, _) = MetricSet(num_bins=1024), samples()
    metrics.update(logits[:2000], labels[:2000])
    metrics.compute()
    restored = MetricSet(num_bins=1024)
    restored.update(logits, labels)  # a window that the load drops
    restored.load_state_dict(metrics.state_dict())
    for each in (metrics, restored):
        each.update(logits[2000:], labels[2000:])
    assert metrics.compute() == restored.compute()
    with pytest.raises(ValueError, match=r"2054 sums.*22.*num_bins"):
        MetricSet(num_bins=8).load_state_dict(metrics.state_dict())


def test_state_saved_without_sum_of_negatives_is_read():
    metrics, (logits, labels, weights) = MetricSet(num_bins=64), samples()
    metrics.update(logits, labels, weights)
    expected = metrics.compute().lifetime
    sums = metrics.state_dict()["lifetime"]
    restored = MetricSet(num_bins=64)
    restored.load_state_dict({"lifetime": torch.cat([sums[:5], sums[6:]])})
    assert restored.compute().lifetime == pytest.approx(expected, rel=1e-12)


def of_rank():
    metrics, at = MetricSet(), slice(dist.get_rank() * 2000, dist.get_rank() * 2000 + 2000)
    logits, labels, _ = samples()
    metrics.update(logits[at], labels[at])
    return metrics.compute()


def test_all_ranks_count(ranks):
    found = ranks(2).run(of_rank)
    logits, labels, _ = samples()
    assert found[0] == found[1]
    close(found[0].window, binary_metrics(logits, labels))


def test_wrong_arguments():
    with pytest.raises(ValueError, match=r"\[2, 3\]"):
        MetricSet().update(torch.ones(2), torch.ones(3))
    with pytest.raises(ValueError, match=r"num_bins.*2.*1"):
        MetricSet(num_bins=1)


def test_nan_logits_leave_everything_undefined_unless_their_weight_is_0():
    metrics, labels = MetricSet(), torch.tensor([0.0, 1.0, 1.0])
    logits = torch.tensor([-1.0, math.nan, torch.inf])
    metrics.update(logits, labels, torch.tensor([1.0, 0.0, 1.0]))
    assert metrics.compute().window["auc"] == 1.0
    metrics.update(logits, labels)
    found = metrics.compute().window
    assert found.keys() == {"auc", "loss", "accuracy", "calibration", "normalized_entropy"}
    assert all(math.isnan(value) for value in found.values())
    with pytest.raises(ValueError, match=r"weights\[1\].*-1.0"):
        metrics.update(logits, labels, torch.tensor([1.0, -1.0, 1.0]))


def test_auc_is_within_half_the_share_of_pairs_in_one_bin():
    metrics, (logits, labels, _) = MetricSet(num_bins=16), samples()
    metrics.update(logits, labels)
    bins = ((logits + 16) / 2).long()
    positive, negative = (
        torch.bincount(bins, of_class, 16) / of_class.sum() for of_class in (labels, 1 - labels)
    )
    error = abs(metrics.compute().window["auc"] - binary_metrics(logits, labels)["auc"])
    assert 0 < error <= float(positive @ negative) / 2


def test_auprc_is_that_of_the_bins():
    metrics, (logits, labels, weights) = MetricSet(num_bins=64, auprc=True), samples()
    metrics.update(logits, labels, weights)
    found = metrics.compute().window["auprc"]
    bins = ((logits + 16) * 2).long()
    assert found == pytest.approx(average_precision_score(labels, bins, sample_weight=weights), abs=1e-12)
    metrics.update(torch.tensor([-9.0, -9.0, 9.0]), torch.tensor([0.0, 1.0, 1.0]))
    assert metrics.compute().window["auprc"] == pytest.approx((1 + 2 / 3) / 2)
    metrics.update(torch.tensor([math.nan, 1.0]), torch.tensor([0.0, 1.0]))
    assert math.isnan(metrics.compute().window["auprc"])
    metrics.update(torch.ones(2), torch.ones(2))
    assert "auprc" not in metrics.compute().window
    fine = MetricSet(auprc=True)
    fine.update(logits, labels, weights)
    exact = average_precision_score(labels, logits, sample_weight=weights)
    assert fine.compute().window["auprc"] == pytest.approx(exact, abs=1e-3)


def test_importing_is_light(run_code):
    heavy = "('torchmetrics', 'sklearn', 'pandas', 'pyarrow')"
    code = f"""import sys, torch, meshrec.metrics, meshrec.data
assert meshrec.metrics.binary_metrics(torch.zeros(2), torch.arange(2))["auc"] == 0.5
print([name for name in {heavy} if name in sys.modules])"""
    assert run_code(code).stdout.strip() == "[]"


def test_logits_in_place_of_probabilities_are_refused():
    metrics = MetricSet()
    with pytest.raises(ValueError, match=r"probabilities\[1\] is -0.5"):
        metrics.update_probabilities(torch.tensor([0.5, -0.5]), torch.tensor([1.0, 0.0]))
    metrics.update_probabilities(torch.tensor([1 + 1e-7, 0.0]), torch.tensor([1.0, 0.0]))
    assert metrics.compute().window["auc"] == 1.0
