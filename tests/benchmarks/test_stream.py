import sys

import pytest

from benchmarks import stream
from benchmarks.harness import Effort
from meshrec.__main__ import main


def meshrec_here(*words: object) -> None:
    """Run a command, which must succeed, in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["meshrec", *map(str, words)])
        assert main() == 0


@pytest.mark.parametrize("part", ["freshness", "drift"])
def test_a_tiny_stream_is_trained_once_and_served(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if part == "freshness":  # it starts the processes of a server, a writer, and a run as well
        monkeypatch.setattr(stream, "meshrec", meshrec_here)
    result = stream.run(Effort(rounds=1, calls=1), tiny=True, only=[part])
    assert len(result.bars) == 1
