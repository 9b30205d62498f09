import pytest
import torch

from benchmarks import nbit as bench
from benchmarks.harness import Effort
from benchmarks.memory_limit import LineLimit


def test_bars_of_tiny_tables() -> None:
    shape = bench.Shape(num_tables=2, num_rows=50, batch=8, bag=3)
    lookups, model = bench.Lookups(shape), bench.our_model(shape)
    timings = bench.time_kind(
        "int4", [lookups, bench.Lookups(shape, 1)], model, Effort(rounds=1, calls=1, warm_ups=0)
    )
    assert set(timings) == {1, 2}
    names = [bar.name for bar in bench.bars_of("int4", timings, hot=False)]
    assert "int4, 1 threads, over the memory limit" in names


def test_wrong_results_are_seen() -> None:
    shape = bench.Shape(num_tables=1, num_rows=50, batch=8, bag=3)
    lookups = bench.Lookups(shape)
    rows = [torch.rand(50, 64).half()]
    with pytest.raises(AssertionError):
        bench.verify({"wrong": lambda: torch.ones(8, 64)}, rows, 0, lookups)


def test_the_limit_reads_every_line_of_a_row() -> None:
    rows = torch.zeros(4, 68, dtype=torch.uint8)
    rows[2, 0], rows[2, 64] = 3, 5
    limit = LineLimit([rows], [torch.tensor([2, 0, 2])])
    assert limit.forward() == 2 * (3 + 5)
