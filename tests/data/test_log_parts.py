import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from meshrec.data.faults import DataError, Faults
from meshrec.data.log_columns import LogColumns
from meshrec.data.log_parts import LogFiles, bounded_map, encode_parts


def files(folder, table, **columns):
    pq.write_table(table, folder / "log.parquet", row_group_size=2)
    return LogFiles(name="log", paths=str(folder / "log.parquet"), columns=LogColumns(**columns), kinds={})


def test_parts_have_codes_times_and_rows_of_valid_rows(tmp_path):
    table = pa.table({"user": ["b", None, "a", "b"], "item": [3, 4, 3, 5], "time": [1.5, 2.0, 3.0, 4.0]})
    parts = encode_parts(files(tmp_path, table), tmp_path, Faults("skip"), memory=0)
    assert (parts.num_rows, parts.times, len(parts.parts)) == (4, (1_500_000, 4_000_000), 1)
    encoded = parts.parts[0].table()
    assert encoded["user"].to_pylist() == ["b", "a", "b"]
    assert encoded["item"].to_pylist() == [3, 3, 5]
    assert encoded["time"].to_pylist() == [1_500_000, 3_000_000, 4_000_000]
    assert encoded["row"].to_pylist() == [0, 2, 3]


@pytest.mark.parametrize(
    ("times", "stored"),
    [
        (pa.array([1.0, -(2.0**31)]), pa.array([1, -(1 << 31)], pa.int32())),
        (pa.array([1.0, 2.0**31]), pa.array([1_000_000, (1 << 31) * 1_000_000])),
        (pa.array([1.0, 1.5]), pa.array([1_000_000, 1_500_000])),
    ],
)
def test_whole_seconds_that_fit_are_stored_as_int32(tmp_path, times, stored):
    table = pa.table({"user": [1, 2], "item": [1, 2], "time": times})
    log = files(tmp_path, table, time_unit="s")
    (part,) = encode_parts(log, tmp_path, Faults("raise"), memory=0).parts
    assert part.table()["time"].chunk(0).equals(stored)


@pytest.mark.parametrize(
    ("values", "stored"),
    [
        (pa.array([1, (1 << 31) - 1], pa.int64()), pa.int64()),  # a dictionary: the range is too large
        (pa.array([-(1 << 31), -(1 << 31) + 1], pa.int64()), pa.int32()),
        (pa.array([1 << 31, (1 << 31) - 1], pa.int64()), pa.int64()),
        (pa.array([3, 4], pa.uint64()), pa.int32()),
        (pa.array([3, 4], pa.int8()), pa.int32()),
    ],
)
def test_integers_that_fit_are_stored_as_int32_and_keep_their_type(tmp_path, values, stored):
    table = pa.table({"user": values, "item": [1, 2], "time": [1, 2]})
    (part,) = encode_parts(files(tmp_path, table), tmp_path, Faults("raise"), memory=0).parts
    column = part.table()["user"].chunk(0)
    assert getattr(column.type, "value_type", column.type) == stored
    assert part.distinct("user").equals(values)


def test_missing_values_and_columns_are_errors(tmp_path):
    table = pa.table({"user": ["b", None, "a", None], "item": [3, 4, 3, 5], "time": [1, 2, 3, 4]})
    with pytest.raises(DataError, match=r"'user'.*row 1 \(2 rows of 4\)"):
        encode_parts(files(tmp_path, table), tmp_path, Faults("raise"), memory=0)
    with pytest.raises(DataError, match=r"'what'.*'user', 'item', 'time'"):
        encode_parts(files(tmp_path, table, item="what"), tmp_path, Faults("raise"), memory=0)


def test_times_with_and_without_zone_do_not_mix(tmp_path, monkeypatch):
    monkeypatch.setattr("meshrec.data.log_parts._MIN_ROWS", 2)
    times = ["2024-05-01", "2024-05-01 12:30:00", "2024-05-01T12:30:00Z", "2024-05-01T12:30:00+02:00"]
    table = pa.table({"user": [1] * 4, "item": [1] * 4, "time": times})
    with pytest.raises(DataError, match=r"'time'.*zone"):
        encode_parts(files(tmp_path, table), tmp_path, Faults("raise"), memory=0)


def test_results_are_in_order_and_few_wait():
    started = []

    def square(number):
        started.append(number)
        return number * number

    results = bounded_map(square, range(100), 3)
    assert next(results) == 0
    assert len(started) <= 5
    assert [*results] == [number * number for number in range(1, 100)]
