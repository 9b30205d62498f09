import re
from dataclasses import fields
from pathlib import Path

import pytest

from meshrec.planner.data_costs import COSTS, TRAINING_BYTES, DataSize, predict, total, with_counts

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "how-big.md"
UNITS = {"B": 1.0, "GB": 1e9, "\u00b5s": 1e-6, "million": 1e6, "rank": 1.0, "ranks": 1.0}


def figure(text: str) -> float:
    """Return a figure of the page, such as "24 B"."""
    number, unit = re.fullmatch(r"([0-9.,]+) (\S+).*", text).groups() if text else ("0", "B")
    return float(number.replace(",", "")) * UNITS[unit]


def rows_of_page() -> dict[str, list[str]]:
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    return {
        name: cells for name, *cells in ([cell.strip() for cell in line[1:-1].split("|")] for line in lines)
    }


@pytest.mark.parametrize("name", [name for name in COSTS if name != "embedding row"])
def test_costs_are_those_of_the_page(name):
    memory, disk, time, largest = rows_of_page()[name]
    cost = COSTS[name]
    seconds = cost.once + cost.start + cost.step
    for actual, text in ((cost.memory, memory), (cost.disk, disk), (seconds, time), (cost.largest, largest)):
        assert actual == pytest.approx(figure(text))


def test_costs_of_ranks_and_embedding_rows_are_those_of_the_page():
    rows = rows_of_page()
    for kind, num_bytes in TRAINING_BYTES.items():
        assert figure(rows[f"rank that trains on a {kind}, with its batches"][0]) == num_bytes
    _, _, time, largest = rows["embedding row, width 64, `Adam`"]
    assert COSTS["embedding row"].once == pytest.approx(figure(time))
    assert COSTS["embedding row"].largest == figure(largest)


def test_predictions_are_those_that_were_measured():
    """Memory of training on logs and tables, in the tables of the page, in GB."""
    for rows, users, memory in ((8e6, 2e5, 1.3), (50e6, 1.25e6, 1.4), (200e6, 5e6, 1.5)):
        size = DataSize(rows=int(rows), users=int(users), items=200_000, row_bytes=384)
        assert total(predict(size, 1)).memory / 1e9 == pytest.approx(memory, abs=0.1)


def test_ranks_divide_tables_and_work_and_each_has_vocabularies_and_a_log_in_memory():
    size = DataSize(
        rows=10**6,
        users=10**5,
        items=10**4,
        row_bytes=100,
        in_histories=False,
        samples_per_second=1000,
        epochs=2,
    )
    one, four = ({part.resource: part for part in predict(size, ranks)} for ranks in (1, 4))
    assert one.keys() == four.keys()
    assert four["embedding row"].memory == one["embedding row"].memory / 4 == 10**4 * 100 / 4
    assert four["log row, in memory"].memory == one["log row, in memory"].memory == 150 * 10**6
    assert one["training sample"].training == 2000
    assert four["training sample"].training == 500
    assert one["training sample"].basis == "measured"
    assert four["training sample"].basis == "extrapolated 4.0x"
    assert total(predict(size, 4)).basis == "partly extrapolated"
    assert total(predict(size, 1)).basis == "measured"


def test_given_counts_replace_counted_ones_and_what_follows_from_them():
    size = DataSize(rows=100, values=10, text_values=10, table_rows=60, row_bytes=8, samples=80)
    larger = with_counts(size, {"rows": 1000})
    assert (larger.samples, larger.table_rows) == (800, 60)
    assert with_counts(size, {"values": 30}).table_rows == 120
    assert with_counts(size, {"values": 30, "table_rows": 7}).table_rows == 7
    assert with_counts(size, {"rows": 1000, "samples": 5}).samples == 5
    assert {field.name for field in fields(size)} >= {"rows", "samples_per_second"}
