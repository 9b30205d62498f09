"""Frames of polars and datasets of Hugging Face, where these are installed, say what Arrow's table says."""

import numpy as np
import pyarrow as pa
import pytest

from meshrec.data.faults import Faults
from meshrec.data.features import Features, Hashed, Label, Number, Vocabulary
from meshrec.data.frames import open_tables, to_table

FEATURES = Features(
    labels=(Label(column="clicked"),),
    features=(
        Number(name="price", missing=0.0),
        Vocabulary(name="user"),
        Hashed(name="tags", num_embeddings=32),
    ),
)


def table() -> pa.Table:
    rng = np.random.default_rng(0)
    users = [None if each == 0 else f"user {each} with a long name" for each in rng.integers(0, 9, 60)]
    return pa.table(
        {
            "clicked": rng.integers(0, 2, 60),
            "price": pa.array(rng.random(60), mask=rng.random(60) < 0.2),
            "user": users,
            "tags": [[f"t{tag}" for tag in rng.integers(0, 9, rng.integers(0, 4))] for _ in range(60)],
        }
    )


def samples(frame, features):
    return next(iter(open_tables(frame, features, Faults("raise")).windows(0, 0, 100)))


def check(frame):
    fitted = FEATURES.fit([table()])
    assert FEATURES.fit([to_table(frame)]).to_json() == fitted.to_json()
    expected, found = samples(table(), fitted), samples(frame, fitted)
    assert np.array_equal(found.dense, expected.dense)
    assert np.array_equal(found.labels, expected.labels)
    for one, other in zip(found.ids, expected.ids, strict=True):
        assert np.array_equal(one.values, other.values)
        assert np.array_equal(one.offsets, other.offsets)


def test_polars():
    polars = pytest.importorskip("polars")
    frame = polars.from_arrow(table())
    check(frame)
    check(frame.with_columns(polars.col("user").cast(polars.Categorical)))


def test_hugging_face():
    datasets = pytest.importorskip("datasets")
    dataset = datasets.Dataset(table())
    check(dataset)
    twice = datasets.Dataset(pa.concat_tables([table().slice(30), table().slice(0, 30)]))
    check(twice.select([*range(30, 60), *range(30)]))  # rows that indices choose


def test_whatever_streams_arrow():
    class Streams:
        def __arrow_c_stream__(self, requested_schema=None):
            return table().__arrow_c_stream__(requested_schema)

    check(Streams())
