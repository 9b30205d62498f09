import numpy as np

from meshrec.data.propose_crosses import best_crosses, ranges_gain


def drawn(num=8000):
    rng = np.random.default_rng(0)
    first, second, third = (rng.integers(0, 6, num) for _ in range(3))
    return rng, first, second, third


def test_a_cross_that_tells_more_is_found():
    rng, first, second, third = drawn()
    chance = np.where((first % 2) == (second % 2), 0.7, 0.3)
    labels = (rng.random(len(first)) < chance).astype(float)
    found = best_crosses({"a": first, "b": second, "c": third}, labels)
    assert [each[:2] for each in found] == [("a", "b")]


def test_columns_that_add_up_are_not_crossed():
    rng, first, second, third = drawn()
    logits = 0.4 * (first - 2.5) + 0.4 * (second - 2.5)
    labels = (rng.random(len(first)) < 1 / (1 + np.exp(-logits))).astype(float)
    assert best_crosses({"a": first, "b": second, "c": third}, labels) == []


def test_ranges_gain_on_a_curve_and_not_on_a_line():
    rng = np.random.default_rng(0)
    x = rng.normal(size=8000)
    for logits, pays in ((2 * np.abs(x) - 2, True), (x, False)):
        labels = (rng.random(8000) < 1 / (1 + np.exp(-logits))).astype(float)
        assert ranges_gain(x, labels).is_significant is pays
    assert not ranges_gain(np.full(8000, np.nan), labels).is_significant
