from datetime import time
from decimal import Decimal
from types import SimpleNamespace

import pyarrow as pa
import pytest

from meshrec.data.faults import DataError
from meshrec.data.raw_values import table_of

RAW = SimpleNamespace(
    columns={
        "user": pa.int64(),
        "price": pa.decimal128(12, 2),
        "opens": pa.time32("ms"),
        "closes": pa.time64("us"),
    }
)


@pytest.mark.parametrize("values", [[1 << 40, -1], [(1 << 64) - 1, 0]])
def test_integers_have_64_bits_as_in_files(values):
    raw = SimpleNamespace(columns={"user": pa.int32()})
    assert table_of({"user": values}, raw)["user"].to_pylist() == values
    with pytest.raises(DataError, match=r"'user'.*int32"):
        table_of({"user": [1 << 64]}, raw)


def test_values_of_json_are_those_of_the_data():
    given = {
        "user": [1e3, True, float("nan")],
        "price": [0.1, 3, None],
        "opens": ["08:30:00", None, "23:59:59.5"],
        "closes": ["12:00:00.000001"] * 3,
    }
    found = table_of(given, RAW).to_pydict()
    assert found["user"] == [1000, 1, None]
    assert found["price"] == [Decimal("0.10"), Decimal("3.00"), None]
    assert found["opens"] == [time(8, 30), None, time(23, 59, 59, 500_000)]
    assert found["closes"] == [time(12, 0, 0, 1)] * 3


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("user", 3.5, "'user'.*sample 0.*3.5"),
        ("price", 0.125, "'price'.*decimal128"),
        ("price", "0.1", "'price'.*sample 0.*'0.1'"),
        ("price", float("inf"), "'price'.*decimal128"),
        ("opens", "25:00:00", "'opens'.*time32"),
        ("opens", "noon", "'opens'.*time32"),
    ],
)
def test_values_that_cannot_be_are_named(column, value, message):
    with pytest.raises(DataError, match=message):
        table_of({column: [value]}, RAW)
