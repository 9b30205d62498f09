import itertools

import numpy as np
import pytest

from meshrec.data import DataError, movielens_sequences
from tests.train.movies import LENGTH, NUM_MOVIES, NUM_USERS, write_movies


def bags(batch, key):
    return [bag.tolist() for bag in batch.sparse[key].to_dense()]


def whole(reader):
    (batch,) = reader.batches(10_000)
    return batch


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_movies(tmp_path_factory.mktemp("ml-made-up"))


def test_the_last_two_of_each_user_are_held_out(folder):
    data = movielens_sequences(path=folder, history=5)
    validation, test = whole(data.validation), whole(data.test)
    assert len(validation) == len(test) == NUM_USERS
    for before, after in ((validation, test),):
        for sequence, target, seen, next_seen in zip(
            *(bags(before, key) for key in ("history", "movie", "seen")), bags(after, "seen"), strict=True
        ):
            assert len(seen) == LENGTH - 2
            assert sequence == seen[-5:]
            assert next_seen == seen + target
    assert data.item == "movie"
    assert data.seen == "seen"


@pytest.mark.parametrize("history", [1, 5, 11, 50])
def test_windows_hold_every_pair_of_neighbours_once(folder, history):
    data = movielens_sequences(path=folder, history=history)
    train = whole(data.train)
    pairs = []
    for sequence, targets, seen in zip(
        *(bags(train, key) for key in ("history", "movie", "seen")), strict=True
    ):
        assert 1 <= len(sequence) == len(targets) <= history
        assert sequence[1:] == targets[:-1]
        assert seen == []
        pairs += zip(sequence, targets, strict=True)
    validation = whole(data.validation)
    expected = [pair for seen in bags(validation, "seen") for pair in itertools.pairwise(seen)]
    assert sorted(pairs) == sorted(expected)


def test_single_movies_know_what_is_before_and_what_they_are(folder):
    data = movielens_sequences(path=folder, history=4, windows=False)
    train = whole(data.train)
    assert len(train) == NUM_USERS * (LENGTH - 3)
    assert all(len(each) == 1 for key in ("movie", "user", "year") for each in bags(train, key))
    assert all(1 <= len(each) <= 4 for each in bags(train, "history"))
    catalogue = data.catalogue
    assert catalogue.stride() == NUM_MOVIES
    assert catalogue["movie"].values().tolist() == list(range(NUM_MOVIES))
    years = catalogue["year"].values().tolist()
    for (movie,), (year,), genres in zip(
        *(bags(train, key) for key in ("movie", "year", "genres")), strict=True
    ):
        assert year == years[movie]
        assert len(genres) == 2


def test_ties_are_in_no_order_of_the_file(tmp_path):
    """Of 40 movies in one second the file's order would always say the larger one comes next."""
    (tmp_path / "movies.csv").write_text("movieId,title,genres\n1,Odd,Drama\n")
    lines = [f"1,{movie},3.0,77" for movie in range(40)] + [f"2,{movie},3.0,{movie}" for movie in range(40)]
    (tmp_path / "ratings.csv").write_text("\n".join(["userId,movieId,rating,timestamp", *lines]) + "\n")
    orders = []
    for seed in (0, 0, 1):
        test = whole(movielens_sequences(path=tmp_path, seed=seed).test)
        orders.append(
            [seen + target for seen, target in zip(bags(test, "seen"), bags(test, "movie"), strict=True)]
        )
    assert orders[0] == orders[1] != orders[2]
    tied, timed = orders[0]
    assert (np.diff(tied) < 0).any()
    assert timed == sorted(timed)


def test_too_few_ratings_and_wrong_arguments(tmp_path):
    (tmp_path / "movies.csv").write_text("movieId,title,genres\n1,Odd,Drama\n")
    (tmp_path / "ratings.csv").write_text("userId,movieId,rating,timestamp\n1,1,3.0,5\n1,2,3.0,6\n")
    with pytest.raises(DataError, match="no user has three ratings, so that none can be left out"):
        movielens_sequences(path=tmp_path)
    with pytest.raises(ValueError, match="history must be >= 1, got 0"):
        movielens_sequences(path=tmp_path, history=0)
