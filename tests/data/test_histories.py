import datetime
import decimal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as csv
import pyarrow.parquet as pq
import pytest

from meshrec.data import DataError, histories, log_parts
from meshrec.data.interactions import Interactions
from meshrec.data.log_columns import LogColumns
from meshrec.data.logs import sorted_order
from meshrec.train import Log

COLUMNS = LogColumns(
    user="who", item="what", time="when", action="kind", rating="stars", item_features=("colour", "tags")
)
IDS = {
    "text": lambda k: f"v{k}",
    "integer": lambda k: k,
    "float": lambda k: k / 1.0,
    "fraction": lambda k: k / 2,
    "decimal": lambda k: decimal.Decimal(k),
    "large": lambda k: (1 << 63) + k,
}
TYPES = {"decimal": pa.decimal128(20, 2), "large": pa.uint64()}


def column(rng, kind, num, *, nulls, encode=False):
    values = [
        None if nulls and rng.random() < 0.1 else IDS[kind](k) for k in rng.integers(0, 7, num).tolist()
    ]
    types = {"text": pa.string(), "integer": pa.int32(), **TYPES}
    array = pa.array(values, types.get(kind, pa.float64()))
    return array.dictionary_encode() if kind == "text" and encode else array


def random_log(rng):
    """Return the tables of a random log's files, and how to read them."""

    def one_of(*values):
        return values[rng.integers(len(values))]

    user, item, time = one_of(*IDS), one_of(*IDS), one_of("integer", "float", "timestamp", "text")
    nulls, encode = one_of(True, False), one_of(True, False)
    tables = []
    for _ in range(rng.integers(1, 4)):
        num = int(rng.integers(1, 26))
        seconds = rng.integers(0, 9, num) + 0.25 * rng.integers(0, 2, num)
        moments = [datetime.datetime.fromtimestamp(s, datetime.timezone.utc) for s in seconds]
        times = {
            "integer": pa.array(seconds.astype(int)),
            "float": pa.array(seconds),
            "timestamp": pa.array(moments, pa.timestamp("us", "UTC")),
            "text": pa.array([moment.isoformat() for moment in moments]),
        }[time]
        tags = [[f"t{k}" for k in rng.integers(0, 4, rng.integers(0, 3))] for _ in range(num)]
        tables.append(
            pa.table(
                {
                    "who": column(rng, user, num, nulls=nulls, encode=encode),
                    "what": column(rng, item, num, nulls=nulls, encode=encode),
                    "when": times,
                    "kind": [one_of("view", "buy", None) for _ in range(num)],
                    "stars": [one_of(1.0, 4.0, None) for _ in range(num)],
                    "colour": column(rng, one_of("float", "fraction"), num, nulls=True),
                    "tags": pa.array(tags, pa.list_(pa.string())),
                }
            )
        )
    columns = replace(
        COLUMNS,
        actions=one_of((), ("buy",)),
        min_rating=one_of(None, 2.0),
        min_user_count=one_of(1, 2, 3),
        min_item_count=one_of(1, 1, 2),
        ties=one_of("keep", "shuffle"),
        item_features=one_of((), COLUMNS.item_features),
    )
    options = {
        "on_error": one_of("raise", "skip"),
        "windows": one_of(True, False),
        "hashed": one_of(None, 50),
        "seed": one_of(0, 1),
    }
    return tables, Log(log=("",), columns=columns, **options)


def read(source: Log):
    features = source.fit()
    return features, source.interactions(features)


def outcome(source: Log):
    """Return the results of a source, or the error."""
    try:
        return read(source)
    except ValueError as error:
        return error


def assert_equal(actual, expected):
    if isinstance(expected, ValueError) or isinstance(actual, ValueError):
        assert repr(actual) == repr(expected)
        return
    (features, logged), (expected_features, expected_logged) = actual, expected
    assert features.to_json() == expected_features.to_json()
    assert logged.values.type == expected_logged.values.type
    assert logged.values.to_pylist() == expected_logged.values.to_pylist()
    log, other = logged.log, expected_logged.log
    for name in ("offsets", "items", "times", "rows", "catalogue"):
        assert getattr(log, name).tolist() == getattr(other, name).tolist(), name
    for name in ("name", "num_rows", "item", "user"):
        assert getattr(log, name) == getattr(other, name), name
    assert (log.user_ids is None) == (other.user_ids is None)
    if log.user_ids is not None:
        assert log.user_ids.tolist() == other.user_ids.tolist()
    assert log.described.keys() == other.described.keys()
    for name, (feature, ranges) in log.described.items():
        assert feature == other.described[name][0]
        assert ranges.lengths.tolist() == other.described[name][1].lengths.tolist()
        for at in range(len(ranges.lengths)):
            of_item, of_other = (
                r.values[r.starts[at] : r.starts[at] + r.lengths[at]].tolist()
                for r in (ranges, other.described[name][1])
            )
            assert of_item == of_other


