"""Labels that come later: equal to a plain join of all records, however the streams arrive."""

import json

import numpy as np
import pyarrow as pa
import pytest

from meshrec.checkpoint import CheckpointManager
from meshrec.data import DataError, LabelJoin
from meshrec.data.held_rows import HeldRows, TimeQueue

WINDOW, LATENESS = 12, 4
SECOND = 10**9


def streams(seed, num=60, num_keys=8, key=int):
    """Two streams with repeated keys and equal times, of which some records are late."""
    rng = np.random.default_rng(seed)

    def records(num, name):
        times = np.sort(rng.integers(0, 100, num)) - rng.integers(0, 2 * LATENESS, num)
        keys = [key(number) for number in rng.integers(0, num_keys, num).tolist()]
        return pa.table(
            {"key": keys, "ts": times, name: np.arange(num), "text": [f"{n}" for n in range(num)]}
        )

    return records(num, "number"), records(num // 2, "action")


def in_time(table):
    """Return number, time and key of the records that are not late, and the number of late ones."""
    records, largest = [], -np.inf
    rows = zip(table["ts"].to_pylist(), table["key"].to_pylist(), strict=True)
    for number, (time, key) in enumerate(rows):
        if time >= largest - LATENESS:
            records.append((time, number, key))
        largest = max(largest, time)
    return sorted(records, key=lambda record: record[:2]), table.num_rows - len(records)


def plain_join(impressions, actions, *, at_once):
    """Return (decision time, label, number) of all rows in order, and the counts."""
    shown, late_impressions = in_time(impressions)
    acted, late_actions = in_time(actions)
    accepted, rows, counts = [], [], {}
    for time, number, key in shown:
        if all(key != other or time > start + WINDOW for start, _, other in accepted):
            accepted.append((time, number, key))
    matched = 0
    for time, number, key in accepted:
        hits = [when for when, _, other in acted if other == key and time <= when <= time + WINDOW]
        matched += len(hits)
        if at_once:
            rows.append((time, 0, number))
        if hits:
            rows.append((hits[0], 1, number))
            counts["repeated_actions"] = counts.get("repeated_actions", 0) + len(hits) - 1
        elif not at_once:
            rows.append((time + WINDOW, 0, number))
    counts |= {"late_impressions": late_impressions, "late_actions": late_actions}
    counts |= {"duplicate_impressions": len(shown) - len(accepted), "unmatched_actions": len(acted) - matched}
    return sorted(rows), counts


def create(**options):
    options = {"window_seconds": WINDOW, "allowed_lateness_seconds": LATENESS} | options
    return LabelJoin(key="key", time="ts", label="y", **options)


def parts(table, rng, num):
    cuts = np.sort(rng.integers(0, table.num_rows + 1, num - 1)).tolist()
    return [table.slice(a, b - a) for a, b in zip([0, *cuts], [*cuts, table.num_rows], strict=True)]


def labels(rows):
    return (
        list(zip(rows["y"].to_pylist(), rows["number"].to_pylist(), strict=True)) if len(rows.schema) else []
    )


def expected(rows):
    return [row[1:] for row in rows]


@pytest.mark.parametrize("negatives", ["at_window_end", "at_once"])
@pytest.mark.parametrize("key", [int, "request {}".format, "{}".format, lambda n: f"{n}".encode()])
def test_rows_are_those_of_a_plain_join_however_the_streams_are_cut(negatives, key):
    for seed in range(25):
        impressions, actions = streams(seed, key=key)
        rows, counts = plain_join(impressions, actions, at_once=negatives == "at_once")
        rng = np.random.default_rng(seed)
        join, found = create(negatives=negatives), []
        # One stream may be far ahead of the other.
        calls = [(part, None) for part in parts(impressions, rng, 7)] + [
            (None, part) for part in parts(actions, rng, 5)
        ]
        calls = merged(calls[:7], calls[7:], set(rng.permutation(12)[:7].tolist()))
        for shown, acted in calls:
            table = join.add(shown, acted)
            found += labels(table)
            watermark = -np.inf if join.watermark is None else join.watermark / SECOND
            assert found == expected(row for row in rows if row[0] < watermark)
            for number, text in zip(
                *(table[c].to_pylist() for c in ("number", "text") if found), strict=True
            ):
                assert text == str(number)
        found += labels(join.finish())
        assert found == expected(rows)
        assert {name: num for name, num in join.counts.items() if num} == {
            name: num for name, num in counts.items() if num
        }
        assert (join.num_rows, join.num_bytes) == (0, 0)


def merged(first, second, numbers_of_first):
    """Merge two lists: those of the first list come at the given positions."""
    first, second = iter(first), iter(second)
    return [next(first if number in numbers_of_first else second) for number in range(12)]


@pytest.mark.parametrize("negatives", ["at_window_end", "at_once"])
@pytest.mark.parametrize("on_full", ["raise", "decide"])
def test_a_restored_join_continues_exactly(negatives, on_full, tmp_path):
    manager = CheckpointManager(tmp_path)
    options = {"negatives": negatives, "max_rows": 20 if on_full == "decide" else 1000, "on_full": on_full}
    for seed in range(3):
        impressions, actions = streams(seed, key="{}".format)
        impressions = impressions.set_column(3, "text", impressions["text"].dictionary_encode())
        rng = np.random.default_rng(seed)
        join, restored = create(**options), create(**options)
        calls = zip(parts(impressions, rng, 6), parts(actions, rng, 6), strict=True)
        for step, (shown, acted) in enumerate(calls):
            if step % 3 == 0:
                restored = create(**options)
            manager.save(10 * seed + step, {"join": join})
            manager.load_latest({"join": restored})
            rows = join.add(shown, acted)
            assert rows.equals(restored.add(shown, acted))
            assert (restored.counts, restored.num_rows, restored.watermark) == (
                join.counts,
                join.num_rows,
                join.watermark,
            )
        assert join.finish().equals(restored.finish())


def test_a_state_of_other_options_is_refused():
    state = create().state_dict()
    with pytest.raises(ValueError, match=r"window.*13000000000.*12000000000"):
        create(window_seconds=13).load_state_dict(state)
    create(max_rows=5, on_error="skip").load_state_dict(state)


@pytest.mark.parametrize(
    "convert",
    [
        lambda times: times.cast(pa.timestamp("s")),
        lambda times: times.cast(pa.timestamp("s")).cast(pa.timestamp("ms", "UTC")),
        lambda times: times.cast(pa.timestamp("s")).cast(pa.timestamp("us")),
        lambda times: times.cast(pa.timestamp("s")).cast(pa.timestamp("ns", "Europe/Oslo")),
        lambda times: times.cast(pa.int32()),
    ],
)
def test_times_may_have_any_unit(convert):
    impressions, actions = streams(0)
    tables = [table.set_column(1, "ts", convert(table["ts"])) for table in (impressions, actions)]
    join = create()
    rows = labels(join.add(*tables)) + labels(join.finish())
    assert rows == expected(plain_join(impressions, actions, at_once=False)[0])
    # Streams may have different units.
    join = create()
    assert labels(join.add(impressions, tables[1])) + labels(join.finish()) == rows


def test_integers_have_the_given_unit():
    join = create(time_unit="ms", window_seconds=0.01, allowed_lateness_seconds=0)
    shown = pa.table({"key": [1, 2], "ts": [0, 0], "number": [0, 1]})
    join.add(shown, pa.table({"key": [1, 2], "ts": [10, 11]}))
    assert labels(join.finish()) == [(0, 1), (1, 0)]
    assert join.counts["unmatched_actions"] == 1


def test_the_largest_times_and_durations_do_not_overflow():
    seconds, largest = 2**61 / SECOND, 3 * 2**61 - 2
    join = create(time_unit="ns", window_seconds=seconds, allowed_lateness_seconds=seconds)
    rows = labels(join.add(shown([1, 2], [-largest, largest]), acted([2], [largest])))
    assert rows + labels(join.finish()) == [(0, 1), (1, 2)]
    assert (join.num_rows, join.num_bytes) == (0, 0)


def test_keys_of_a_dictionary_are_their_values():
    impressions, actions = streams(3, key="{}".format)
    encoded = impressions.set_column(0, "key", impressions["key"].dictionary_encode())
    join = create()
    rows = labels(join.add(encoded.slice(0, 20), actions)) + labels(join.add(encoded.slice(20)))
    assert rows + labels(join.finish()) == expected(plain_join(impressions, actions, at_once=False)[0])


def test_invalid_records_are_an_error_before_any_record_is_taken():
    impressions, actions = streams(1)
    broken = pa.table({"key": [1, None], "ts": [5, 6], "action": [0, 1], "text": ["", ""]})
    join = create()
    with pytest.raises(DataError, match=r"actions, record 1:.*None"):
        join.add(impressions, broken)
    far = pa.table({"key": [1], "ts": pa.array([2**40], pa.timestamp("s")), "number": [0], "text": [""]})
    with pytest.raises(DataError, match=r"impressions, record 0:.*1099511627776"):
        join.add(far)
    rows = labels(join.add(impressions, actions)) + labels(join.finish())
    assert rows == expected(plain_join(impressions, actions, at_once=False)[0])


def test_records_without_a_row_are_counted_and_set_aside(tmp_path):
    path = tmp_path / "aside.jsonl"
    join = create(on_error="skip", set_aside=path)
    shown = pa.table(
        {
            "key": [1, None, 1, 2, 3, 4],
            "ts": pa.array([10, 11, 12, 30, 20, 2**40], pa.timestamp("s")),
            "number": range(6),
        }
    )
    acted = pa.table(
        {"key": [1, 9, 1], "ts": pa.array([11, 12, 12], pa.timestamp("s")), "x": ["a", "b", "c"]}
    )
    join.add(shown, acted)
    join.finish()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["stream"], line["number"], line["problem"]) for line in lines] == [
        ("impressions", 1, "invalid"),
        ("impressions", 5, "invalid"),
        ("impressions", 4, "late"),
        ("impressions", 2, "duplicate"),
        ("actions", 2, "repeated"),
        ("actions", 1, "unmatched"),
    ]
    assert lines[-1]["values"] == {"key": 9, "ts": "1970-01-01 00:00:12", "x": "b"}
    assert join.counts == {
        "invalid_impressions": 2,
        "invalid_actions": 0,
        "late_impressions": 1,
        "late_actions": 0,
        "duplicate_impressions": 1,
        "repeated_actions": 1,
        "unmatched_actions": 1,
        "early_decisions": 0,
    }


