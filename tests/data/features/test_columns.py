import numpy as np
import pytest

from meshrec.data import DataError
from meshrec.data.encoding import RowOrigin
from meshrec.data.faults import Faults
from meshrec.data.features import Buckets, DatePart, Features, Hashed, Integer, Label, Number

pa = pytest.importorskip("pyarrow")

PLACE = RowOrigin("f.parquet: row group 2", 100)


def features(*columns):
    return Features(labels=(Label(column="y"),), features=columns)


def run(values, on_error="raise", kind=None, hashed=False, **options):
    """The id column alone: rows of ids, and which are kept."""
    kind_of_ids = Hashed if hashed else Integer
    schema = features(kind_of_ids(name="a", **({"num_embeddings": 10} | options)))
    column = values if isinstance(values, pa.Array) else pa.array(values, kind)
    table = pa.table({"y": pa.array(np.zeros(len(column))), "a": column})
    assert schema.wrong_columns(table.schema) == []
    samples = schema.encode(table, PLACE, Faults(on_error))
    (ragged,) = samples.ids
    rows = [ragged.values[a:b].tolist() for a, b in zip(ragged.offsets, ragged.offsets[1:], strict=False)]
    return rows, None if samples.is_valid is None else samples.is_valid.tolist()


@pytest.mark.parametrize("kind", [pa.int32(), pa.int64(), pa.uint8()])
def test_scalars(kind):
    assert run([3, 0, 9], kind=kind) == ([[3], [0], [9]], None)


@pytest.mark.parametrize("kind", [pa.list_(pa.int64()), pa.large_list(pa.int32())])
def test_lists_and_parts_of_lists(kind):
    array = pa.array([[9], [1, 2], [], [3]], kind)
    assert run(array) == ([[9], [1, 2], [], [3]], None)
    assert run(array[1:]) == ([[1, 2], [], [3]], None)


def test_lists_of_fixed_size():
    array = pa.array([[1, 2], [3, 4], [5, 6]], pa.list_(pa.int64(), 2))
    assert run(array[1:]) == ([[3, 4], [5, 6]], None)


def test_ids_outside_the_table():
    message = (
        r"f.parquet: row group 2, column 'a': row 101 has the id -1, outside \[0, 10\)\. Raise "
        r"num_embeddings of feature 'a', or hash it \(2 rows of 3\)"
    )
    with pytest.raises(DataError, match=message):
        run([1, -1, 10])
    assert run([[1], [2, 10], []], "skip")[1] == [True, False, True]


def test_nulls_are_damage_unless_something_stands_for_them():
    with pytest.raises(DataError, match=r"'a'.*row 101"):
        run([1, None], kind=pa.int64())
    assert run([[1], None]) == ([[1], []], None)  # a list that is null is an empty one
    with pytest.raises(DataError, match=r"'a'.*row 100"):
        run([[1, None], [2]])
    assert run([1, None], "skip", kind=pa.int64())[1] == [True, False]
    assert run([1, None], missing=7, kind=pa.int64()) == ([[1], [7]], None)
    assert run([[1, None], None, [2]], missing=7) == ([[1, 7], [], [2]], None)


def test_hashing_is_by_value_and_even():
    rows, _ = run(list(range(5000)), hashed=True, missing=False)
    again, _ = run(list(range(5000)), hashed=True, missing=False, kind=pa.int32())
    assert rows == again
    assert set(np.bincount(np.ravel(rows), minlength=10).tolist()) <= set(range(400, 600))
    reserved, _ = run([*range(5000), None], hashed=True)
    assert sorted(set(np.ravel(reserved[:-1]).tolist())) == list(range(1, 10))
    assert reserved[-1] == [0]


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.binary()])
def test_strings_hash_alike_in_every_type_and_place(kind):
    words = ["", "a", "68fd1e64", "68fd1e65", "longer than sixteen bytes", "longer than sixteen bytet"]
    options = {"hashed": True, "num_embeddings": 2**31}
    rows, kept = run([*words, None], kind=kind, **options)
    assert kept is None
    assert rows[0] == rows[-1] == [0]
    assert len({row[0] for row in rows}) == len(words)
    assert run(pa.array(words, kind)[2:], **options)[0] == rows[2:-1]
    assert run([words[1:3], [words[4]]], kind=pa.list_(kind), **options)[0] == [
        [rows[1][0], rows[2][0]],
        rows[4],
    ]
    coded = pa.array(words, pa.string()).dictionary_encode()
    assert run(coded, **options)[0] == rows[:-1]