def written(folder: Path, tables, *, row_group_size=7) -> Path:
    data = folder / "log"
    data.mkdir(exist_ok=True)
    for number, table in enumerate(tables):
        day = data / f"day={number % 2}"
        day.mkdir(exist_ok=True)
        pq.write_table(table, day / f"{number}.parquet", row_group_size=row_group_size)
    return data


@pytest.mark.parametrize("seed", range(25))
def test_histories_on_disk_equal_those_in_memory(seed, tmp_path, monkeypatch):
    tables, source = random_log(np.random.default_rng(seed))
    source = replace(source, log=(str(written(tmp_path, tables)),))
    expected = outcome(source)
    # Little memory: many parts and buckets.
    monkeypatch.setattr(log_parts, "_MIN_ROWS", 5)
    on_disk = replace(source, histories=tmp_path / "built", histories_gib=4e-6)
    assert_equal(outcome(on_disk), expected)
    assert_equal(outcome(on_disk), expected)


def plain_log(rng, num_rows):
    users, items = rng.integers(0, 9, num_rows), rng.integers(0, 12, num_rows)
    return pa.table({"user": users, "item": items, "time": rng.integers(0, 99, num_rows)})


def files_in(folder):
    return {path: path.stat().st_mtime_ns for path in (folder / "parts").glob("*.arrow")}


def test_a_second_build_reads_nothing_again_and_new_files_add_parts(tmp_path):
    rng = np.random.default_rng(0)
    tables = [plain_log(rng, 30) for _ in range(3)]
    source = Log(log=(str(written(tmp_path, tables[:2])),), histories=tmp_path / "built")
    read(source)
    before = files_in(source.histories)
    read(source)
    assert files_in(source.histories) == before
    written(tmp_path, tables)
    assert_equal(read(source), read(replace(source, histories=None)))
    after = files_in(source.histories)
    assert len(after) == 3
    assert before.items() <= after.items()


def test_files_with_whole_and_with_fractional_seconds_are_sorted_together(tmp_path):
    tables = [
        pa.table({"user": [1, 1, 2, 1], "item": [0, 1, 2, 3], "time": times})
        for times in ([-3.0, 7.0, 8.0, 9.0], [6.75, 8.5, 8.25, -3.25])
    ]
    source = Log(log=(str(written(tmp_path, tables)),), histories=tmp_path / "built")
    logged = read(source)
    assert_equal(logged, read(replace(source, histories=None)))
    assert logged[1].log.times.tolist() == [-4, -3, 6, 7, 8, 9, 8, 8]


def test_ranks_share_a_folder_and_read_the_same_batches(tmp_path):
    rng = np.random.default_rng(6)
    source = Log(log=(str(written(tmp_path, [plain_log(rng, 60)])),), histories=tmp_path / "built", history=3)
    expected = replace(source, histories=None).load()
    with ThreadPoolExecutor(4) as ranks:
        datasets = list(ranks.map(lambda _: source.load(), range(4)))
    for dataset in datasets:
        assert_same_dataset(dataset, expected)


def assert_same_dataset(dataset, expected):
    assert dataset.item_counts.tolist() == expected.item_counts.tolist()
    assert (dataset.new_user_scores is None) == (expected.new_user_scores is None)
    if dataset.new_user_scores is not None:
        assert dataset.new_user_scores.tolist() == expected.new_user_scores.tolist()
    for part in ("train", "validation", "test"):
        batches = [[*getattr(each, part).batches(8)] for each in (dataset, expected)]
        for actual, other in zip(*batches, strict=True):
            assert actual.sparse.values().tolist() == other.sparse.values().tolist()
            assert actual.sparse.lengths().tolist() == other.sparse.lengths().tolist()


@pytest.mark.parametrize("held_out", ["leave_last_out", "time"])
@pytest.mark.parametrize("windows", [True, False])
def test_a_second_start_makes_no_pass_over_the_log(held_out, windows, tmp_path, monkeypatch):
    rng = np.random.default_rng(8)
    data = str(written(tmp_path, [plain_log(rng, 90)]))
    source = Log(log=(data,), histories=tmp_path / "built", held_out=held_out, windows=windows, history=3)
    expected = replace(source, histories=None).load()
    assert_same_dataset(source.load(), expected)
    with monkeypatch.context() as patched:
        patched.setattr(Interactions, "blocks", None)
        assert_same_dataset(source.load(), expected)
        # Options of the samples change no pass.
        shorter = replace(source, history=2, evaluated_users=3)
        with pytest.raises(TypeError):
            replace(shorter, histories=None).load()
        longer = shorter.load()
    assert_same_dataset(longer, replace(shorter, histories=None).load())


