"""The bench of the readers verifies what it reads before it times."""

import pytest

from benchmarks import reading
from benchmarks.harness import Effort

pytest.importorskip("pyarrow")


def test_tiny_tables_are_read_and_trained() -> None:
    result = reading.run(Effort(rounds=1, calls=1), tiny=True)
    assert set(result.figures["samples_per_second"]) == {"lists of ids", "lists, hashed"}
    assert len(result.bars) == 1


def test_what_was_not_read_is_seen(tmp_path) -> None:
    written = reading.write(tmp_path / "part.parquet", reading.TINY)
    dataset = reading.load(str(tmp_path), reading.TINY, hashed=False)
    with pytest.raises(AssertionError, match="read 256"):
        reading.verify(dataset, {**written, "C1": written["C1"] + 1}, reading.TINY)
