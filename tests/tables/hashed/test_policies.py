"""Hashed tables against models of a few lines in plain Python, over drawn operations.

``MESHREC_DRAWS=1000000`` draws as many for each policy.
"""

import dataclasses
import functools
import os
import random
from collections import Counter

import pytest
import torch

from meshrec import EmbeddingBagCollection, EmbeddingBagConfig, Hashed, KeyedJaggedTensor, fuse
from meshrec.ops.index import mix
from meshrec.optim import SGD
from meshrec.tables.hashed.admission_eviction import set_event_time
from meshrec.tables.hashed.keys import (
    LFU,
    LRU,
    TTL,
    LowestNorm,
    MinCount,
    MinCountSketch,
    Probability,
    Score,
)
from meshrec.tables.table import RowBlock

OPERATIONS = int(os.environ.get("MESHREC_DRAWS", "4000"))
EDGES = [-1, 0, 1, 2**63 - 1, -(2**63), 2**62]


def table_of(keys, dim=2):
    config = EmbeddingBagConfig(name="t", embedding_dim=dim, feature_names=["f"], keys=keys)
    module = fuse(EmbeddingBagCollection([config]), optimizer=SGD(lr=0.1))
    return module, module.hashed_tables()["t"]


def step(module, ids, train=True):
    features = KeyedJaggedTensor(
        ["f"], torch.tensor(ids, dtype=torch.int64), lengths=torch.ones(len(ids)).int()
    )
    with torch.set_grad_enabled(train):
        out = module(features).values()
    if train:
        out.sum().backward()
    return out


@functools.cache
def key_of(number):
    return int(mix(torch.tensor([number]), 0))