def shown(keys, times):
    return pa.table({"key": keys, "ts": times, "number": keys})


def acted(keys, times):
    return pa.table({"key": keys, "ts": times})


def test_an_idle_stream_holds_the_other_back_for_a_limited_time():
    waits, goes_on = create(), create(idle_seconds=5)
    for join in (waits, goes_on):
        assert len(labels(join.add(shown([1, 2], [0, 30])))) == (join is goes_on)
    assert waits.watermark is None
    # The first stream is read up to 30, minus the lateness, minus five seconds.
    assert goes_on.watermark == 21 * SECOND
    for join in (waits, goes_on):
        join.add(None, acted([1, 2], [7, 32]))
        join.finish()
    assert [join.counts["late_actions"] for join in (waits, goes_on)] == [0, 1]


def test_a_clock_moves_the_watermark_while_both_streams_are_idle():
    join = create()
    assert join.add(shown([1], [0]), acted([1], [3])).num_rows == 0
    assert labels(join.add(watermark=3 * SECOND + 1)) == [(1, 1)]
    assert join.add(watermark=SECOND).num_rows == 0
    assert join.watermark == 3 * SECOND + 1
    join.add(shown([2], [3]))
    assert join.counts["late_impressions"] == 1


@pytest.mark.parametrize("negatives", ["at_window_end", "at_once"])
def test_over_the_limit_the_oldest_are_decided_early(negatives):
    join = create(max_rows=3, on_full="decide", allowed_lateness_seconds=0, negatives=negatives)
    rows = join.add(shown([1, 2, 3, 4], [0, 1, 2, 3]), acted([3, 9], [2, 5]))
    is_early = negatives == "at_window_end"
    # The last impression waits for the watermark, which is 3 seconds.
    assert labels(rows) == ([(1, 3), (0, 1), (0, 2)] if is_early else [(0, 1), (0, 2), (0, 3), (1, 3)])
    assert (join.num_rows, join.counts["early_decisions"]) == (3, 2)
    # While actions are missing, the watermark has to rise.
    rows = join.add(shown([5, 6, 7], [6, 7, 8]))
    assert join.num_rows == 3
    assert join.watermark > 5 * SECOND
    total = labels(rows) + labels(join.add(None, acted([1, 7], [6, 9]))) + labels(join.finish())
    assert (1, 7) in total
    assert [number for label, number in total if not label] == ([4, 5, 6] if is_early else [4, 5, 6, 7])


