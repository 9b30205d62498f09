import itertools
import random

import pytest

from meshrec.stages.choosing import UnitCost, best_cut, bound


def step_seconds(costs, stage_of, num_stages, num_splits, links, needs):
    """By the definition; links are paid where a stage ends."""
    own = [[c for c, s in zip(costs, stage_of, strict=True) if s == stage] for stage in range(num_stages)]
    ends = [sum(1 << u for u, s in enumerate(stage_of) if s <= stage) for stage in range(num_stages - 1)]
    carried = [links.get(end, 0.0) for end in ends]
    forward, backward = (
        [sum(c.forward for c in each) for each in own],
        [sum(c.backward for c in each) for each in own],
    )
    slowest = max([*forward, *carried]) + max([*backward, *carried])
    return sum(forward) + sum(backward) + 2 * sum(carried) + (num_splits - 1) * slowest


def best_by_trying(costs, needs, num_stages, num_splits, links):
    """All assignments in which no unit needs a later stage and no stage is empty."""
    found = []
    for stage_of in itertools.product(range(num_stages), repeat=len(costs)):
        if len(set(stage_of)) < num_stages:
            continue
        if any(stage_of[n] > stage_of[u] for u, own in enumerate(needs) for n in own):
            continue
        found.append(step_seconds(costs, stage_of, num_stages, num_splits, links, needs))
    return min(found)


def draw_costs(generator, count):
    return [UnitCost(generator.random() ** 3, generator.random() ** 3) for _ in range(count)]


def test_chains_are_cut_as_well_as_by_trying_all():
    generator = random.Random(0)
    for _ in range(10_000):
        count = generator.randint(1, 7)
        num_stages, num_splits = generator.randint(1, min(count, 3)), generator.randint(1, 20)
        costs = draw_costs(generator, count)
        needs = [set() if u == 0 else {u - 1} for u in range(count)]
        links = {(1 << u) - 1: generator.random() * 0.2 for u in range(1, count) if generator.random() < 0.3}
        cut = best_cut(costs, needs, num_stages, num_splits, links)
        expected = min(
            step_seconds(
                costs, [sum(u >= e for e in ends) for u in range(count)], num_stages, num_splits, links, needs
            )
            for ends in itertools.combinations(range(1, count), num_stages - 1)
        )
        assert cut.seconds == pytest.approx(expected, rel=1e-12)
        assert cut.seconds == pytest.approx(
            step_seconds(costs, cut.stage_of, num_stages, num_splits, links, needs), rel=1e-12
        )
        assert cut.is_best
        assert bound(cut._replace(is_best=False), costs, num_stages, num_splits) <= cut.seconds * (1 + 1e-12)


def test_branches_are_cut_as_well_as_by_trying_all():
    generator = random.Random(1)
    for _ in range(150):
        count = generator.randint(2, 6)
        num_stages = generator.randint(2, min(count, 3))
        needs = [{n for n in range(u) if generator.random() < 0.4} for u in range(count)]
        costs = draw_costs(generator, count)
        cut = best_cut(costs, needs, num_stages, 8)
        assert cut.seconds == pytest.approx(best_by_trying(costs, needs, num_stages, 8, {}), rel=1e-12)
        assert all(cut.stage_of[n] <= cut.stage_of[u] for u, own in enumerate(needs) for n in own)


def test_many_branches_are_cut_along_the_order():
    costs = [UnitCost(1.0, 2.0)] * 40  # 2 ** 40 sets of branches
    cut = best_cut(costs, [set() for _ in costs], 4, 16)
    assert [cut.stage_of.count(stage) for stage in range(4)] == [10] * 4
    assert not cut.is_best
    assert cut.seconds == pytest.approx(bound(cut, costs, 4, 16))


def test_more_stages_than_units_are_refused():
    with pytest.raises(ValueError, match=r"2 units.*make 3"):
        best_cut([UnitCost(1.0, 1.0)] * 2, [set(), {0}], 3, 4)
