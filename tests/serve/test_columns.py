from datetime import time
from decimal import Decimal
from types import SimpleNamespace

import pyarrow as pa
import pytest

from meshrec.serve.columns import table_of
from meshrec.serve.requests import RequestError

RAW = SimpleNamespace(
    columns={
        "user": pa.int64(),
        "price": pa.decimal128(12, 2),
        "opens": pa.time32("ms"),
        "closes": pa.time64("us"),
    }
)


def test_values_of_json_are_those_of_the_data():
    given = {
        "user": [3.0, 2, None],
        "price": [0.1, 3, None],
        "opens": ["08:30:00", None, "23:59:59.5"],
        "closes": ["12:00:00.000001"] * 3,
    }
    found = table_of(given, RAW).to_pydict()
    assert found["user"] == [3, 2, None]
    assert found["price"] == [Decimal("0.10"), Decimal("3.00"), None]
    assert found["opens"] == [time(8, 30), None, time(23, 59, 59, 500_000)]
    assert found["closes"] == [time(12, 0, 0, 1)] * 3


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("user", 3.5, "column 'user' of sample 0 must be a whole number, got 3.5"),
        ("price", 0.125, "column 'price' must fit decimal128"),
        ("price", "0.1", "column 'price' of sample 0 must be a number, got '0.1'"),
        ("price", float("inf"), "column 'price' must fit decimal128"),
        ("opens", "25:00:00", "column 'opens' must fit time32"),
        ("opens", "noon", "column 'opens' must fit time32"),
    ],
)
def test_values_that_cannot_be_are_named(column, value, message):
    with pytest.raises(RequestError, match=message):
        table_of({column: [value]}, RAW)