@pytest.mark.parametrize("negatives", ["at_window_end", "at_once"])
def test_early_decisions_leave_one_row_per_impression(negatives):
    num = 400
    ids = np.arange(num)
    for max_rows in (1, 10, 25):
        join = create(max_rows=max_rows, on_full="decide", negatives=negatives)
        rows = []
        for start in range(0, num, 7):
            part = ids[start : start + 7]
            rows += labels(join.add(shown(part, part // 2), acted(part[::3] - 5, part[::3] // 2 + 1)))
            assert join.num_rows <= max_rows
        rows += labels(join.finish())
        numbers = [number for label, number in rows if not (negatives == "at_once" and label)]
        assert len(set(numbers)) == len(numbers) == num - join.counts["late_impressions"]
        assert join.counts["early_decisions"] > 0
        assert join.num_bytes == 0


def test_over_the_limit_is_an_error_that_takes_no_records():
    join = create(max_rows=2)
    join.add(shown([1, 2, 3], [0, 1, 2]))
    with pytest.raises(DataError, match=r"3 records.*max_rows=2"):
        join.add(None, acted([1], [1]))
    larger = create(max_rows=3)
    larger.load_state_dict(join.state_dict())
    larger.add(None, acted([1], [1]))
    assert labels(larger.finish()) == [(1, 1), (0, 2), (0, 3)]


@pytest.mark.parametrize(
    ("impressions", "actions", "message"),
    [
        (shown([1], [0]).rename_columns(["keys", "ts", "number"]), None, "'key'.*Did you mean keys"),
        (shown([1], [0]).append_column("y", pa.array([1])), None, "'y'"),
        (shown([1.5], [0]), None, "double"),
        (shown([1], [0.5]), None, "double"),
        (shown([1], [0]), acted(["1"], [0]), "int64 in impressions and string in actions"),
        (shown([1], [0]).append_column("z", pa.array([1])), None, "z: int64"),
    ],
)
def test_tables_that_cannot_be_joined(impressions, actions, message):
    join = create()
    if "z:" in message:
        join.add(shown([1], [0]))
    with pytest.raises(DataError, match=message):
        join.add(impressions, actions)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window_seconds": -1}, "window_seconds.*-1"),
        ({"allowed_lateness_seconds": float("nan")}, "allowed_lateness_seconds.*nan"),
        ({"idle_seconds": 1e11}, "idle_seconds"),
        ({"negatives": "never"}, "'never'"),
        ({"time_unit": "min"}, "'min'"),
        ({"on_full": "drop"}, "'drop'"),
        ({"on_error": "ignore"}, "'ignore'"),
        ({"max_rows": 0}, "max_rows.*0"),
    ],
)
def test_options_that_cannot_be(options, message):
    with pytest.raises(ValueError, match=message):
        create(**options)


def test_three_different_columns_are_named():
    with pytest.raises(ValueError, match="ts"):
        LabelJoin(key="ts", time="ts", label="y", window_seconds=1)


def test_held_rows_are_those_not_released():
    rng = np.random.default_rng(0)
    rows, alive, count = HeldRows(), set(), 0
    for size in rng.integers(0, 200, 60).tolist():
        numbers = count + np.flatnonzero(rng.random(size) < 0.7)
        count += size
        rows.append(numbers, pa.table({"n": numbers, "text": [f"{n}" for n in numbers.tolist()]}))
        alive |= set(numbers.tolist())
        gone = rng.permutation(sorted(alive))[: rng.integers(0, len(alive) + 1) // 2]
        rows.release(gone)
        alive -= set(gone.tolist())
        wanted = rng.permutation(sorted(alive))
        if alive:
            table = rows.take(wanted)
            assert table["n"].to_pylist() == wanted.tolist()
            assert table["text"].to_pylist() == [f"{n}" for n in wanted.tolist()]
            assert rows.take(wanted, ["text"]).column_names == ["text"]
            assert rows.held()[0].tolist() == sorted(alive)
    assert len(rows._chunks) < 12
    rows.release(np.array(sorted(alive)))
    assert rows.held() is None
    assert rows.num_bytes == 0


def test_a_time_queue_returns_rows_by_time_and_then_by_number():
    rng = np.random.default_rng(0)
    queue, waiting, count = TimeQueue(), [], 0
    for limit in range(0, 300, 3):
        times = limit + rng.integers(0, 40, rng.integers(0, 20))
        numbers = np.arange(count, count + len(times))
        count += len(times)
        queue.append(times, numbers)
        waiting += zip(times.tolist(), numbers.tolist(), strict=True)
        taken = queue.take_before(limit)
        due = sorted(item for item in waiting if item[0] < limit)
        assert list(zip(taken.times.tolist(), taken.indices.tolist(), strict=True)) == due
        waiting = sorted(item for item in waiting if item[0] >= limit)
        assert list(map(tuple, np.stack(queue.rows(), 1).tolist())) == waiting
        assert len(queue) == len(waiting)
