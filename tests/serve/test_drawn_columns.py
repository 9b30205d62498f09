"""Values of requests, drawn at random: as JSON and as tensors they become what the data's columns become."""

import json
from datetime import date, datetime, time, timedelta
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest

from meshrec.data.faults import DataError
from meshrec.data.features import Buckets, Cross, DatePart, Features, Hashed, Label, Number, Vocabulary
from meshrec.data.raw_values import RawValues, table_of

COUNTED = ["int8", "uint64", "bool", "text", "bytes", "lists"]
START = datetime(2020, 1, 1)


def drawn(rng: np.random.Generator) -> pa.Table:
    """A column of every kind, with nulls or without."""
    num = int(rng.integers(5, 40))

    def column(value, kind) -> pa.Array:
        null = rng.random(num) < rng.choice([0.0, 0.3])
        null[0] = False
        numbers = rng.integers(0, 9, num).tolist()
        return pa.array([None if no else value(x) for no, x in zip(null, numbers, strict=True)], kind)

    zone = rng.choice([None, "UTC"])
    return pa.table(
        {
            "y": rng.integers(0, 2, num),
            "": rng.integers(0, 9, num),
            "int8": column(lambda x: x - 4, pa.int8()),
            "uint64": column(lambda x: x + 2**63, pa.uint64()),
            "bool": column(lambda x: x > 4, pa.bool_()),
            "float": column(lambda x: [np.nan, x / 3][x > 1], rng.choice([pa.float32(), pa.float64()])),
            "half": column(np.float16, pa.float16()),
            "decimal": column(lambda x: Decimal(x) / 4, pa.decimal128(12, 2)),
            "text": column(["", " a", "ü€", '"', "NA", "0", "x,y", "b", "a"].__getitem__, pa.string()),
            "bytes": column("{0},a ,".format, pa.string()).cast(pa.binary()),
            "date": column(lambda x: date(2020, 1, 1 + x), pa.date32()),
            "time": column(lambda x: time(x, 5 * x), pa.time64("us")).cast(pa.time32("s")),
            "stamp": column(lambda x: START + timedelta(hours=x), pa.timestamp("us")).cast(
                pa.timestamp("ms", zone)
            ),
            "lists": column(lambda x: ["ä", None, "b"][: x % 4], pa.list_(pa.string())),
        }
    )


def drawn_features(rng: np.random.Generator, data: pa.Table) -> Features:
    dense = ["int8", "bool", "float", "half", "decimal", "date", "time", "stamp"]
    return Features(
        labels=(Label(column="y"),),
        features=(
            *(Number(name=f"{n}_number", column=n, missing=2.0, standardize=True) for n in dense),
            *(Buckets(name=f"{n}_bucket", column=n, num_buckets=3) for n in dense),
            *(DatePart(name=f"{n}_part", column=n, part=rng.choice(["hour", "weekday"])) for n in dense),
            *(Hashed(name=n or "unnamed", column=n, num_embeddings=1000) for n in data.column_names[1:]),
            *(Vocabulary(name=f"{n}_known", column=n) for n in [*COUNTED, "float", "half", "decimal"]),
            Hashed(name="parts", column="bytes", separator=",", num_embeddings=1000),
            Cross(name="cross", columns_crossed=("bool", "text"), num_embeddings=1000),
        ),
    )


def in_json(value):
    if isinstance(value, list):
        return [in_json(each) for each in value]
    if hasattr(value, "isoformat"):
        return value.isoformat()
    if isinstance(value, bytes):
        return value.decode()
    if value is None or value != value:  # NaN
        return None
    return float(value) if isinstance(value, Decimal | np.floating) else value


def in_tensors(kind: str, values: list) -> list:
    """As INT64, FP64 and BYTES have it: no null but NaN and the empty text, no booleans."""
    if kind == "number":
        return [float("nan") if each is None else each for each in values]
    if kind in ("text", "time"):
        return ["" if each is None else each for each in values]
    return [int(each) if isinstance(each, bool) else each for each in values]


def same(one, other) -> None:
    np.testing.assert_array_equal(one.dense.view(np.int32), other.dense.view(np.int32))
    for name in one.values:
        np.testing.assert_array_equal(one.values[name], other.values[name], err_msg=name)
        np.testing.assert_array_equal(one.lengths[name], other.lengths[name], err_msg=name)


@pytest.mark.parametrize("seed", range(15))
def test_requests_have_the_ids_of_the_data(seed: int) -> None:
    rng = np.random.default_rng(seed)
    data = drawn(rng)
    raw = RawValues(drawn_features(rng, data).fit([data]), data.schema)
    for start, num in ((0, data.num_rows), (0, 0), (2, 1), (1, 3)):
        own = data.select(list(raw.columns)).slice(start, num)
        expected = raw.encode(own)
        columns = json.loads(json.dumps({name: in_json(own[name].to_pylist()) for name in raw.columns}))
        same(expected, raw.encode(table_of(columns, raw)))
        tensors = {name: in_tensors(raw.kinds[name], values) for name, values in columns.items()}
        same(expected, raw.encode(table_of(tensors, raw)))


def test_values_that_do_not_fit_are_named() -> None:
    data = drawn(np.random.default_rng(0))
    raw = RawValues(drawn_features(np.random.default_rng(0), data).fit([data]), data.schema)
    for name, value, message in (
        ("bool", "yes", "column 'bool' of sample 0 must be a whole number, got 'yes'"),
        ("time", "noon", r"column 'time' must fit time32\[s\]: Failed to parse"),
        ("decimal", 1e30, "column 'decimal' must fit decimal128"),
    ):
        with pytest.raises(DataError, match=message):
            table_of({name: [value]}, raw)
