import numpy as np
import pyarrow as pa
import pytest

from meshrec.data.features.sketches import Counts, Distinct, RowSample


def test_distinct_values_are_counted():
    few = Distinct.of(pa.array(["a", "b", "a", None]))
    assert few.count() == 2
    many = pa.array(np.random.default_rng(0).permutation(100_000))
    parts = [Distinct.of(many.slice(start, 30_000)) for start in range(0, 100_000, 25_000)]
    merged = parts[0].merged(parts[1]).merged(parts[2]).merged(parts[3])
    assert merged.hashes.tolist() == Distinct.of(many).hashes.tolist()
    assert merged.count() == pytest.approx(100_000, rel=0.05)


@pytest.mark.parametrize("first", [0, 2**62, 2**63, 2**64 - 1000])
def test_ids_that_differ_in_the_low_bits_count_apart(first):
    # Upper bits of an ID are often a shard; as floats, these would be one value (findings/datasketches_*.sh).
    ids = pa.array((first + k for k in range(1000)), pa.uint64())
    assert Distinct.of(ids).count() == len(Counts.of(ids).values) == 1000


def test_a_sample_does_not_depend_on_how_the_data_is_cut():
    data, rows = pa.table({"x": np.arange(5000)}), np.arange(5000)
    whole = RowSample.of(data, rows, 100)
    parts = [
        RowSample.of(data.slice(start, 700), rows[start : start + 700], 100) for start in range(0, 5000, 700)
    ]
    merged = parts[0]
    for part in parts[1:]:
        merged = part.merged(merged, limit=100)
    assert merged.table["x"].to_pylist() == whole.table["x"].to_pylist()
    assert len(set(whole.table["x"].to_pylist())) == 100
    assert abs(np.mean(whole.table["x"].to_numpy()) - 2500) < 3 * 1443 / 10


def test_counts_are_exact():
    found = Counts.of(pa.array(["b", "a", "b", "", None])).merged(Counts.of(pa.array(["c", "a"]))).by_count()
    assert found.values.to_pylist() == ["a", "b", "c"]
    assert found.counts.to_pylist() == [2, 2, 1]