class Model:
    """The IDs alive, with what a policy needs of them."""

    def __init__(self, max_rows, min_count=1, score=None, ttl=None):
        self.max_rows, self.min_count, self.score, self.ttl = max_rows, min_count, score, ttl
        self.alive, self.waiting, self.now = {}, Counter(), 0

    def step(self, ids):
        self.now += 1
        counts = Counter(ids)
        if self.ttl is not None and self.now % max(1, self.ttl // 16) == 0:
            for each in [i for i, (last, _) in self.alive.items() if last <= self.now - self.ttl]:
                if each not in counts:
                    del self.alive[each]
        new = []
        for each, count in counts.items():
            if each not in self.alive:
                self.waiting[each] += count
                if self.waiting[each] >= self.min_count:
                    new.append(each)
        excess = len(self.alive) + len(new) - self.max_rows
        if excess > 0:
            free = sorted((self.score(self, i), key_of(i), i) for i in self.alive if i not in counts)
            for _, _, each in free[: excess + self.max_rows // 64]:
                del self.alive[each]
        for each in new:
            self.alive[each] = (0, 0)
            del self.waiting[each]
        for each in set(counts) & self.alive.keys():
            last, uses = self.alive[each]
            self.alive[each] = (self.now, self.used(last, uses) + counts[each])

    half_life = None

    def used(self, last, uses):
        return (
            uses
            if self.half_life is None
            else uses / 2 ** (self.now // self.half_life - last // self.half_life)
        )


def last(model, each):
    return model.alive[each][0]


def uses(model, each):
    return model.used(*model.alive[each])


def drawn(steps, seed, spread):
    draw = random.Random(seed)
    for number in range(steps):
        low = number // 4
        yield [
            draw.choice(EDGES) if draw.random() < 0.1 else draw.randrange(low, low + spread)
            for _ in range(draw.randrange(1, 12))
        ]


CASES = {
    "lru": (Hashed(max_rows=20, evict=LRU()), {"score": last}),
    "lru of 130": (Hashed(max_rows=130, evict=LRU()), {"score": last}),
    "lfu": (Hashed(max_rows=20, evict=LFU()), {"score": uses}),
    "lfu with half life": (Hashed(max_rows=20, evict=LFU(half_life=5)), {"score": uses}),
    "ttl": (Hashed(max_rows=40, evict=TTL(steps=6)), {"score": last, "ttl": 6}),
    "count": (Hashed(max_rows=20, admit=MinCount(3), evict=LRU()), {"score": last, "min_count": 3}),
    "own score": (Hashed(max_rows=20, evict=Score(lambda rows: rows.ids)), {"score": lambda _, each: each}),
}


def follow(case, keys, options, batches):
    """Train on batches; compare the IDs alive with those of the model after each."""
    module, table = table_of(keys)
    model = Model(keys.max_rows, **options)
    if case == "lfu with half life":
        model.half_life = 5
    for ids in batches:
        step(module, ids)
        model.step(ids)
        table.release()
        found = table.ids_of(table.live_keys()[0]).tolist()
        assert set(found) == model.alive.keys()
        assert len(found) == table.num_alive == table.key_index.num_live <= keys.max_rows
        step(module, [*ids, 10**9], train=False)


@pytest.mark.parametrize("case", CASES)
def test_the_ids_alive_are_those_of_a_plain_model(case):
    keys, options = CASES[case]
    follow(case, keys, options, drawn(60, 1, 40 if keys.max_rows < 100 else 200))


def many(operations):
    """Yield batches of up to 400 IDs of a stream that drifts; some come often."""
    draw, done, low = random.Random(3), 0, 0
    while done < operations:
        low += draw.randrange(60)
        ids = [
            draw.choice(EDGES) if draw.random() < 0.01 else low + int(1500 * draw.random() ** 2)
            for _ in range(draw.randrange(1, 400))
        ]
        done += len(ids)
        yield ids


@pytest.mark.parametrize("case", CASES)
def test_many_operations_equal_a_plain_model(case):
    keys, options = CASES[case]
    follow(case, dataclasses.replace(keys, max_rows=700), options, many(OPERATIONS))


def test_the_smallest_rows_go():
    module, table = table_of(Hashed(max_rows=6, evict=LowestNorm()))
    step(module, [1, 2, 3, 4, 5, 6])
    keys, slots = table.live_keys()
    norms = dict(zip(table.ids_of(keys).tolist(), table.rows[slots].norm(dim=1).tolist(), strict=True))
    step(module, [7, 8])
    kept = set(sorted(norms, key=norms.get)[2:])
    assert set(table.ids_of(table.live_keys()[0]).tolist()) == kept | {7, 8}


def test_a_sketch_is_never_late_and_says_how_often_it_is_early():
    module, table = table_of(Hashed(max_rows=64, admit=MinCountSketch(3, bytes=64 * 16), evict=LRU()))
    counts, early = Counter(), 0
    for ids in drawn(50, 2, 300):
        step(module, ids)
        counts.update(ids)
        alive = set(table.ids_of(table.live_keys()[0]).tolist())
        assert all(each in alive for each in set(ids) if counts[each] >= 3)
        early += sum(counts[each] < 3 for each in alive & set(ids))
    assert 0 <= table.report.early < 0.2
    assert early < 0.2 * sum(counts.values())


def test_chance_is_a_function_of_seed_id_and_update():
    def alive(seed, p):
        module, table = table_of(Hashed(max_rows=10_000, admit=Probability(p), seed=seed))
        for number in range(4):
            step(module, list(range(1000 * number, 1000 * number + 1500)))
        return set(table.ids_of(table.live_keys()[0]).tolist())

    one = alive(0, 0.25)
    assert one == alive(0, 0.25) != alive(1, 0.25)
    assert alive(0, 1.0) == set(range(4500))
    assert 0.2 < len(one) / (0.25 * 6000) < 1.2


def test_rows_go_after_their_time_of_events():
    module, table = table_of(Hashed(max_rows=10, evict=TTL(seconds=60)))
    for seconds, ids in ((1000, [1, 2]), (1050, [2]), (1100, [3])):
        set_event_time(module, seconds)
        step(module, ids)
    assert set(table.ids_of(table.live_keys()[0]).tolist()) == {2, 3}


def test_rows_of_the_same_time_that_come_later_go_in_their_turn():
    """Event time stands still for some steps: rows may still get a score that others have had before."""
    module, table = table_of(Hashed(max_rows=192, evict=TTL(seconds=10**6)))
    draw, alive = random.Random(5), {}
    for number in range(120):
        set_event_time(module, seconds := number // 25)
        ids = {draw.randrange(number, number + 400) for _ in range(draw.randrange(1, 30))}
        excess = len(alive.keys() | ids) - 192
        if excess > 0:
            for each in sorted(alive.keys() - ids, key=lambda i: (alive[i], key_of(i)))[: excess + 3]:
                del alive[each]
        alive |= dict.fromkeys(ids, seconds)
        step(module, list(ids))
        assert set(table.ids_of(table.live_keys()[0]).tolist()) == alive.keys()


def test_rows_that_are_loaded_go_by_the_score_that_they_bring():
    module, table = table_of(Hashed(max_rows=640, evict=LRU()))
    for number in range(5):
        step(module, list(range(130 * number, 130 * (number + 1))))  # 20 of the first go
    old = [number for number in range(520, 650) if number % 2]
    block = RowBlock(mix(torch.tensor(old), 0), (0, 2), {"last": torch.zeros(len(old), dtype=torch.int32)})
    table.load([block])
    step(module, list(range(1000, 1040)))
    alive = set(table.ids_of(table.live_keys()[0]).tolist())
    assert table.num_alive == len(alive) == 630
    assert not alive & set(sorted(old, key=key_of)[:40])


def test_an_update_that_is_refused_leaves_the_order_of_eviction():
    module, table = table_of(Hashed(max_rows=64, evict=LRU()))
    for number in range(70):
        step(module, [number])
    with pytest.raises(ValueError, match=r"100 distinct.*IDs"):
        step(module, [*range(10, 60), *range(100, 150)])
    step(module, [200, 201, 202])
    assert set(table.ids_of(table.live_keys()[0]).tolist()) == {*range(10, 70), 200, 201, 202}


def test_refused_ids_read_their_first_rows_and_are_not_trained():
    module, table = table_of(Hashed(max_rows=10, admit=MinCount(3)))
    first = table.storage.initial.values(torch.tensor([5, -1]))
    for number in range(2):
        assert torch.equal(step(module, [5, -1]), first)
        assert table.report.refused == 2 * (number + 1)
    step(module, [5])
    assert not torch.equal(step(module, [5, -1], train=False), first)
    assert torch.equal(step(module, [-1], train=False), first[1:])
    assert table.ids_of(table.live_keys()[0]).tolist() == [5]


def test_a_batch_without_an_update_leaves_nothing_behind():
    module, table = table_of(Hashed(max_rows=10))
    step(module, [1, 2])
    ids, slots = table.live_keys()
    out = module(KeyedJaggedTensor(["f"], torch.tensor([7, 1]), lengths=torch.ones(2).int()))
    assert table.key_index.num_live == 3
    del out
    table.release()
    assert [each.tolist() for each in table.live_keys()] == [ids.tolist(), slots.tolist()]
    assert table.key_index.num_live == table.num_alive == 2


def test_a_row_that_goes_while_a_batch_has_it_begins_anew():
    module, table = table_of(Hashed(max_rows=2, evict=LRU()))
    step(module, [1, 2])
    ahead = module(KeyedJaggedTensor(["f"], torch.tensor([1]), lengths=torch.ones(1).int())).values()
    step(module, [3])  # 1 or 2 goes
    step(module, [4])
    assert set(table.ids_of(table.live_keys()[0]).tolist()) == {3, 4}
    ahead.sum().backward()
    expected = table.storage.initial.values(torch.tensor([1])) - 0.1
    assert torch.equal(step(module, [1], train=False), expected)
    assert 1 in table.ids_of(table.live_keys()[0]).tolist()


@pytest.mark.parametrize(
    ("evict", "match"),
    [(None, "'t'.*3.*max_rows.*2"), (LRU(), "3 distinct.*IDs")],
)
def test_too_many_ids_are_an_error_before_anything_changes(evict, match):
    module, table = table_of(Hashed(max_rows=2, evict=evict))
    if evict is None:
        step(module, [1])
    before = (table.num_alive, table.rows.clone())
    with pytest.raises(ValueError, match=match):
        step(module, [8, 9] if evict is None else [7, 8, 9])
    table.release()
    assert table.num_alive == before[0]
    assert torch.equal(table.rows[: len(before[1])][table.live_keys()[1]], before[1][table.live_keys()[1]])


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({}, "max_rows.*max_bytes"),
        ({"max_rows": 0}, r"max_rows.*\[1"),
        ({"max_rows": 5, "max_bytes": 5}, "max_rows.*max_bytes"),
        ({"max_rows": 5, "seed": -1}, "seed"),
        ({"max_rows": 5, "admit": LRU()}, "MinCount"),
        ({"max_rows": 5, "evict": "lru"}, "LFU"),
        ({"max_rows": 5, "admit": MinCountSketch(2, bytes=39)}, "8.*5 rows.*40.*39"),
    ],
)
def test_bad_choices_say_what_is_allowed(options, match):
    with pytest.raises(ValueError, match=match):
        Hashed(**options)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: MinCount(0), "k.*1"),
        (lambda: MinCountSketch(256, bytes=8), r"k.*\[1, 255\]"),
        (lambda: Probability(0.0), "p.*0.*1"),
        (lambda: LFU(half_life=0), "half_life"),
        (lambda: TTL(), "seconds"),
        (lambda: TTL(steps=1, seconds=1), "seconds"),
    ],
)
def test_bad_policies_say_what_is_allowed(make, match):
    with pytest.raises(ValueError, match=match):
        make()
