"""Features of tables drawn at random: what a row becomes depends on its values alone, not on how Arrow has
laid them out, in which units, nor on the rows beside it."""

import datetime
import itertools
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from meshrec.data import DataError
from meshrec.data.encoding import RowChecks, RowOrigin
from meshrec.data.faults import Faults
from meshrec.data.features import (
    Buckets,
    Cross,
    DatePart,
    Features,
    Hashed,
    Integer,
    Join,
    Label,
    Number,
    Vocabulary,
    hashes_of,
)
from meshrec.data.features.fitting import fit_features
from meshrec.data.frames import open_tables
from meshrec.train import Csv

EPOCH = datetime.datetime(1970, 1, 1)
TEXTS = [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())]
TIMES = [pa.timestamp("s"), pa.timestamp("us"), pa.timestamp("ns", "Europe/Berlin")]
LABEL = (Label(column="y"),)


def drawn(rng: np.random.Generator) -> pa.Table:
    num = int(rng.integers(5, 60))

    def some(values: list) -> list:
        """With nulls, or without."""
        null = rng.random(num) < rng.choice([0.0, 0.2])
        null[0] = False
        return [None if is_null else value for is_null, value in zip(null, values, strict=True)]

    def lists(value) -> list:
        return some([[value(x) for x in rng.integers(0, 40, length)] for length in rng.integers(0, 6, num)])

    items = lists(int)
    seconds = rng.integers(-(10**9), 2 * 10**9, num)
    times = pa.array(
        some([EPOCH + datetime.timedelta(seconds=int(each)) for each in seconds]), "timestamp[us]"
    )
    text = pa.array(some([f"ä{each}" if each else "" for each in rng.integers(0, 30, num)]))
    weights = [None if each is None else rng.random(len(each)).tolist() for each in items]
    return pa.table(
        {
            "y": rng.integers(0, 2, num),
            "text": text.cast(TEXTS[rng.integers(0, 3)]),
            "whole": pa.array(
                some(rng.integers(0, 100, num).tolist()), rng.choice(["int8", "int32", "uint64"])
            ),
            "number": pa.array(some((rng.normal(size=num) * 10.0 ** rng.integers(-3, 4)).tolist())),
            "time": times.cast(TIMES[rng.integers(0, 3)]),
            "items": pa.array(items, [pa.list_(pa.int64()), pa.large_list(pa.int64())][rng.integers(0, 2)]),
            "weights": pa.array(weights, pa.list_(pa.float32())),
            "tags": pa.array(lists("t{}".format), pa.list_(pa.string())),
        }
    )


def laid_out_anew(rng: np.random.Generator, data: pa.Table) -> pa.Table:
    """The same rows: a slice of more, or in several chunks."""
    num = data.num_rows
    more = data.take(pa.array(rng.integers(0, num, 5)))
    if rng.random() < 0.5:
        return pa.concat_tables([more, data, more]).combine_chunks().slice(5, num)
    cuts = [0, *sorted(rng.integers(0, num + 1, 3).tolist()), num]
    return pa.concat_tables([data.slice(a, b - a) for a, b in itertools.pairwise(cuts)])


def drawn_features(rng: np.random.Generator) -> Features:
    most = int(rng.integers(1, 4))
    return Features(
        labels=LABEL,
        features=(
            Hashed(name="text", num_embeddings=int(rng.integers(2, 50)), seed=int(rng.integers(0, 3))),
            Hashed(name="time", num_embeddings=1000),
            Hashed(name="last_tags", column="tags", num_embeddings=20, max_length=most),
            Hashed(name="first_tags", column="tags", num_embeddings=20, max_length=most, keep="first"),
            Vocabulary(name="known", column="text", min_count=2, num_unseen=2),
            Vocabulary(name="whole"),
            Vocabulary(name="items", weights="weights", max_length=most),
            Cross(name="both", columns_crossed=("text", "whole"), num_embeddings=1000),
            DatePart(
                name="part", column="time", part=str(rng.choice(["hour", "weekday", "month", "minute"]))
            ),
            Buckets(name="bucket", column="number", num_buckets=5),
            Number(name="number", missing=0.5, standardize=bool(rng.integers(0, 2)), clip=(0.1, 0.9)),
            Number(name="year", column="time", part="year", missing=0.0),
        ),
    )


