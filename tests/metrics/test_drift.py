"""Drift of feature values against an independent computation, on ranks, and after a restart."""

import numpy as np
import pytest
import torch

from meshrec.metrics.drift import FeatureDrift, IdValues, NumberValues
from meshrec.sparse import KeyedJaggedTensor

START = 1_700_000_100 // 3600 * 3600
PADDING = torch.zeros(3, dtype=torch.int64)
CITY = IdValues("city", missing=0, unseen=(1, 3))
PRICE = NumberValues("price", edges=(0.0, 1.0, 2.0), missing=-9.0)


def drift():
    return FeatureDrift([CITY], [PRICE])


def batches(first, hours, cities, prices, *, size=50):
    """Batches of a stream with an event per second: a city each, or none for -1, and a price."""
    for start in range(first, first + 3600 * hours, size):
        ids = torch.tensor([cities(second) for second in range(start, start + size)])
        lengths = (ids >= 0).long()
        # Padding of three samples, and a key that is not watched.
        sparse = KeyedJaggedTensor(
            ["user", "city"],
            torch.cat([torch.ones(size, dtype=torch.int64), ids[ids >= 0]]),
            lengths=torch.cat([lengths[:0], torch.ones(size, dtype=torch.int64), PADDING, lengths, PADDING]),
        )
        dense = torch.tensor([[prices(second)] for second in range(start, start + size)])
        times = (START + torch.arange(start, start + size)) * 1_000_000
        yield sparse, torch.cat([dense, torch.zeros(3, 1)]), times


def add(drift, *args, **options):
    for batch in batches(*args, **options):
        drift.add(*batch)


def alone(value):
    return [value]


def steady(second):
    return 3 + second * 7 % 40


def price(second):
    return second % 31 / 10.0


def test_drift_is_the_index_of_shares_of_buckets():
    windows = drift()
    add(windows, 0, 2, steady, price)
    # Half of the cities are unknown or missing, and the price doubles.
    add(windows, 7200, 1, lambda s: (-1, 2, 0, steady(s))[s % 4], lambda s: 2 * price(s) if s % 5 else -9.0)
    found = windows.compute(alone)
    assert found["city"].missing == pytest.approx((0.5, 0.0))
    assert found["city"].unseen == pytest.approx((0.25, 0.0))
    assert found["city"].psi > 2
    assert found["price"].missing == pytest.approx((0.2, 0.0))
    seconds = np.arange(10800)
    prices = np.array([price(s) for s in seconds[:7200]])
    now = np.array([2 * price(s) for s in seconds[7200:] if s % 5])
    counts = [np.histogram(values, [-np.inf, 0, 1, 2, np.inf])[0] for values in (now, prices)]
    p, q = (
        (np.append(count, missing) + 0.5) / (count.sum() + missing + 2.5)
        for count, missing in zip(counts, (720, 0), strict=True)
    )
    assert found["price"].psi == pytest.approx(((p - q) * np.log(p / q)).sum())


def test_steady_values_have_no_drift():
    windows = drift()
    rng = np.random.default_rng(0)
    add(windows, 0, 3, lambda s: int(rng.zipf(1.5) % 1000), lambda s: float(rng.normal()))
    assert max(found.psi for found in windows.compute(alone).values()) < 0.03


def test_too_few_values_and_a_short_reference_have_no_drift():
    windows = drift()
    add(windows, 0, 1, steady, price)
    assert windows.compute(alone) == {}
    rare = FeatureDrift([CITY], [])
    rare.add(*next(batches(0, 1, steady, price)))
    rare.add(*next(batches(10800, 1, steady, price)))
    assert rare.compute(alone) == {}


def test_ranks_and_a_restart_change_nothing():
    def later(second):
        return steady(second) % 9

    whole, first, second = drift(), drift(), drift()
    for window in (whole, first):
        add(window, 0, 2, steady, price)
    first.compute(alone)
    first.add(*next(batches(7200, 1, later, price)))  # after the checkpoint
    continued = drift()
    continued.load_state_dict(first.state_dict())
    for number, batch in enumerate(batches(7200, 1, later, price)):
        whole.add(*batch)
        (continued, second)[number % 2].add(*batch)
    second._flush()
    local = second._local
    found = continued.compute(lambda value: [value, local])
    assert found == whole.compute(alone)
    other = FeatureDrift([CITY], [])
    other.load_state_dict(first.state_dict())
    assert other.compute(alone) == {}


def test_memory_is_bounded_and_old_values_leave():
    windows = drift()
    for hour in range(0, 60, 2):
        windows.add(*next(batches(3600 * hour, 1, steady, price)))
        windows.compute(alone)
    assert len(windows.state_dict()["slots"]) <= 13


def drifted(second):
    return 3 + second * 7 % 12


def frozen_drift(first, hours, cities, windows):
    add(windows, 3600 * first, hours, cities, price)
    return windows.compute(alone)["city"].psi


def test_a_frozen_reference_keeps_the_values_from_before():
    windows, moving = drift(), drift()
    for window in (windows, moving):
        add(window, 0, 2, steady, price)
        assert frozen_drift(2, 1, drifted, window) > 0.25
    windows.freeze()
    # The reference of the second has forgotten the values from before.
    assert frozen_drift(3, 26, drifted, moving) < 0.01
    psi = frozen_drift(3, 26, drifted, windows)
    assert windows.frozen_seconds == 26 * 3600
    continued = drift()
    continued.load_state_dict(windows.state_dict())
    windows.freeze()
    for window in (windows, continued):
        assert frozen_drift(29, 1, drifted, window) == pytest.approx(psi)
        assert window.frozen_seconds == 27 * 3600
    # Values during the alarm do not enter the reference.
    for window in (windows, continued):
        assert frozen_drift(30, 1, steady, window) < 0.05
        window.unfreeze()
        assert window.frozen_seconds == 0
        assert frozen_drift(31, 1, steady, window) < 0.05
        assert frozen_drift(32, 1, drifted, window) > 0.25
        # Until they are accepted.
        window.freeze()
        window.unfreeze(accept=True)
        assert frozen_drift(33, 26, drifted, window) < 0.01
