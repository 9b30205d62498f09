from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from meshrec.data import Split
from meshrec.data.features import Buckets, Features, Hashed, Label, Number, Vocabulary
from meshrec.data.features.fitting import fit_features, fit_on_ranks
from meshrec.data.features.merging import StateMerger
from meshrec.data.frames import open_tables
from meshrec.data.parquet import open_parquet
from meshrec.testing import RankError
from meshrec.train import join

FEATURES = Features(
    labels=(Label(column="y"),),
    features=(
        Number(name="price", clip=(0.01, 0.99), standardize=True, num_bins=9, missing=0.0),
        Buckets(name="age", num_buckets=5),
        Vocabulary(name="user", min_count=2, num_unseen=3, table="people"),
        Vocabulary(name="friend", min_count=2, num_unseen=3, table="people"),
        Vocabulary(name="item", max_size=300),
        Vocabulary(name="shop"),
        Vocabulary(name="tags", max_length=2),
        Hashed(name="code", num_embeddings=50),
    ),
)


def visits(num: int, seed: int, *, floats: bool = False) -> pa.Table:
    """Draw rows with many equal counts, and missing values. Other files have other types for `item`."""
    rng = np.random.default_rng(seed)
    items, present = rng.zipf(1.2, num) % 2000, rng.random(num) > 0.1
    shops = rng.choice([2**53 + 1, 2**60, -5, 7], num)
    return pa.table(
        {
            "y": rng.integers(0, 2, num),
            "price": pa.array(rng.lognormal(size=num), mask=~present),
            "age": pa.array(rng.integers(0, 9, num), mask=~present),
            "user": pa.array([f"user-{n}" for n in rng.integers(0, num, num)], mask=~present),
            "friend": pa.array([f"user-{n}" for n in rng.integers(0, num, num)]).dictionary_encode(),
            "item": pa.array(items, pa.float64() if floats else pa.int32(), mask=~present),
            "shop": pa.array(shops.astype(np.uint64)) if seed % 2 else pa.array(shops),
            "tags": [[f"t{n}" for n in rng.integers(0, 30, length)] for length in rng.integers(0, 5, num)],
            "code": pa.array(rng.integers(0, 99, num)).cast(pa.decimal128(20, 0)),
            "time": rng.integers(0, num // 3, num),
        }
    )


def write_visits(folder, num=20_000):
    for number in range(3):
        table = visits(num, number, floats=number == 2)
        pq.write_table(table, folder / f"{number}.parquet", row_group_size=num // (2 * number + 1))
    return folder


def fit(path, features, split):
    return fit_on_ranks(features, open_parquet, path, join("cpu").axis, split=split)


@pytest.mark.parametrize(
    "split",
    [None, Split(by="time", column="time"), Split(by="hash", column="user"), Split(by="random", seed=3)],
    ids=["all", "time", "hash", "random"],
)
def test_the_result_does_not_depend_on_the_number_of_ranks(tmp_path, ranks, split):
    write_visits(tmp_path)
    expected = fit_features(FEATURES, open_parquet, tmp_path, split=split).to_json()
    assert len(expected["features"][2]["vocabulary"]) > 5000
    assert set(expected["features"][5]["vocabulary"]) >= {2**53 + 1, 2**60, 2**64 - 5, 7}
    for size in (1, 2, 3):
        first, *others = ranks(size).run(fit, tmp_path, FEATURES, split)
        assert first.to_json() == expected
        assert others == [None] * (size - 1)


def test_ranks_may_have_no_rows(tmp_path, ranks):
    pq.write_table(visits(3, 0).slice(0, 2), tmp_path / "0.parquet")
    features = replace(FEATURES, features=FEATURES.features[2:])
    expected = fit_features(features, open_parquet, tmp_path).to_json()
    assert ranks(3).run(fit, tmp_path, features, None)[0].to_json() == expected


def test_an_error_of_one_rank_is_raised_on_all(tmp_path, ranks):
    write_visits(tmp_path)
    path = tmp_path / "2.parquet"
    data = bytearray(path.read_bytes())
    data[4:200] = bytes(196)
    path.write_bytes(data)
    with pytest.raises(RankError, match=r"rank 1: .*2\.parquet: row group 0 cannot be read"):
        ranks(2).run(fit, tmp_path, FEATURES, None)
    nothing = replace(FEATURES, features=(*FEATURES.features[1:], Number(name="none", standardize=True)))
    table = visits(100, 0).append_column("none", pa.nulls(100, pa.float64()))
    pq.write_table(table, tmp_path / "none.parquet")
    with pytest.raises(RankError, match="column 'none' has no numbers"):
        ranks(2).run(fit, tmp_path / "none.parquet", nothing, None)


def test_values_of_ranks_without_a_common_type_are_refused(tmp_path, ranks):
    for number, users in enumerate((pa.array([2**53 + 1] * 50), pa.array([0.5] * 50))):
        pq.write_table(pa.table({"y": [1] * 50, "user": users}), tmp_path / f"{number}.parquet")
    features = Features(labels=(Label(column="y"),), features=(Vocabulary(name="user"),))
    for size in (1, 2):
        with pytest.raises(RankError, match="9007199254740993"):
            ranks(size).run(fit, tmp_path, features, None)


def test_many_states_merge_to_the_state_of_all_rows():
    table = visits(5000, 0)
    merger = StateMerger()
    assert merger.state() is None
    bounds = set()
    for start in range(0, 5000, 50):
        rows = np.arange(start, start + 50)
        merger.add(FEATURES.state_of(table.slice(start, 50), rows, merger.max_hash))
        bounds.add(merger.max_hash)
    state = merger.state()
    expected = FEATURES.state_of(table, np.arange(5000))
    assert bounds == {None}  # a sample of fewer rows than its limit takes every row
    assert (state.num_rows, state.fractional) == (expected.num_rows, expected.fractional)
    assert state.sample.table.equals(expected.sample.table)
    for name, counts in expected.counts.items():
        assert state.counts[name].by_count().values.equals(counts.by_count().values)
        assert state.counts[name].by_count().counts.equals(counts.by_count().counts)


def test_a_full_sample_bounds_the_rows_that_are_looked_at(monkeypatch):
    num = 300_000
    table = pa.table({"y": np.zeros(num), "price": np.arange(num), "user": np.arange(num) % 3})
    features = Features(labels=(), features=(Number(name="price", standardize=True), Vocabulary(name="user")))
    fitted = features.fit([table])
    assert fit_features(features, open_tables, table) == fitted
    merger = StateMerger()
    for start in range(0, num, 100_000):
        rows = np.arange(start, start + 100_000)
        merger.add(features.state_of(table.slice(start, 100_000), rows, merger.max_hash))
        assert merger.max_hash is not None
    assert features.fitted(merger.state(), table.schema) == fitted
