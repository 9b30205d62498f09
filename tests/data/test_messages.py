"""Messages of all forms encode to the samples of the same values in a Parquet file."""

import datetime
import json

import numpy as np
import pyarrow as pa
import pytest

from meshrec.data.encoding import RowOrigin
from meshrec.data.faults import Faults
from meshrec.data.features import DatePart, Features, Hashed, Integer, Label, Number, Vocabulary
from meshrec.data.messages import MessageDecoder, num_rows_of, row_content

BIG = 2**63 + 5
TABLE = pa.table(
    {
        "y": [True, False, True, False],
        "id": [0, 1, 2, 9],
        "big": pa.array([1, BIG, 2**53 + 1, None], pa.uint64()),
        "city": ["Köln", "2024-05-01", "", None],
        "x": [0.5, None, 1e30, -0.1],
        "at": pa.array([0, 86_400_000_001, None, 5], pa.timestamp("us")),
        "tags": [["a", "b"], [], None, ["2024-05-01"]],
        "items": pa.array([[1, 2**60 + 1], [3], [], None], pa.list_(pa.int64())),
        "hour": [3600, 7200, 0, None],
        "unread": [1, 2, 3, 4],
    }
)
FEATURES = Features(
    labels=(Label(column="y"),),
    features=(
        Integer(name="id", num_embeddings=10),
        Hashed(name="big", num_embeddings=1000),
        Vocabulary(name="city"),
        Number(name="x", missing=-1.0),
        Hashed(name="at", num_embeddings=1000),
        Hashed(name="tags", num_embeddings=1000),
        Hashed(name="items", num_embeddings=1000),
        DatePart(name="hour", part="hour"),
    ),
).fit([TABLE])


def json_message(row):
    return json.dumps(
        {k: v.isoformat() if isinstance(v, datetime.datetime) else v for k, v in row.items()}
    ).encode()


def text_message(row):
    texts = {
        name: json.dumps(value) if isinstance(value, list) else str(value)
        for name, value in row.items()
        if value is not None
    }
    return {name.encode(): text.encode() for name, text in texts.items()}


def arrow_message(table):
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def encode(features, table):
    faults = Faults("raise")
    return features.encode(table.select(features.columns()), RowOrigin("rows", 0), faults)


def assert_same(samples, expected):
    assert np.array_equal(samples.dense, expected.dense)
    assert np.array_equal(samples.labels, expected.labels)
    for found, want in zip(samples.ids, expected.ids, strict=True):
        assert found.values[found.offsets[0] : found.offsets[-1]].tolist() == want.values.tolist()
        assert np.diff(found.offsets).tolist() == np.diff(want.offsets).tolist()


@pytest.mark.parametrize("form", [json_message, text_message])
@pytest.mark.parametrize("rows", [[0, 1, 2, 3], [0], [2], [3], [1, 1, 0]])
def test_messages_have_the_samples_of_a_file(form, rows):
    table = TABLE.take(rows)
    ((decoded),) = MessageDecoder(FEATURES).decode([form(row) for row in table.to_pylist()])
    assert not decoded.problems
    assert decoded.rows == list(range(len(rows)))
    assert_same(encode(FEATURES, decoded.table), encode(FEATURES, table))


def test_arrow_messages_have_the_samples_of_a_file_and_many_become_one_table():
    messages = [arrow_message(TABLE[:1]), arrow_message(TABLE[1:]), arrow_message(TABLE[:0])]
    assert [num_rows_of(message) for message in messages] == [1, 3, 0]
    (decoded,) = MessageDecoder(FEATURES).decode(messages)
    assert_same(encode(FEATURES, decoded.table), encode(FEATURES, TABLE))
    other = TABLE.set_column(1, "id", TABLE["id"].cast(pa.int8()))
    _, second = MessageDecoder(FEATURES).decode([messages[0], arrow_message(other)])
    assert_same(encode(FEATURES, second.table), encode(FEATURES, TABLE))