def rows_of(features: Features, data: pa.Table) -> list:
    """Each row's values, as plain lists."""
    found = features.encode(data, RowOrigin("memory", 0), Faults("raise"))
    ids = [
        [
            (part.values[a:b].tolist(), None if part.weights is None else part.weights[a:b].tolist())
            for a, b in zip(part.offsets, part.offsets[1:], strict=False)
        ]
        for part in found.ids
    ]
    return list(zip(found.dense.tolist(), found.labels.tolist(), *ids, strict=True))


@pytest.mark.parametrize("seed", range(20))
def test_rows_become_the_same_however_they_are_laid_out(seed: int) -> None:
    rng = np.random.default_rng(seed)
    data, plain = drawn(rng), drawn_features(rng)
    fitted = plain.fit([data])
    assert plain.fit([laid_out_anew(rng, data)]).to_json() == fitted.to_json()
    expected = rows_of(fitted, data)
    loaded = Features.from_json(json.loads(json.dumps(fitted.to_json())))
    assert rows_of(loaded, laid_out_anew(rng, data)) == expected
    for row in rng.integers(0, data.num_rows, 3).tolist():
        assert rows_of(loaded, data.slice(row, 1)) == [expected[row]]
        for at, name in enumerate(loaded.keys):
            if name in ("text", "known", "whole", "time"):
                value = data[loaded[name].source][row].as_py()
                assert [loaded[name].row_of(value)] == expected[row][2 + at][0]


def test_times_have_the_same_rows_and_parts_in_any_unit_and_zone() -> None:
    times = [EPOCH + datetime.timedelta(days=200 * each, hours=7 * each) for each in range(-5, 20)]
    features = (DatePart(name="hour", column="t"), Hashed(name="t", num_embeddings=10**6))
    features = Features(labels=LABEL, features=features)
    units = [pa.timestamp("s"), pa.timestamp("ms", "UTC"), pa.timestamp("ns", "Asia/Tokyo")]
    tables = [
        pa.table({"y": [0.0] * len(times), "t": pa.array(times, "timestamp[us]").cast(u)}) for u in units
    ]
    fitted = features.fit(tables[:1])
    assert rows_of(fitted, tables[0]) == rows_of(fitted, tables[1]) == rows_of(fitted, tables[2])
    for unit in (pa.time32("s"), pa.time64("ns")):
        times_of_day = pa.array([datetime.time(7), datetime.time(23)], pa.time64("us")).cast(unit)
        assert DatePart(name="hour").rows_of(times_of_day).tolist() == [8, 24]
    noon = pa.array([datetime.time(12)])
    assert hashes_of(noon.cast(pa.time32("s"))) == hashes_of(noon.cast(pa.time64("ns")))
    assert hashes_of(pa.array([datetime.date(2020, 5, 1)])) == hashes_of(
        pa.array([datetime.datetime(2020, 5, 1)])
    )


def test_ids_of_64_bits_are_kept(tmp_path) -> None:
    large = 2**63 + 5
    data = pa.table({"y": [0, 1, 1], "user": pa.array([large, 7, large], pa.uint64())})
    fitted = Features(labels=LABEL, features=(Vocabulary(name="user"),)).fit([data])
    fitted.save(tmp_path / "features.json")
    loaded = Features.load(tmp_path / "features.json")
    assert rows_of(loaded, data) == rows_of(fitted, data)
    assert loaded["user"].row_of(large) == 2 != loaded["user"].row_of(7)


