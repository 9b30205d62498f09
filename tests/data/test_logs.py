import datetime
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.csv as csv
import pyarrow.parquet as pq
import pytest

from meshrec.data import DataError
from meshrec.data.encoding import RowOrigin
from meshrec.data.faults import Faults
from meshrec.data.features import Key
from meshrec.data.features.values import microseconds_of
from meshrec.data.log_columns import LogColumns
from meshrec.data.logs import (
    LogTable,
    filter_log,
    fit_log,
    interactions,
    requests_of_histories,
    vocabulary_of,
)
from meshrec.train import Log

COLUMNS = LogColumns(user="who", item="what", time="when", action="kind", rating="stars")


def table(**more) -> pa.Table:
    columns = {
        "who": ["b", "a", "a", "b", "c", "a"],
        "what": ["x", "y", "x", "y", "z", "z"],
        "when": [5, 2, 2, 1, 9, 1],
        "kind": ["view", "buy", "view", "buy", "view", "buy"],
        "stars": [5.0, 3.0, None, 4.0, 1.0, 2.0],
    }
    return pa.table({**columns, **more})


def read(columns=COLUMNS, data=None, **options):
    data = table() if data is None else data
    rows = filter_log(LogTable("log", data, columns), Faults("raise"))
    return interactions(rows, fit_log(rows, users=False), num_rows=data.num_rows, **options)


def test_rows_are_sorted_by_user_and_time_and_ties_keep_their_order():
    log, users = read()
    assert users.to_pylist() == ["b", "a", "c"]
    assert log.offsets.tolist() == [0, 2, 5, 6]
    assert log.rows.tolist() == [3, 0, 5, 1, 2, 4]
    assert log.times.tolist() == [1, 5, 1, 2, 2, 9]
    assert log.catalogue.tolist() == [2, 3, 4]


def test_shuffled_ties_follow_the_seed():
    many = pa.table({"user": [1] * 40, "item": [*range(40)], "time": [7] * 40})
    columns = LogColumns(ties="shuffle")
    orders = [read(columns, many, seed=seed).log.rows.tolist() for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]
    assert orders[0] != [*range(40)]


def test_conditions_on_rows():
    assert read(replace(COLUMNS, actions=("buy",))).log.rows.tolist() == [5, 1, 3]
    assert read(replace(COLUMNS, min_rating=3.0)).log.rows.tolist() == [3, 0, 1]
    assert read(replace(COLUMNS, min_user_count=2)).log.rows.tolist() == [3, 0, 5, 1, 2]
    assert read(replace(COLUMNS, min_user_count=3, min_item_count=2)).log.rows.tolist() == [5, 1, 2]
    with pytest.raises(DataError, match="left"):
        read(replace(COLUMNS, min_user_count=9))


def test_items_have_their_features_and_hashed_keys():
    columns = LogColumns(user="who", item="what", time="when", item_features=("colour", "tags"))
    tags = [["p"], ["q", "p"], ["p"], ["q", "p"], [], []]
    data = table(colour=["red", "blue", "red", "blue", None, None], tags=tags)
    for hashed in (None, Key(name="item", max_rows=50, evict="error")):
        log, _ = read(columns, data, hashed=hashed)
        at = log.positions(log.items)
        assert (log.catalogue[at] == log.items).all()
        of_item = {row: int(place) for row, place in zip(log.rows, at, strict=True)}
        _, colours = log.described["colour"]
        assert colours.values[colours.starts[of_item[0]]] != colours.values[colours.starts[of_item[1]]]
        assert log.described["tags"][1].lengths[[of_item[0], of_item[1], of_item[4]]].tolist() == [1, 2, 0]
    assert log.item.keys is not None


def test_another_log_leaves_out_items_that_training_did_not_meet(caplog):
    rows = filter_log(LogTable("log", table(), COLUMNS), Faults("raise"))
    features = fit_log(rows, users=False)
    other = filter_log(LogTable("new", table(what=["x", "y", "w", "w", "z", "z"]), COLUMNS), Faults("raise"))
    assert interactions(other, features, num_rows=6).log.rows.tolist() == [0, 5, 1, 4]
    assert "new: left out 2 rows of items that training did not meet" in caplog.text
    strange = filter_log(LogTable("new", table(what=["w"] * 6), COLUMNS), Faults("raise"))
    log, users = interactions(strange, features, num_rows=6)
    assert (len(log.items), log.num_users, users.to_pylist()) == (0, 3, ["b", "a", "c"])
    assert "No row is left: compare the columns" in caplog.text


