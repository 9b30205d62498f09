"""Histories of clicks, against loops over plain rows."""

import numpy as np
import pyarrow as pa
import pytest

from meshrec.data import DataError
from meshrec.data.click_logs import with_histories
from meshrec.data.faults import Faults
from meshrec.data.log_columns import LogColumns
from meshrec.data.logs import LogTable

COLUMNS = LogColumns(user="who", item="what", time="when")
FAULTS = Faults("raise")


def drawn(seed, num=300):
    rng = np.random.default_rng(seed)
    return pa.table(
        {
            "what": pa.array([f"i{each}" for each in rng.integers(0, 20, num)]),
            "when": rng.integers(0, 40, num),  # many rows of a user at the same time
            "who": rng.integers(0, 9, num),
            "bought": rng.integers(0, 2, num),
        }
    )


@pytest.mark.parametrize("history", [1, 3, 100])
def test_histories_are_the_earlier_clicks_of_the_user(history):
    for seed in range(5):
        table = drawn(seed)
        found = with_histories(LogTable("log", table, COLUMNS), "bought", history, FAULTS)
        rows = table.to_pylist()
        for row, own in zip(rows, found["history"].to_pylist(), strict=True):
            before = [
                each
                for each in sorted(rows, key=lambda each: each["when"])
                if each["who"] == row["who"] and each["when"] < row["when"] and each["bought"]
            ]
            assert own == [each["what"] for each in before[-history:]]
        assert found.select(["what", "who", "bought"]).equals(table.select(["what", "who", "bought"]))
        assert found["when"].cast(pa.int64()).to_pylist() == [1_000_000 * row["when"] for row in rows]


def test_given_histories_stay_and_missing_columns_are_named():
    table = drawn(0, 3).append_column("history", pa.array([["i1"], [], ["i2", "i3"]]))
    found = with_histories(LogTable("log", table, COLUMNS), "bought", 9, FAULTS)
    assert found["history"].to_pylist() == [["i1"], [], ["i2", "i3"]]
    with pytest.raises(DataError, match="'bougth'"):
        with_histories(LogTable("log", table, COLUMNS), "bougth", 9, FAULTS)
    texts = drawn(0, 3).set_column(3, "bought", pa.array(["yes", "no", "no"]))
    with pytest.raises(DataError, match=r"'bought'.*holds 0.*1"):
        with_histories(LogTable("log", texts, COLUMNS), "bought", 9, FAULTS)
    with pytest.raises(ValueError, match=r"history.*1.*0"):
        with_histories(LogTable("log", table, COLUMNS), "bought", 0, FAULTS)
