"""The benchmark of the readers verifies what it reads before it times."""

import pyarrow.parquet as pq
import pytest

from benchmarks import reading
from benchmarks.harness import Effort
from meshrec.data import parquet


def test_tiny_files_are_read_and_scanned() -> None:
    result = reading.run(Effort(rounds=1, calls=1), tiny=True)
    assert {"meshrec", reading.SCAN} <= result.figures["rows_per_second"].keys()
    assert result.figures["fitting_seconds_by_ranks"].keys() == {"1", "2"}
    assert len(result.bars) == 1


def test_a_value_that_was_not_read_is_noticed(tmp_path) -> None:
    path = tmp_path / "ratings.parquet"
    written = reading.write(path, 300)
    dataset = parquet(train=path, schema=reading.features().fit([written]))
    reading.verify(dataset, written)
    pq.write_table(written.slice(1), path)
    shorter = parquet(train=path, schema=reading.features().fit([written]))
    with pytest.raises(AssertionError, match="read 299 values of user"):
        reading.verify(shorter, written)
