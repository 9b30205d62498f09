import pytest

from benchmarks import stream
from benchmarks.harness import Effort


@pytest.mark.parametrize("part", ["freshness", "drift"])
def test_a_tiny_stream_is_trained_once_and_served(part: str) -> None:
    result = stream.run(Effort(rounds=1, calls=1), tiny=True, only=[part])
    assert len(result.bars) == 1
