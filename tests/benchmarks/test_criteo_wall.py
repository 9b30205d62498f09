from benchmarks import criteo_wall
from benchmarks.harness import Effort


def test_the_command_trains_on_what_was_written() -> None:
    (bar,) = criteo_wall.run(Effort(rounds=1, calls=1), tiny=True).bars
    assert bar.asked == 2.0
    assert bar.figure >= 1.0