def test_dense_values_and_labels():
    schema = features(
        Number(name="x", log=True, missing=0.0), Number(name="z"), Integer(name="a", num_embeddings=2)
    )
    table = pa.table(
        {
            "y": [True, False, True, True],
            "x": [None, -5, 0, 7],
            "z": [1.5, 2.0, None, np.inf],
            "a": [0, 1, 0, 1],
        }
    )
    with pytest.raises(DataError, match=r"'z'.*row 102.*2 rows.*4"):
        schema.encode(table, PLACE, Faults("raise"))
    samples = schema.encode(table, PLACE, Faults("skip"))
    assert samples.is_valid.tolist() == [True, True, False, False]
    assert samples.labels.tolist() == [1, 0, 1, 1]
    assert samples.dense[:, 0].tolist() == pytest.approx([0, 0, 0, np.log(8)])
    assert samples.dense[:2, 1].tolist() == [1.5, 2.0]


@pytest.mark.parametrize("log", [False, True])
def test_infinity_is_damage_whatever_stands_for_null(log):
    schema = features(Number(name="x", log=log, missing=2.0), Integer(name="a", num_embeddings=2))
    table = pa.table({"y": [True] * 4, "x": [1.0, None, np.nan, -np.inf], "a": [0, 1, 0, 1]})
    with pytest.raises(DataError, match=r"'x'.*row 103"):
        schema.encode(table, PLACE, Faults("raise"))
    samples = schema.encode(table, PLACE, Faults("skip"))
    assert samples.is_valid.tolist() == [True, True, True, False]
    stands_for = np.log(3) if log else 2
    assert samples.dense[1:3, 0].tolist() == pytest.approx([stands_for] * 2)


def test_wrong_columns_are_all_named():
    schema = features(
        Number(name="x"), Integer(name="a", num_embeddings=2), Integer(name="b", num_embeddings=2)
    )
    found = pa.schema(
        [("y", pa.string()), ("x", pa.float32()), ("a", pa.string()), ("b", pa.list_(pa.duration("s")))]
    )
    assert schema.wrong_columns(found) == [
        "column 'y' holds text, and a label holds numbers or booleans, unless its two values are named: "
        "classes=(negative, positive)",
        "column 'a' holds text; feature 'a' takes integer, number, list of integer, list of number",
        "column 'b' holds other; feature 'b' takes integer, number, list of integer, list of number",
    ]
    found = pa.schema([("y", pa.int8()), ("x", pa.int8()), ("a", pa.int8())])
    assert schema.wrong_columns(found) == ["there is no column 'b' among ['y', 'x', 'a']"]


def test_rows_of_ranges_and_of_parts_of_times_have_names():
    ranges = Buckets(name="price", edges=(1.5, 20.0), found="number").ranges()
    assert ranges == ["below 1.5", "1.5 to below 20", "from 20"]
    rows = Buckets(name="price", edges=(1.5, 20.0), found="number").rows_of(pa.array([1.0, 1.5, 19.0, 20.0]))
    assert [ranges[row - 1] for row in rows] == [ranges[0], ranges[1], ranges[1], ranges[2]]
    assert DatePart(name="day", part="weekday").text_of(1) == "Monday"
    assert DatePart(name="month", part="month").text_of(12) == "month 12"
    assert DatePart(name="hour", part="hour").text_of(1) == "hour 0"