@pytest.mark.parametrize("unit", ["s", "ms", "us"])
def test_times_in_all_forms(unit):
    moments = [datetime.datetime(2024, 5, 1, 12, 30, second) for second in (0, 1, 59)]
    expected = [int(each.replace(tzinfo=datetime.timezone.utc).timestamp()) * 1_000_000 for each in moments]
    per_second = {"s": 1, "ms": 1000, "us": 1_000_000}[unit]
    forms = [
        pa.array([each // 1_000_000 * per_second for each in expected]),
        pa.array(moments).cast(pa.timestamp(unit)),
        pa.array([str(each) for each in moments]),
        pa.array([each.isoformat() + "Z" for each in moments]),
    ]
    for form in forms:
        assert microseconds_of(form, unit).tolist() == expected
    assert microseconds_of(pa.array(["2024-05-01"]), unit).tolist() == [1714521600 * 1_000_000]


def test_requests_have_lists_of_the_items_and_times_of_a_history():
    rows = filter_log(LogTable("log", table(), COLUMNS), Faults("raise"))
    item = vocabulary_of(fit_log(rows, users=False), "item")
    features, schema = requests_of_histories(item, history=2, times=True)
    assert schema.names == ["history", "times", "seen"]
    given = pa.table(
        {"history": [["x", "y", "z"], []], "times": [[1, 2, 3], []], "seen": [None, ["q"]]}, schema
    )
    found = features.encode(given, RowOrigin("a request", 0), Faults("raise"))
    rows_of = {
        name: int(row) for name, row in zip("xyz", item.rows_of(pa.array(["x", "y", "z"])), strict=True)
    }
    assert found.ids[0].values.tolist() == [rows_of["y"], rows_of["z"]]
    assert found.ids[1].values.tolist() == [2, 3]
    assert found.ids[2].values.tolist() == [rows_of[each] for each in "xyz"]  # beyond the history, too
    unseen = {
        "history": [["q", "x", "r", "y"], ["q"]],
        "times": [[1, 2, 3, 4], [5]],
        "seen": [["z", "q"], None],
    }
    found = features.encode(pa.table(unseen, schema), RowOrigin("a request", 0), Faults("raise"))
    assert [each.offsets.tolist() for each in found.ids] == [[0, 2, 2], [0, 2, 2], [0, 3, 3]]
    assert found.ids[0].values.tolist() == [rows_of["x"], rows_of["y"]]
    assert found.ids[1].values.tolist() == [2, 4]
    for history in (["x", None], ["x", ""]):
        missing = pa.table({"history": [history], "times": [[1, 2]], "seen": [[]]}, schema)
        with pytest.raises(DataError, match=r"'history'.*row 0"):
            features.encode(missing, RowOrigin("a request", 0), Faults("raise"))
    with pytest.raises(DataError, match=r"row 0.*1 values.*'history'.*2.*'times'"):
        features.encode(
            pa.table({"history": [["x"]], "times": [[1, 2]], "seen": [[]]}, schema),
            RowOrigin("a request", 0),
            Faults("raise"),
        )


def test_damage_is_told():
    with pytest.raises(DataError, match="'what'"):
        read(data=table().drop_columns(["what"]))
    with pytest.raises(DataError, match=r"'who'.*row 1.*1 row.*6"):
        read(data=table(who=["b", None, "a", "b", "c", "a"]))
    with pytest.raises(DataError, match="texts"):
        microseconds_of(pa.array(["yesterday"]), "s")
    with pytest.raises(DataError, match="time"):
        microseconds_of(pa.array([1.0, np.nan]), "s")
    with pytest.raises(ValueError, match=r"item_features.*\['seen'\]"):
        LogColumns(item_features=("seen",))
    with pytest.raises(ValueError, match="user 'who', item 'who'"):
        LogColumns(user="who", item="who")
    with pytest.raises(ValueError, match="min_rating"):
        LogColumns(actions=("buy",))
    with pytest.raises(ValueError, match=r"min_user_count.*0.*min_item_count.*1.*1"):
        LogColumns(min_user_count=0)


def test_damaged_rows_can_be_skipped():
    faults = Faults("skip")
    rows = filter_log(LogTable("log", table(who=["b", None, "a", "b", "c", "a"]), COLUMNS), faults)
    assert rows.table["row"].to_pylist() == [0, 2, 3, 4, 5]
    assert list(faults.by_file) == ["log"]


@pytest.mark.parametrize("kind", [pa.float64(), pa.decimal128(38, 0), pa.decimal128(20, 4)], ids=str)
def test_users_and_items_of_whole_numbers_are_integers(kind):
    numbers = table(who=[2, 1, 1, 2, 3, 1], what=[7, 8, 7, 8, 9, 9])
    exported = numbers.set_column(0, "who", numbers["who"].cast(pa.decimal128(38, 0)).cast(kind))
    exported = exported.set_column(1, "what", numbers["what"].cast(pa.decimal128(38, 0)).cast(kind))
    found, expected = read(data=exported), read(data=numbers)
    assert found.values.to_pylist() == expected.values.to_pylist() == [2, 1, 3]
    assert found.values.type == pa.int64()
    assert found.log.items.tolist() == expected.log.items.tolist()


@pytest.mark.parametrize("kind", [pa.float64(), pa.decimal128(20, 6)], ids=str)
def test_fractions_of_seconds_order_interactions(kind):
    seconds = [5.25, 2.75, 2.5, 1.0, 9.0, 1.5]
    found = read(data=table(when=pa.array(seconds).cast(kind)))
    thousandths = read(
        LogColumns(user="who", item="what", time="when", time_unit="ms"),
        table(when=[int(s * 1000) for s in seconds]),
    )
    assert found.log.items.tolist() == thousandths.log.items.tolist()


def test_times_of_a_log_have_a_format():
    days = ["05.01.2024", "02.01.2024", "02.01.2024", "01.01.2024", "09.01.2024", "01.01.2024"]
    columns = replace(COLUMNS, time_format="%d.%m.%Y")
    found, expected = read(columns, table(when=days)), read()
    assert found.log.items.tolist() == expected.log.items.tolist()
    with pytest.raises(DataError, match=r"'when'.*'2024-01-01'"):
        read(columns, table(when=["2024-01-01"] * 6))


@pytest.mark.parametrize("name", ["log.parquet", "log.csv"])
def test_a_wrong_column_lists_all_columns_of_the_file(name, tmp_path):
    data = pa.table({"user": [1], "item": [2], "when": [3], "price": [4]})
    write = pq.write_table if name.endswith("parquet") else csv.write_csv
    write(data, tmp_path / name)
    log = Log(log=(str(tmp_path / name),), columns=LogColumns(time="wen"))
    with pytest.raises(DataError, match=r"'wen'.*'user', 'item', 'when', 'price'.*Did you mean when"):
        log.fit()
