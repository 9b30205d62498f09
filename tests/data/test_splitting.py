import datetime
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from meshrec.data import DataError, InMemoryReader, Split, locate, parquet
from meshrec.data.features import Features, Integer, Label
from meshrec.data.in_memory import Ranges

SCHEMA = Features(labels=(Label(column="y"),), features=(Integer(name="user", num_embeddings=40),))


@pytest.fixture
def folder(tmp_path):
    """Two files of 300 rows in row groups of 70; the time runs backward."""
    rng = np.random.default_rng(0)
    for number, name in enumerate("ab"):
        rows = np.arange(300) + 300 * number
        table = {
            "y": (rows % 2).astype(np.float32),
            "user": rng.integers(0, 40, 300),
            "name": [f"n{row % 50}" for row in rows],
            "t": [datetime.datetime(2026, 1, 1) - datetime.timedelta(hours=int(row)) for row in rows],
            "row": rows,
        }
        pq.write_table(pa.table(table), tmp_path / f"{name}.parquet", row_group_size=70)
    return tmp_path


def rows_of(reader, batch=37):
    return np.concatenate([each.rows.numpy() for each in reader.batches(batch)]) if reader else np.zeros(0)


@pytest.mark.parametrize(
    "split",
    [
        Split(by="time", column="t", validation=0.2, test=0.1),
        Split(by="time", validation=0.2, test=0.1),
        Split(by="hash", column="user", validation=0.2, test=0.1),
        Split(by="hash", column="name", validation=0.2, test=0.1),
        Split(by="random", validation=0.2, test=0.1, seed=3),
    ],
)
def test_every_row_is_in_one_part(folder, split):
    data = parquet(train=folder, split=split, schema=SCHEMA, window=16, lanes=3)
    parts = [rows_of(reader) for reader in (data.train, data.validation, data.test)]
    assert sorted(np.concatenate(parts).tolist()) == list(range(600))
    assert [len(part) for part in parts] == pytest.approx([420, 120, 60], abs=90)
    assert parts[1].tolist() == sorted(parts[1].tolist())  # the file's order
    whole = next(parquet(train=folder, schema=SCHEMA).open(folder, True).batches(600))
    for reader in (data.train, data.validation):
        for batch in reader.batches(50):  # rows are those of the file
            assert batch.labels.tolist() == (batch.rows % 2).tolist()
            assert (
                batch.sparse["user"].values().tolist() == whole.sparse["user"].values()[batch.rows].tolist()
            )
    if split.column == "t":
        assert parts[2].max() < parts[1].min() <= parts[1].max() < parts[0].min()
    elif split.by == "time":
        assert parts[0].max() < parts[1].min() <= parts[1].max() < parts[2].min()
    elif split.column == "name":
        assert not set(parts[0] % 50) & set(parts[1] % 50)
    again = parquet(train=folder, split=split, schema=SCHEMA)
    assert rows_of(again.test).tolist() == parts[2].tolist()


def test_rows_are_found_in_their_files(folder):
    reader = parquet(train=folder, schema=SCHEMA).open(folder, False)
    (batch,) = reader.batches(1000)
    assert bool(batch.labels.isnan().all())
    assert batch.rows.tolist() == list(range(600))
    place = locate(reader.files, batch.rows[[0, 299, 300, 599]])
    assert place.file_B.tolist() == [0, 0, 1, 1]
    assert place.row_B.tolist() == [0, 299, 0, 299]
    ranks = [
        [batch.rows.tolist() for batch in reader.batches(20, rank=rank, world_size=2)] for rank in range(2)
    ]
    assert [row for pair in zip(*ranks, strict=True) for rows in pair for row in rows] == list(range(600))
    opened = parquet(train=folder, schema=SCHEMA).open(folder / "b.parquet", False)
    assert rows_of(opened).tolist() == list(range(300))


def test_labels_that_the_loss_cannot_take_name_file_row_and_value(folder):
    table = pq.read_table(folder / "b.parquet")
    labels = table["y"].to_numpy().copy()
    labels[123] = 4
    pq.write_table(table.set_column(0, "y", pa.array(labels)), folder / "b.parquet", row_group_size=70)
    message = r"b\.parquet: row group 1, column 'y': row 123 has the label 4, outside \[0, 1\]"
    with pytest.raises(DataError, match=message):
        rows_of(parquet(train=folder, schema=SCHEMA).open(folder, True))
    data = parquet(train=folder, schema=SCHEMA, on_error="skip")
    for _ in range(2):  # a row that is read twice is skipped once
        assert len(rows_of(data.train)) == 599
    assert [sum(reasons.values()) for reasons in data.skipped.values()] == [1]
    assert next(iter(data.skipped)).endswith("b.parquet")
    any_label = replace(SCHEMA, labels=(Label(column="y", kind="number"),))
    assert len(rows_of(parquet(train=folder, schema=any_label).open(folder, True))) == 600
    ids = {"user": Ranges(np.zeros(3, np.int64), np.arange(3), np.ones(3, np.int64))}
    with pytest.raises(DataError, match=r"row 1.*label 5.*\[0.0, 1.0\]"):
        InMemoryReader(np.zeros((3, 0), np.float32), np.array([0, 5, 1], np.float32), ids, seed=0)


