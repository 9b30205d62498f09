"""Sources of next items: a log in files, MovieLens, and published data in its original format."""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from meshrec.cli.train import main as train
from meshrec.data import DataError
from meshrec.data.log_columns import LogColumns
from meshrec.train import BooksRatings, Log, MovieLensSequences, RunFolder, resolve
from meshrec.train.recipes import RECIPES
from tests.train.movies import LENGTH, NUM_MOVIES, NUM_USERS, write_movies


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_movies(tmp_path_factory.mktemp("ml-circle"))


def bags(reader, key):
    (batch,) = reader.batches(10_000)
    return [bag.tolist() for bag in batch.sparse[key].to_dense()]


def test_movielens_is_a_log_with_genres_and_years(folder):
    data = MovieLensSequences(path=folder, history=4, windows=False).load()
    assert data.name == f"{folder.name}-sequences"
    assert data.train.num_samples == NUM_USERS * (LENGTH - 3)
    assert data.catalogue.stride() == NUM_MOVIES
    assert [each.name for each in data.features[4:]] == ["user", "genres", "year"]
    years = dict(zip(*(data.catalogue[key].values().tolist() for key in ("item", "year")), strict=True))
    for (item,), (year,) in zip(bags(data.train, "item"), bags(data.train, "year"), strict=True):
        assert year == years[item]
    assert {len(each) for each in bags(data.train, "genres")} == {2}


def test_files_of_a_log_are_read_as_one(tmp_path):
    rng = np.random.default_rng(0)
    table = pa.table({"u": rng.integers(0, 9, 90), "i": rng.integers(0, 20, 90), "t": np.arange(90) * 1000})
    for number in range(3):
        pq.write_table(table.slice(30 * number, 30), tmp_path / f"{number}.parquet")
    columns = LogColumns(user="u", item="i", time="t", time_unit="ms")
    data = Log(log=(str(tmp_path),), columns=columns).load()
    whole = Log(log=(str(tmp_path / "*.parquet"),), columns=columns).load()
    for key in ("history", "times", "seen", "item"):
        assert bags(data.test, key) == bags(whole.test, key)
    assert sum(map(len, bags(data.test, "seen"))) == 90 - 9
    source = Log(log=(str(tmp_path),), columns=columns)
    with pytest.raises(ValueError, match="scores"):
        source.dataset_for_scoring(source.fit(), str(tmp_path), labelled=False)


def test_published_data_is_checked_by_size_and_columns(folder, tmp_path):
    with pytest.raises(DataError, match=r"420 ratings.*1,000,209"):
        replace(resolve("hstu_ml1m").data, path=folder).load()
    source = BooksRatings(path=tmp_path, num_ratings=None)
    with pytest.raises(DataError, match=r"ratings_Books.csv"):
        source.load()
    lines = [f"A{n % 7},B{n % 11},{n % 5 + 1}.0,{1_000_000 + n}" for n in range(200)]
    (tmp_path / "ratings_Books.csv").write_text("\n".join([*lines, "A9,B1,5.0,5"]) + "\n")
    data = source.load()
    assert data.catalogue.stride() == 11
    assert len(bags(data.test, "item")) == 7  # A9 has too few ratings
    with pytest.raises(DataError, match=r"201 ratings.*22,507,155"):
        replace(source, num_ratings=BooksRatings().num_ratings).load()
    (tmp_path / "ratings_Books.csv").write_text("user,item,rating,time\na,b,5.0,x\n")
    with pytest.raises(DataError, match="seconds"):
        source.load()


def test_published_recipes_have_the_published_sizes():
    for name, width, length, num_negatives in (
        ("hstu_ml1m", 50, 200, 128),
        ("hstu_large_ml20m", 256, 200, 128),
        ("sasrec_books", 64, 50, 512),
    ):
        recipe = RECIPES[name]()
        assert recipe.name == name
        assert (recipe.model.embedding_dim, recipe.data.history) == (width, length)
        assert recipe.model.softmax.num_negatives == num_negatives
    large = RECIPES["hstu_large_books"]().model
    assert (large.num_blocks, large.num_heads, large.dropout) == (16, 8, 0.5)


def test_data_names_the_folder_of_a_recipe(folder, tmp_path):
    options = ["--training.max-steps", "2", "--model.embedding-dim", "8", "--data.num-ratings", "none"]
    arguments = ["sasrec_ml1m", "--data", str(folder), "--runs", str(tmp_path), "--name", "r", "--quiet"]
    assert train([*arguments, *options]) == 0
    assert RunFolder(tmp_path / "r").read_json("config.json")["data"]["name"] == f"{folder.name}-sequences"
