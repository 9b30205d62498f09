import itertools
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from meshrec.data import Split
from meshrec.data.features import Buckets, Features, Hashed, Label, Number, Vocabulary
from meshrec.data.features.features import FitState
from meshrec.data.features.fitting import fit_features, fit_on_ranks
from meshrec.data.features.merging import StateMerger, merge_ranks
from meshrec.data.features.sketches import (
    SAMPLE_ROWS,
    Counts,
    RowSample,
    max_sample_hash,
    smallest_row_hashes,
)
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


def write_visits(folder, num=28_000):
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
    for start in range(0, 5000, 50):
        merger.add(FEATURES.state_of(table.slice(start, 50), np.arange(start, start + 50)))
    state = merger.state()
    expected = FEATURES.state_of(table, np.arange(5000))
    assert (state.num_rows, state.fractional) == (expected.num_rows, expected.fractional)
    assert state.sample.table.equals(expected.sample.table)
    for name, counts in expected.counts.items():
        assert state.counts[name].by_count().values.equals(counts.by_count().values)
        assert state.counts[name].by_count().counts.equals(counts.by_count().counts)


def test_rows_outside_the_sample_are_not_copied():
    num = 300_000
    table = pa.table({"y": np.zeros(num), "price": np.arange(num), "user": np.arange(num) % 3})
    features = Features(labels=(), features=(Number(name="price", standardize=True), Vocabulary(name="user")))
    fitted = features.fit([table])
    assert fit_features(features, open_tables, table) == fitted
    parts = [np.arange(start, start + 100_000) for start in range(0, num, 100_000)]
    max_hash = max_sample_hash([smallest_row_hashes([part[:7], part[7:]]) for part in parts])
    merger = StateMerger()
    num_sampled = 0
    for part in parts:
        state = features.state_of(table.slice(part[0], len(part)), part, max_hash)
        num_sampled += len(state.sample.hashes)
        merger.add(state)
    assert num_sampled == SAMPLE_ROWS
    assert features.fitted(merger.state(), table.schema) == fitted
    assert max_sample_hash([smallest_row_hashes([np.arange(SAMPLE_ROWS - 1)])]) is None


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_ranks_order_values_of_any_type_by_count(share, ranks):
    """Ranks have common values, or different ones."""
    results = ranks(3).run(merge_random_counts, share)
    counts, expected = results[0]
    assert results[1:] == [None, None]
    for name, (values, numbers) in expected.items():
        assert counts[name][0].type == values.type
        assert counts[name][0].equals(values)
        assert counts[name][1].equals(numbers)


def merge_random_counts(share: float):
    axis = join("cpu").axis
    rng = np.random.default_rng(4)
    num = 3000
    rows = rng.integers(0, num, 3 * num) if share else np.arange(3 * num)
    values = {
        "integer": pa.array(rows - num),
        "unsigned": pa.array(rows.astype(np.uint64) + np.uint64(1 << 63)),
        "float": pa.array(rows / 4 - 9),
        "text": pa.array([f"é{row}" if row % 2 else "a" * (row % 50) for row in rows.tolist()]),
        "binary": pa.array([bytes([row % 256, row // 256]) for row in rows.tolist()]),
        "flag": pa.array(rows % 3 == 0),
        "decimal": pa.array(rows).cast(pa.decimal128(24, 2)),
        "day": pa.array(rows.astype(np.int32), pa.date32()),
        "time": pa.array(rows, pa.timestamp("us")),
        "none": pa.array([], pa.string()),
    }
    # Rows per rank, of which some have no rows.
    stop = [round(share * num), num, 3 * num]
    first, last = [0, *stop][axis.rank : axis.rank + 2]

    def state_of(start: int, end: int) -> FitState:
        counts = {name: Counts.of(array.slice(start, end - start)) for name, array in values.items()}
        sample = RowSample.of(pa.table({"": np.zeros(end - start, bool)}), np.arange(start, end))
        return FitState(end - start, sample, counts)

    cuts = np.linspace(first, last, 4).astype(int).tolist() if first < last else []
    merged = merge_ranks([state_of(*pair) for pair in itertools.pairwise(cuts)], axis)
    if merged is None:
        return None
    all_counts = {name: counts.by_count() for name, counts in state_of(0, 3 * num).counts.items()}
    return tuple(
        {name: (counts.values, counts.counts) for name, counts in of_state.items()}
        for of_state in (merged.counts, all_counts)
    )