def test_changed_splits_logs_and_files_make_a_new_pass(tmp_path):
    rng = np.random.default_rng(9)
    tables = [plain_log(rng, 90), plain_log(rng, 40)]
    data = str(written(tmp_path, tables[:1]))
    source = Log(log=(data,), histories=tmp_path / "built", held_out="time", history=3)
    source.load()
    wider = replace(source, test_share=0.3)
    assert_same_dataset(wider.load(), replace(wider, histories=None).load())
    for path in source.histories.glob("derived-*/train_stops.npy"):
        path.write_bytes(path.read_bytes()[:-8])
    assert_same_dataset(source.load(), replace(source, histories=None).load())
    written(tmp_path, tables)
    assert_same_dataset(source.load(), replace(source, histories=None).load())
    assert len([*source.histories.glob("derived-*")]) == 2


def test_changed_files_and_options_replace_what_depends_on_them(tmp_path):
    rng = np.random.default_rng(1)
    source = Log(log=(str(written(tmp_path, [plain_log(rng, 30)])),), histories=tmp_path / "built")
    read(source)
    before = files_in(source.histories)
    written(tmp_path, [plain_log(rng, 30)])
    assert_equal(read(source), read(replace(source, histories=None)))
    assert files_in(source.histories).keys().isdisjoint(before)
    rare = replace(source, columns=LogColumns(min_item_count=3))
    assert_equal(read(rare), read(replace(rare, histories=None)))
    assert len(files_in(source.histories)) == 1  # counts do not change the parts


def test_row_numbers_beyond_32_bits_are_exact(tmp_path, monkeypatch):
    before = (1 << 31) - 10
    encode = histories.encode_parts

    def shifted(*arguments, **options):
        found = encode(*arguments, **options)
        parts = tuple(part._replace(first_row=part.first_row + before) for part in found.parts)
        return found._replace(parts=parts, num_rows=found.num_rows + before)

    rng = np.random.default_rng(7)
    source = Log(log=(str(written(tmp_path, [plain_log(rng, 30)])),), histories=tmp_path / "built")
    expected = read(replace(source, histories=None))[1].log.rows + before
    monkeypatch.setattr(histories, "encode_parts", shifted)
    assert read(source)[1].log.rows.tolist() == expected.tolist()


def test_an_interrupted_build_continues_from_its_parts(tmp_path, monkeypatch):
    rng = np.random.default_rng(2)
    source = Log(
        log=(str(written(tmp_path, [plain_log(rng, 60)])),), histories=tmp_path / "built", histories_gib=1e-6
    )
    monkeypatch.setattr(log_parts, "_MIN_ROWS", 7)
    encode, calls = log_parts._encode_block, []

    def failing(*arguments):
        calls.append(arguments)
        if len(calls) > 4:
            raise OSError("the disk is full")
        return encode(*arguments)

    monkeypatch.setattr(log_parts, "_encode_block", failing)
    with pytest.raises(OSError, match="disk"):
        source.fit()
    finished = files_in(source.histories)
    assert finished
    monkeypatch.setattr(log_parts, "_encode_block", encode)
    assert_equal(read(source), read(replace(source, histories=None)))
    assert finished.items() <= files_in(source.histories).items()


def test_a_damaged_stage_is_built_again(tmp_path):
    rng = np.random.default_rng(3)
    source = Log(log=(str(written(tmp_path, [plain_log(rng, 30)])),), histories=tmp_path / "built")
    expected = read(replace(source, histories=None))
    read(source)
    (path,) = source.histories.glob("sorted-*/items.npy")
    path.write_bytes(path.read_bytes()[:-4])
    assert_equal(read(source), expected)
    path.with_name("manifest.json").write_text("{}")
    with pytest.raises(DataError, match=r"sorted-.*manifest\.json"):
        read(source)


def test_items_that_training_did_not_meet_are_left_out(tmp_path, caplog):
    rng = np.random.default_rng(4)
    source = Log(log=(str(written(tmp_path, [plain_log(rng, 30)])),))
    features = source.fit()
    more = tmp_path / "more.csv"
    csv.write_csv(pa.table({"user": [1, 7, 2], "item": [3, 77, 78], "time": [5, 6, 7]}), more)
    expected = source.interactions(features, str(more))
    actual = replace(source, histories=tmp_path / "built").interactions(features, str(more))
    assert_equal((features, actual), (features, expected))
    assert caplog.text.count("left out 2 rows of items that training did not meet") == 2


def test_orders_equal_those_of_lexsort():
    rng = np.random.default_rng(5)
    for num in (0, 1, 2, 100, 1000):
        for high in (1, 5, 1 << 40, 1 << 62):
            keys = [rng.integers(-high, high, num) for _ in range(3)]
            keys[1] //= high // 3 or 1
            assert sorted_order(keys).tolist() == np.lexsort(keys).tolist()


@pytest.mark.parametrize("gib", [0.0, -1.0, float("nan"), float("inf")])
def test_memory_to_build_must_be_positive(gib):
    with pytest.raises(ValueError, match=str(gib)):
        Log(log=("log.parquet",), histories_gib=gib)
