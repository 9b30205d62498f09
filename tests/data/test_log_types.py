"""A log has the same histories whatever the types and layout of its columns: those of plain Python values."""

import datetime
import uuid
from collections import defaultdict
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from meshrec.data.log_columns import LogColumns
from meshrec.train import ClickLog, Log

EPOCH = datetime.datetime(1970, 1, 1)
LARGE = 1_700_000_000_000_000_000  # floats have no such number
NUM_IDS = 6


def texts(number: int) -> str:
    return ["x", "007", "7", "é", "null", "a" * 20][number]


def uuids(number: int) -> uuid.UUID:
    return uuid.UUID(int=number << 90 | 5)


def encoded(kind: pa.DataType):
    return lambda values: pa.array([each if each is None else each.encode() for each in values], kind)


def of_uuids(kind: pa.DataType):
    return lambda values: pa.array([each if each is None else each.bytes for each in values], kind)


def decimals(kind: pa.DataType, divisor: int = 1):
    return lambda values: pa.array(
        [each if each is None else Decimal(each) / divisor for each in values], kind
    )


def array(kind: pa.DataType):
    return lambda values: pa.array(values, kind)


IDS = {
    **{
        f"small {kind}": (lambda number: number, array(kind))
        for kind in (pa.int8(), pa.uint32(), pa.int64(), pa.float32(), pa.float64())
    },
    "small decimal64": (lambda number: number, decimals(pa.decimal64(10, 2))),
    "int64": (lambda number: LARGE + number, array(pa.int64())),
    "negative": (lambda number: number - LARGE, array(pa.int64())),
    "uint64": (lambda number: 2**63 - 2 + number, array(pa.uint64())),
    "decimal128": (lambda number: LARGE + number, decimals(pa.decimal128(38, 0))),
    "decimal128 with a scale": (lambda number: LARGE + number, decimals(pa.decimal128(38, 10))),
    "decimal256": (lambda number: LARGE + number, decimals(pa.decimal256(60, 2))),
    **{str(kind): (texts, array(kind)) for kind in (pa.string(), pa.large_string(), pa.string_view())},
    **{str(kind): (texts, encoded(kind)) for kind in (pa.binary(), pa.large_binary(), pa.binary_view())},
    "uuid as text": (lambda number: str(uuids(number)), array(pa.string())),
    "uuid as bytes": (uuids, of_uuids(pa.binary(16))),
    "uuid": (uuids, of_uuids(pa.uuid())),
}
"""By name: the value of a number, and a function which makes a column of values."""


def timestamps(kind: pa.TimestampType):
    return lambda times: pa.array(times, pa.timestamp("us")).cast(kind)


