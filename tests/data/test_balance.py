"""Samples of a step divided among ranks by the cost of their histories."""

import itertools

import numpy as np
import pytest

from meshrec.data import Dataset, Feature, InMemoryReader, Position, Ranges
from meshrec.data.balance import EVEN_LENGTH, balanced_reader, balanced_shares


def zipf(num, seed=0):
    chances = np.arange(1.0, 513) ** -0.9
    generator = np.random.default_rng(seed)
    return generator.choice(np.arange(1, 513), num, p=chances / chances.sum())


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize("num", [0, 1, 5, 64, 129])
@pytest.mark.parametrize("width", [0, 64])
def test_every_sample_has_one_rank_and_ranks_have_as_many_as_before(num, world_size, width):
    shares = balanced_shares(zipf(num), world_size, width)
    assert sorted(np.concatenate(shares)) == list(range(num))
    plain = [(rank + 1) * num // world_size - rank * num // world_size for rank in range(world_size)]
    assert [len(each) for each in shares] == plain


@pytest.mark.parametrize("width", [0, 64])
def test_costs_are_almost_equal(width):
    for seed in range(20):
        lengths = zipf(32, seed)
        costs = lengths + (lengths**2 / (EVEN_LENGTH * width) if width else 0)
        one, other = (costs[each].sum() for each in balanced_shares(lengths, 2, width))
        assert abs(one - other) <= max(0.02 * costs.sum(), 2 * costs.max() - costs.sum())


def dataset(train, *, sequence=True):
    history = Feature(name="history", num_embeddings=9, average_length=2.0, sequence=sequence)
    return Dataset(name="made up", features=(history,), num_dense=1, train=train, validation=None, test=None)


def reader(num=50):
    rows, lengths = np.arange(num), zipf(num)
    ids = {"history": Ranges(np.zeros(512, np.int64), np.zeros(num, np.int64), lengths)}
    return InMemoryReader(rows[:, None].astype(np.float32), (rows % 2).astype(np.float32), ids, seed=0)


def test_steps_have_the_samples_that_they_have_without_balancing():
    plain = reader()
    balanced = balanced_reader(dataset(plain), 64)
    for position in (Position(), Position(1, 16)):
        found = [
            [
                [batch.rows.tolist() for batch in each.batches(8, rank=rank, world_size=2, position=position)]
                for rank in (0, 1)
            ]
            for each in (balanced, plain)
        ]
        steps, expected = (
            [sorted(itertools.chain(*step)) for step in zip(*each, strict=True)] for each in found
        )
        assert steps == expected
        assert found[0] != found[1]
    alone = [[batch.rows.tolist() for batch in each.batches(16)] for each in (balanced, plain)]
    assert alone[0] == alone[1]


def test_what_has_no_history_or_is_streamed_stays_as_it_is(caplog):
    plain = reader()
    assert balanced_reader(dataset(plain, sequence=False), 64) is plain
    streamed = object()
    with caplog.at_level("INFO", "meshrec.data"):
        assert balanced_reader(dataset(streamed), 64) is streamed
    assert "the histories of dataset 'made up' are not balanced between ranks" in caplog.text
