import pytest
import torch

from meshrec.compat.bridge import hash_mc_metrics
from meshrec.compat.bridge.hash_managed_collisions import HashZchEvictionConfig

CPU = torch.device("cpu")


class Backend(hash_mc_metrics.ScalarLoggerBackend):
    def __init__(self):
        self.reports = []

    def report(self, log_message, name, run_type, step, rate_metrics):
        self.reports.append((name, run_type, step, rate_metrics))


def ids(*values):
    return torch.tensor(values)[:, None]


def test_rates_of_a_batch_by_hand(monkeypatch):
    monkeypatch.setattr(hash_mc_metrics.time, "time", lambda: 3600.0 * 100)
    backend = Backend()
    logger = hash_mc_metrics.ScalarLogger("t", 4, 2, 0, 1, 1, CPU, False, backend=backend)
    # Of 4 IDs, 7 has its row, 8 gets a free one, 9 gets that of an evicted ID, and the last shares a row.
    logger.update(
        ids(7, -1, 5, -1),
        ids(7, 8, 9, -1),
        torch.tensor([7, 8, 9, 10]),
        torch.tensor([0, 1, 2, 0]),
        torch.arange(4),
        torch.tensor([2, 2]),
        ids(0, 0, 90, 0),
        HashZchEvictionConfig(["f"], single_ttl=5),
    )
    logger("train", ids(7, 8, 9, -1))
    assert backend.reports == []
    logger("train", ids(7, 8, 9, -1))
    [(name, run_type, step, rates)] = backend.reports
    assert (name, run_type, step) == ("t", "train", 2)
    assert rates == {
        "hit_rate": 0.25,
        "insert_rate": 0.25,
        "collision_rate": 0.5,
        "eviction_rate": 0.25,
        "opt_in_rate": 1.0,
        "avg_eviction_age": 15.0,
        "table_usage_ratio": 0.75,
    }
    assert not logger.should_report()  # the counts start again


def test_buckets_must_divide_the_rows():
    with pytest.raises(ValueError, match=r"10.*4"):
        hash_mc_metrics.ScalarLogger("t", 10, 1, 0, 4, 0, CPU, False)