def numbers(divisor: int):
    return lambda times: pa.array([each if each is None else each // divisor for each in times])


def iso(kind: pa.DataType, separator: str):
    return lambda times: pa.array(
        [
            each if each is None else (EPOCH + datetime.timedelta(microseconds=each)).isoformat(separator)
            for each in times
        ],
        kind,
    )


TIMES = {
    "timestamp[s]": (1_000_000, timestamps(pa.timestamp("s")), {}),
    "timestamp[ms]": (1000, timestamps(pa.timestamp("ms")), {}),
    "timestamp[us]": (1, timestamps(pa.timestamp("us")), {}),
    "timestamp[ns]": (1, timestamps(pa.timestamp("ns")), {}),
    "INT96": (1, timestamps(pa.timestamp("us")), {}),
    "with a time zone": (1, timestamps(pa.timestamp("us", "Europe/Berlin")), {}),
    "seconds": (1_000_000, numbers(1_000_000), {}),
    "milliseconds": (1000, numbers(1000), {"time_unit": "ms"}),
    "microseconds": (1, numbers(1), {"time_unit": "us"}),
    "float seconds": (
        1,
        lambda times: pa.array([each if each is None else each / 1e6 for each in times], pa.float64()),
        {},
    ),
    "decimal seconds": (1, decimals(pa.decimal128(20, 6), 10**6), {}),
    "text": (1, iso(pa.string(), "T"), {}),
    "text_view": (1, iso(pa.string_view(), " "), {}),
}
"""By name: the resolution in microseconds, a function which makes a column of microseconds, the options."""


@pytest.fixture(params=range(len(IDS)), ids=lambda seed: f"seed {seed}")
def drawn(request, tmp_path):
    """Return plain rows (user, item, microseconds, label), a file with the rows, and the columns to read.

    Over all seeds, every type is once the type of users, and of items, and at least once of times.
    """
    rng = np.random.default_rng(request.param)
    num = 60
    user = [*IDS][request.param]
    item = [*IDS][(7 * request.param + 3) % len(IDS)]
    time = [*TIMES][request.param % len(TIMES)]
    resolution, column_of_times, options = TIMES[time]
    # Few different times before and after 1970, so that there are ties, also within a second.
    start = int(rng.choice([-5_000_000, 1_600_000_000_000_000]))
    times = [start + int(each) * 400_001 for each in rng.integers(0, 13, num)]
    plain = [
        *([IDS[kind][0](int(each)) for each in rng.integers(0, NUM_IDS, num)] for kind in (user, item)),
        [each // resolution * resolution for each in times],
    ]
    for column, values in enumerate(plain):
        values[int(rng.integers(num // 3)) + column * num // 3] = None
    labels = rng.integers(0, 2, num).tolist()
    arrays = [IDS[user][1](plain[0]), IDS[item][1](plain[1]), column_of_times(plain[2]), pa.array(labels)]
    for column in range(2):
        kind = arrays[column].type
        if rng.random() < 0.5 and not isinstance(kind, pa.BaseExtensionType) and "view" not in str(kind):
            arrays[column] = arrays[column].dictionary_encode()
    arrays = [chunked(each) if rng.random() < 0.5 else each for each in arrays]
    pq.write_table(
        pa.table(arrays, names=["user", "item", "time", "clicked"]),
        tmp_path / "log.parquet",
        row_group_size=int(rng.choice([7, 1000])),
        use_dictionary=bool(rng.random() < 0.5),
        use_deprecated_int96_timestamps=time == "INT96",
    )
    return [*zip(*plain, labels, strict=True)], str(tmp_path / "log.parquet"), LogColumns(**options)


def chunked(column: pa.Array) -> pa.ChunkedArray:
    """Return a column in several chunks, with an offset and an empty one among them."""
    return pa.chunked_array([column[:3], column[3:3], column[3:]], column.type)


def text(value) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def complete(rows):
    """Return the rows that have a user, an item and a time, with IDs as text."""
    return [(text(row[0]), text(row[1]), *row[2:]) for row in rows if None not in row]


def histories_of(log: Log):
    """Return each user's items and whole seconds, by user."""
    features = log.fit()
    interactions, users = log.interactions(features)
    (feature,) = features.ids
    names = [text(each) for each in feature.vocabulary.to_pylist()]
    items = [names[each - 1 - feature.num_unseen] for each in interactions.items.tolist()]
    bounds = zip(interactions.offsets[:-1].tolist(), interactions.offsets[1:].tolist(), strict=True)
    pairs = [*zip(items, interactions.times.tolist(), strict=True)]
    return {
        text(user): pairs[start:end] for user, (start, end) in zip(users.to_pylist(), bounds, strict=True)
    }


@pytest.mark.parametrize("on_disk", [False, True])
def test_histories_are_those_of_plain_values(drawn, on_disk, tmp_path):
    rows, path, columns = drawn
    expected = defaultdict(list)
    for user, item, time, _ in sorted(complete(rows), key=lambda row: row[2]):
        expected[user].append((item, time // 1_000_000))
    histories = tmp_path / "histories" if on_disk else None
    log = Log(log=(path,), columns=columns, histories=histories, on_error="skip")
    assert histories_of(log) == expected


def test_clicks_have_the_earlier_clicks_of_plain_values(drawn):
    rows, path, columns = drawn
    rows = complete(rows)
    expected = []
    for user, item, time, label in rows:
        earlier = sorted((row for row in rows if row[0] == user and row[2] < time), key=lambda row: row[2])
        history = [row[1] for row in earlier if row[3]]
        expected.append((user, item, EPOCH + datetime.timedelta(microseconds=time), label, history[-20:]))
    table = ClickLog(log=(path,), columns=columns, on_error="skip").table()
    assert [
        (text(row["user"]), text(row["item"]), row["time"], row["clicked"], [*map(text, row["history"])])
        for row in table.to_pylist()
    ] == expected
