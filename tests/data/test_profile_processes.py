import functools
import itertools
import os
import signal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from meshrec.data import DataError
from meshrec.data.parquet_tables import ParquetTables
from meshrec.data.profile import Profiler, profile
from meshrec.data.profile_processes import profile_parquet


def random_table(rng: np.random.Generator, num: int) -> pa.Table:
    """Columns whose statistics depend on all rows, and on their order."""
    return pa.table(
        {
            "y": rng.integers(0, 2, num),
            "row": np.arange(num),
            "x": pa.array(rng.normal(size=num), mask=rng.random(num) < 0.1),
            "whole": pa.array(rng.integers(0, 9, num).astype(float), mask=rng.random(num) < 0.1),
            "name": [f"n{value}" if value else None for value in rng.integers(0, 5000, num)],
            "day": [f"2024-05-{value:02}" for value in rng.integers(1, 28, num)],
            "tags": [[1] * int(value) for value in rng.integers(0, 4, num)],
            "infinite": np.where(rng.random(num) < 0.01, np.inf, rng.normal(size=num)),
            "bytes": pa.array([b"\xff" if value else b"a" for value in rng.random(num) < 0.001], pa.binary()),
            "empty": pa.nulls(num, pa.float64()),
            "flag": rng.random(num) < 0.3,
        }
    )


def same(table: pa.Table) -> pa.Table:
    return table


def fail(table: pa.Table, row: int) -> pa.Table:
    if row in table["row"].to_pylist():
        raise DataError(f"row {row} is damaged")
    return table


def die(table: pa.Table) -> pa.Table:
    if table.num_rows and table["row"][0].as_py() > 1000:
        os.kill(os.getpid(), signal.SIGKILL)
    return table


def assert_equal(profiles: list) -> None:
    for other in profiles[1:]:
        assert other.num_rows == profiles[0].num_rows
        assert other.columns == profiles[0].columns
        assert other.sample.equals(profiles[0].sample)
        assert (other.labels is None) == (profiles[0].labels is None)
        if other.labels is not None:
            assert other.labels.values.equals(profiles[0].labels.values)
            assert other.labels.counts.equals(profiles[0].labels.counts)


@pytest.mark.parametrize("label", ["y", "name", "tags", "day", "flag", None])
def test_profiles_of_parts_append_to_the_profile_of_the_whole(label):
    rng = np.random.default_rng(0)
    table = random_table(rng, 4000)
    profiles = [profile([table], label)]
    for _ in range(3):
        cuts = [0, *np.sort(rng.integers(0, 4000, 3)).tolist(), 4000]
        total = Profiler(table.schema, label)
        for start, stop in itertools.pairwise(cuts):
            part, middle = Profiler(table.schema, label), (start + stop) // 2
            part.add(table.slice(start, middle - start), start)
            part.add(table.slice(middle, stop - middle), middle)
            total.append(part)
        profiles.append(total.profile())
    assert_equal(profiles)


def test_rows_that_do_not_rise_between_two_parts_are_no_row_numbers():
    table = pa.table({"row": [1, 2, 3, 3, 4, 5]})
    for middle in range(1, 6):
        first, later = (Profiler(table.schema, None) for _ in range(2))
        first.add(table.slice(0, middle), 0)
        later.add(table.slice(middle), middle)
        first.append(later)
        assert not first.profile().columns["row"].counts_up


@pytest.mark.parametrize("rows", [None, 700])
def test_profile_does_not_depend_on_the_number_of_processes(rows, tmp_path):
    table = random_table(np.random.default_rng(1), 5000)
    # Parquet has other names for the elements of lists.
    table = table.cast(table.schema.set(6, pa.field("tags", pa.list_(pa.field("element", pa.int64())))))
    pq.write_table(table.slice(0, 3100), tmp_path / "0.parquet", row_group_size=130)
    pq.write_table(table.slice(3100), tmp_path / "1.parquet", row_group_size=900)
    files = [tmp_path / "0.parquet", tmp_path / "1.parquet"]
    tables = ParquetTables.open(files, rows, table_rows=200)
    told = list[float]()
    profiles = [
        profile_parquet(tables, "y", nproc=nproc, convert=same, tell=told.append) for nproc in (1, 2, 3)
    ]
    assert_equal(profiles)
    assert profiles[0].num_rows == tables.num_rows
    assert max(told) <= 1
    if rows is None:
        assert_equal([profiles[0], profile([table], "y")])


def test_sample_of_many_rows_does_not_depend_on_the_number_of_processes(tmp_path):
    table = pa.table({"y": np.arange(150_000) % 2, "row": np.arange(150_000)})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=20_000)
    tables = ParquetTables.open([tmp_path / "a.parquet"], table_rows=30_000)
    assert_equal(
        [
            profile([table], "y"),
            *(profile_parquet(tables, "y", nproc=nproc, convert=same) for nproc in (1, 2)),
        ]
    )


@pytest.mark.parametrize("nproc", [1, 2])
def test_an_error_of_one_process_ends_all_of_them(nproc, tmp_path):
    pq.write_table(random_table(np.random.default_rng(2), 4000), tmp_path / "a.parquet", row_group_size=50)
    tables = ParquetTables.open([tmp_path / "a.parquet"], table_rows=50)
    with pytest.raises(DataError, match="row 3100 is damaged"):
        profile_parquet(tables, "y", nproc=nproc, convert=functools.partial(fail, row=3100))


def test_a_process_that_dies_is_told(tmp_path):
    pq.write_table(random_table(np.random.default_rng(2), 4000), tmp_path / "a.parquet", row_group_size=50)
    tables = ParquetTables.open([tmp_path / "a.parquet"], table_rows=50)
    with pytest.raises(RuntimeError, match="one of 2 processes died"):
        profile_parquet(tables, "y", nproc=2, convert=die)


def test_shares_have_all_selected_rows_once(tmp_path):
    rng = np.random.default_rng(3)
    sizes = rng.integers(0, 300, 12).tolist()
    table = pa.table({"row": np.arange(sum(sizes))})
    for number, end in enumerate(np.cumsum(sizes).tolist()):
        part = table.slice(end - sizes[number], sizes[number])
        pq.write_table(part, tmp_path / f"{number:02}.parquet", row_group_size=int(rng.integers(10, 150)))
    files = sorted(tmp_path.iterdir())
    for rows in (None, 1, 100, 400):
        tables = ParquetTables.open(files, rows, table_rows=64)
        everything = [*tables.tables(range(len(tables.runs)))]
        read = np.concatenate([part["row"].to_numpy() for _, part in everything])
        assert len(read) == tables.num_rows
        assert (np.diff(read) > 0).all()
        assert rows is not None or len(read) == sum(sizes)
        firsts = [first for first, _ in everything]
        assert firsts == np.cumsum([0, *(part.num_rows for _, part in everything[:-1])]).tolist()
        for num in (1, 2, 5, 100):
            shares = tables.shares(num)
            assert [run for share in shares for run in share] == [*range(len(tables.runs))]
            assert 1 <= len(shares) <= num
            in_shares = [item for share in shares for item in tables.tables(share)]
            assert [first for first, _ in in_shares] == firsts


def test_files_without_rows_are_told(tmp_path):
    pq.write_table(pa.table({"y": pa.array([], pa.int64())}), tmp_path / "a.parquet")
    tables = ParquetTables.open([tmp_path / "a.parquet"])
    with pytest.raises(ValueError, match="no row"):
        profile_parquet(tables, "y", nproc=2, convert=same)
