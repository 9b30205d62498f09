"""Samples of a step divided among ranks by the cost of their histories."""

import itertools

import numpy as np
import pytest

from meshrec.data import Dataset, Feature, InMemoryReader, Position, Ranges
from meshrec.data.balance import balanced_reader, balanced_shares


def zipf(num, seed=0):
    chances = np.arange(1.0, 513) ** -0.9
    generator = np.random.default_rng(seed)
    return generator.choice(np.arange(1, 513), num, p=chances / chances.sum())


def costs(lengths, shares):
    return [(lengths[each].sum(), (lengths[each] ** 2).sum()) for each in shares]


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize("num", [0, 1, 5, 64, 129])
def test_every_sample_has_one_rank_and_ranks_have_as_many_as_before(num, world_size):
    shares = balanced_shares(zipf(num), world_size)
    assert sorted(np.concatenate(shares)) == list(range(num))
    plain = [(rank + 1) * num // world_size - rank * num // world_size for rank in range(world_size)]
    assert [len(each) for each in shares] == plain


def test_costs_are_almost_equal():
    for seed in range(20):
        lengths = zipf(32, seed)
        (tokens, squares), (others, other_squares) = costs(lengths, balanced_shares(lengths, 2))
        assert abs(tokens - others) <= 0.1 * lengths.sum()
        assert abs(squares - other_squares) <= max(0.1 * (lengths**2).sum(), lengths.max() ** 2)


def dataset(train, *, sequence=True):
    history = Feature(name="history", num_embeddings=9, average_length=2.0, sequence=sequence)
    return Dataset(name="made up", features=(history,), num_dense=1, train=train, validation=None, test=None)


def reader(num=50):
    rows, lengths = np.arange(num), zipf(num)
    ids = {"history": Ranges(np.zeros(512, np.int64), np.zeros(num, np.int64), lengths)}
    return InMemoryReader(rows[:, None].astype(np.float32), (rows % 2).astype(np.float32), ids, seed=0)


def test_steps_have_the_samples_that_they_have_without_balancing():
    plain = reader()
    balanced = balanced_reader(dataset(plain))
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
    assert balanced_reader(dataset(plain, sequence=False)) is plain
    streamed = object()
    with caplog.at_level("INFO", "meshrec.data"):
        assert balanced_reader(dataset(streamed)) is streamed
    assert "the histories of dataset 'made up' are not balanced between ranks" in caplog.text