def test_forms_may_alternate():
    (row,) = TABLE[:1].to_pylist()
    messages = [
        json_message(row),
        text_message(row),
        text_message(row),
        arrow_message(TABLE),
        json_message(row),
    ]
    decoded = MessageDecoder(FEATURES).decode(messages)
    assert [rows.num_rows for rows in decoded] == [1, 2, 4, 1]


SMALL = Features(
    labels=(Label(column="y"),),
    features=(
        Integer(name="id", num_embeddings=100),
        Hashed(name="user", num_embeddings=50),
        Number(name="x"),
    ),
).fit([pa.table({"y": [0, 1], "id": [0, 1], "user": ["a", "b"], "x": [0.5, 1.5]})])


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        (b"", "no JSON object"),
        (b"[1]", "no JSON object"),
        (b"null", "no JSON object"),
        (b'{"y": 1', "no JSON object"),
        (b'{"y": 1}{"y": 1}', "no JSON object"),
        (b"[" * 100_000, "no JSON object"),
        (b'{"user": "\xff"}', "no JSON object"),
        (b'{"user": "a\nb"}', "no JSON object"),
        (b"\x00\x00\x00\x01", "no JSON object"),
        (b'{"id": "one"}', "wrong value in column 'id'"),
        (b'{"id": 1.5}', "wrong value in column 'id'"),
        (b'{"id": [1]}', "wrong value in column 'id'"),
        (b'{"user": 7}', "wrong value in column 'user'"),
        (b'{"x": "1.5"}', "wrong value in column 'x'"),
        (b'{"x": true, "y": {}}', "wrong value in column 'y'"),
        ({b"id": b"one"}, "wrong value in column 'id'"),
        ({b"id": b"1_0"}, "wrong value in column 'id'"),
        ({b"user": b"\xff"}, "wrong value in column 'user'"),
        (b"\xff\xff\xff\xff\x10", "no Arrow IPC stream"),
    ],
)
def test_one_damaged_message_is_found_among_others(message, problem):
    good = [b'{"y": 1, "id": %d, "user": "u", "x": 2}' % number for number in range(5)]
    found = [*MessageDecoder(SMALL).decode([*good[:3], message, *good[3:]])]
    assert sum(rows.num_rows for rows in found) == 6
    assert sum(len(rows.rows) for rows in found) == 5
    ids = [number for rows in found if len(rows.rows) for number in rows.table["id"].to_pylist()]
    assert ids == list(range(5))
    (text,) = (text for rows in found for text in rows.problems.values())
    assert text.startswith(f"{problem}:")


def test_objects_in_several_messages_are_not_shifted():
    # Arrow alone finds three objects in three messages.
    messages = [b'{"y": 1, "id": 1}{"y": 1, "id": 2}', b'{"y": 1, "id":', b"3}"]
    (decoded,) = MessageDecoder(SMALL).decode(messages)
    assert [*decoded.problems] == [0, 1, 2]


def test_objects_may_be_written_over_several_lines():
    message = json.dumps({"y": 1, "id": 4, "user": "a", "x": 1}, indent=2).encode()
    (decoded,) = MessageDecoder(SMALL).decode([message, b' {"y": 0, "id": 5}\n'])
    assert decoded.table["id"].to_pylist() == [4, 5]


def test_an_arrow_message_with_other_columns_is_damaged():
    message = arrow_message(pa.table({"y": [0, 1]}))
    (decoded,) = MessageDecoder(SMALL).decode([message])
    assert [*decoded.problems] == [0, 1]
    assert "'id'" in decoded.problems[0]


def test_omitted_rows_can_be_shown():
    assert row_content(b'{"y": 1}\xff', 0) == '{"y": 1}\\xff'
    assert row_content({b"a": b"\xff"}, 0) == {"a": "\\xff"}
    assert row_content(arrow_message(pa.table({"a": [1, 2]})), 1) == {"a": 2}
    assert row_content(b"\xff\xff\xff\xff", 0) == "\\xff\\xff\\xff\\xff"