def test_texts_that_are_saved_as_bytes_are_texts(tmp_path) -> None:
    texts = pa.table({"y": [0, 1, 1], "user": ["ä", "b", "ä"]})
    in_bytes = texts.set_column(1, "user", texts["user"].cast(pa.binary()))
    fitted = Features(labels=LABEL, features=(Vocabulary(name="user"),)).fit([in_bytes])
    fitted.save(tmp_path / "features.json")
    assert rows_of(Features.load(tmp_path / "features.json"), texts) == rows_of(fitted, in_bytes)
    broken = pa.table({"y": [0], "user": [b"\xff"]})
    with pytest.raises(DataError, match=r"'user'.*UTF-8"):
        Features(labels=LABEL, features=(Vocabulary(name="user"),)).fit([broken])


def test_nan_is_null_and_dictionaries_are_their_values() -> None:
    ids = (Hashed(name="x", num_embeddings=1000), Vocabulary(name="known", column="x"))
    ids += (DatePart(name="hour", column="x"), Buckets(name="bucket", column="x"))
    features = Features(labels=LABEL, features=ids)
    plain = pa.array([0.0, 3700.5, None, 3.0, 3.0])
    fitted = features.fit([pa.table({"y": [0] * 5, "x": plain})])
    expected = rows_of(fitted, pa.table({"y": [0] * 5, "x": plain}))
    assert [row[2:] for row in expected][2] == (([0], None),) * 4
    nan = pa.array([-0.0, 3700.5, float("nan"), 3.0, 3.0])
    for values in (nan, plain.dictionary_encode(), nan.dictionary_encode(), plain.cast(pa.float32())):
        data = pa.table({"y": [0] * 5, "x": values})
        assert features.fit([data]).to_json() == fitted.to_json()
        assert rows_of(fitted, data) == expected
    whole = pa.array([3, None, 3, 0])
    as_they_are = Integer(name="x", num_embeddings=5, missing=4)
    assert as_they_are.rows_of(whole.dictionary_encode()).tolist() == [3, 4, 3, 0]
    days = pa.array([datetime.datetime(2020, 5, 1, 7), None])
    assert DatePart(name="x").rows_of(days.dictionary_encode()).tolist() == [8, 0]


def test_crosses_know_what_they_were_fitted_on(tmp_path) -> None:
    features = Features(
        labels=LABEL, features=(Cross(name="c", columns_crossed=("zip", "n"), num_embeddings=99),)
    )
    (tmp_path / "a.csv").write_text("y,zip,n\n0,007,1\n1,x,2\n")
    (tmp_path / "b.csv").write_text("y,zip,n\n0,007,1\n")
    source = Csv(train=(str(tmp_path / "a.csv"),), features=features, split_by="random")
    fitted = Features.from_json(json.loads(json.dumps(source.fit().to_json())))
    (batch,) = source.dataset_for_scoring(fitted, str(tmp_path / "b.csv"), labelled=False).train.batches(1)
    assert batch.sparse.values().tolist() == [fitted["c"].row_of(("007", 1))]
    wrong = fitted.wrong_columns(pa.schema({"y": pa.int64(), "zip": pa.int64(), "n": pa.int64()}))
    assert wrong[0].startswith("column 'zip' holds integer, and held text when feature 'c' was fitted.")


def test_nothing_joins_nothing(tmp_path) -> None:
    pq.write_table(pa.table({"k": [0.0, None, 2.0], "v": [5, 6, 7]}), tmp_path / "items.parquet")
    join = Join(path=str(tmp_path / "items.parquet"), key="k", columns=("v",))
    keys = pa.array([None, 0.0, float("nan"), 2.0, 3.0])
    for array in (keys, keys.dictionary_encode()):
        assert join.joined(pa.table({"k": array}))["v"].to_pylist() == [None, 5, None, 7, None]