def test_splits_that_cannot_be(folder):
    with pytest.raises(ValueError, match=r"\[0.*1.*below 1"):
        Split(validation=0.6, test=0.4)
    with pytest.raises(ValueError, match="column"):
        Split(by="hash")
    with pytest.raises(ValueError, match="their"):
        parquet(train=folder, validation=folder, split=Split(), schema=SCHEMA)
    with pytest.raises(DataError, match=r"column .* of a split by time: .*'n[0-9]+'"):
        parquet(train=folder, split=Split(column="name"), schema=SCHEMA)
    with pytest.raises(DataError, match="1 nulls"):
        Split(column="x").parts(np.array([2]), lambda block: pa.array([1.0, np.nan]))
    with pytest.raises(DataError, match="int64"):
        Split(by="hash", column="x").parts(np.array([1]), lambda block: pa.array([[1]]))
    with pytest.raises(DataError, match="'none'"):
        parquet(train=folder, split=Split(by="hash", column="none"), schema=SCHEMA)
    with pytest.raises(ValueError, match="leaves"):
        parquet(train=folder, split=Split(test=1e-9), schema=SCHEMA)


def test_texts_and_decimals_order_rows_in_time():
    days = ["2024-01-03", "2024-01-01", "2024-01-02 12:00", "2024-01-02"]
    numbers = [3.0, 1.0, 2.5, 2.0]
    split = Split(by="time", column="t", validation=0.25, test=0.25, time_format="%d.%m.%Y")
    sizes = np.array([4])
    (formatted,) = split.parts(
        sizes, lambda _: pa.array(["03.01.2024", "01.01.2024", "01.02.2024", "02.01.2024"])
    )
    assert formatted.tolist() == [1, 0, 2, 0]
    split = replace(split, time_format=None)
    expected = split.parts(sizes, lambda _: pa.array(numbers))
    for column in (
        pa.array(days),
        pa.array(days).dictionary_encode(),
        pa.array(numbers).cast(pa.decimal128(10, 2)),
        pa.array([30, 10, 25, 20]).cast(pa.decimal128(38, 0)),
    ):
        assert np.array_equal(split.parts(sizes, lambda _, column=column: column), expected)


def test_splits_by_hash_take_uuids_and_one_zero():
    split = Split(by="hash", column="u", validation=0.3, test=0.3)
    (parts,) = split.parts(np.array([2]), lambda _: pa.array([0.0, -0.0]))
    assert parts[0] == parts[1]
    ids = [bytes([each] * 16) for each in range(40)]
    (parts,) = split.parts(np.array([40]), lambda _: pa.array(ids))
    assert len(set(parts.tolist())) == 3


@pytest.mark.parametrize("shares", [(0.1, 0.1), (0.0, 0.3), (0.25, 0.0), (1 / 3, 1 / 3)])
@pytest.mark.parametrize("kind", [np.int64, np.float64, np.uint64])
def test_a_split_by_time_cuts_at_relative_ranks(shares, kind):
    validation, test = shares
    split = Split(by="time", column="t", validation=validation, test=test)
    rng = np.random.default_rng(0)
    for num in (1, 2, 3, 10, 999, 1000):
        times = rng.integers(0, max(num // 3, 1), num).astype(kind)
        # A row's quantile is the share of earlier rows, so rows with equal times are together.
        quantiles = np.searchsorted(np.sort(times), times) / num
        expected = np.where(quantiles >= 1 - test, 2, np.where(quantiles >= 1 - test - validation, 1, 0))
        sizes = np.array([num // 3, 0, num - num // 3])
        blocks = np.split(times, [num // 3, num // 3])
        parts = split.parts(sizes, lambda block, blocks=blocks: pa.array(blocks[block]))
        assert [len(part) for part in parts] == sizes.tolist()
        assert np.concatenate(parts).tolist() == expected.tolist()
