"""The bench of histories builds and sorts the log that it writes."""

import pyarrow.parquet as pq
import pytest

from benchmarks import histories

pytest.importorskip("duckdb")


def test_a_log_is_built_and_sorted(tmp_path, monkeypatch):
    for name in ("_USERS", "_ITEMS", "_BLOCK"):
        monkeypatch.setattr(histories, name, 100)
    log = tmp_path / "log.parquet"
    histories.write(log, 250)
    table = pq.read_table(log)
    assert table.num_rows == 250
    assert set(table["user"].to_pylist()) <= set(range(100))
    for work in (histories.build, histories.sort):
        costs = work(log)
        assert costs.seconds > 0
        assert costs.memory > 0
    assert pq.read_table(tmp_path / "log.sorted")["user"].to_pylist() == sorted(table["user"].to_pylist())