def test_crosses_and_joins_take_integers_that_are_floats_for_their_nulls(tmp_path) -> None:
    pq.write_table(pa.table({"k": [1, 2], "v": ["a", "b"]}), tmp_path / "items.parquet")
    data = pa.table({"y": [0, 1], "k": [1, 2], "t": ["x", "z"]})
    features = Features(
        labels=LABEL,
        features=(
            Cross(name="c", columns_crossed=("k", "t"), num_embeddings=10_000),
            Vocabulary(name="v"),
        ),
        joins=(Join(path=str(tmp_path / "items.parquet"), key="k", columns=("v",)),),
    ).fit([data])
    floats = data.set_column(1, "k", pa.array([1.0, None]))
    assert features.wrong_columns(floats.schema) == []
    expected = rows_of(features, data)
    found = rows_of(features, floats)
    assert found[0] == expected[0]
    assert found[1] != expected[1]
    with pytest.raises(DataError, match=r"'k'.*'t'"):
        features["c"].values(data.set_column(1, "k", pa.array([1.5, 2.0])))
    with pytest.raises(DataError, match=r"items.parquet"):
        rows_of(features, data.set_column(1, "k", pa.array([1.5, 2.0])))


def test_vocabularies_of_one_table_have_one_row_for_a_value() -> None:
    data = pa.table({"y": [0, 1, 1], "item": [7.0, 8.0, None], "seen": [[9, 9, 9], [7], None]})
    item, seen = Vocabulary(name="item"), Vocabulary(name="seen", table="item")
    fitted = Features(labels=LABEL, features=(item, seen)).fit([data])
    assert [fitted["item"].row_of(each) for each in (9, 7, 8)] == [2, 3, 4]
    assert [fitted["seen"].row_of(each) for each in (9, 7, 8)] == [2, 3, 4]
    assert fitted["item"].rows == fitted["seen"].rows == 5
    again = Features.from_json(json.loads(json.dumps(fitted.to_json())))
    assert rows_of(again, data) == rows_of(fitted, data)
    with pytest.raises(ValueError, match=r"min_count.*'seen'.*2.*'item'.*1"):
        Features(labels=LABEL, features=(item, Vocabulary(name="seen", table="item", min_count=2)))
    texts = data.set_column(2, "seen", pa.array([["a"], None, None]))
    with pytest.raises(DataError, match="'item'"):
        Features(labels=LABEL, features=(item, seen)).fit([texts])


def test_a_number_that_is_always_the_same_is_not_divided_by_a_rounding_error() -> None:
    fitted = Number(name="x", standardize=True).fitted(pa.array([0.1] * 1000))
    assert fitted.deviation == 1.0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Label(column="y", kind="binray"), r"\['binary'.*'binray'"),
        (lambda: Label(column="y", kind="class"), "others"),
        (lambda: Label(column="y", classes=("no",)), "'no'"),
        (lambda: Label(column="y", classes=("a", "b", "c")), "'c'"),
        (lambda: Label(column="y", classes=("no", "yes"), positive_from=1), "positive_from"),
        (lambda: Label(column="y", kind="number", classes=("a", "b")), "others"),
        (lambda: Number(name="n", num_bins=1), "num_bins.*2.*1"),
        (lambda: Label(column="y", kind="number", positive_from=3), "Leave"),
        (lambda: Number(name="n", part="hours"), r"\['year'.*'hours'.*'s'"),
        (lambda: DatePart(name="n", unit="h"), "'h'"),
        (lambda: Buckets(name="n", num_buckets=1), "num_buckets.*2.*1"),
    ],
)
def test_features_that_cannot_be(make, message) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_numbers_beyond_float32_and_columns_that_are_there_twice_are_told(tmp_path) -> None:
    with pytest.raises(DataError, match=r"'x'.*row 1.*float32"):
        Number(name="x").encode(
            pa.array([1.0, 1e300]), RowChecks(RowOrigin("here", 0), np.ones(2, np.bool_), Faults("raise"))
        )
    pq.write_table(pa.table({"k": [1, 2], "x": [1.0, 2.0]}), tmp_path / "items.parquet")
    features = Features(
        labels=LABEL,
        features=(Hashed(name="k", num_embeddings=9), Number(name="x")),
        joins=(Join(path=str(tmp_path / "items.parquet"), key="k", columns=("x",)),),
    )
    data = pa.table({"y": [0, 1], "k": [1, 2], "x": [3.0, 4.0]})
    with pytest.raises(DataError, match=r"'x'.*items.parquet"):
        fit_features(features, open_tables, data)
