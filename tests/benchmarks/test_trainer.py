import pytest

from benchmarks import trainer
from benchmarks.harness import Effort


def test_both_loops_compute_the_same() -> None:
    result = trainer.run(Effort(rounds=1, calls=1), tiny=True)
    (bar,) = result.bars
    assert bar.asked == 0.95
    assert bar.figure == pytest.approx(result.figures["bare_ms"][0] / result.figures["trainer_ms"][0])
