from dataclasses import replace

import pytest
import torch

from benchmarks import nbit as bench
from benchmarks.harness import Effort
from benchmarks.memory_limit import LineLimit

SHAPE = replace(bench.SHAPE, num_tables=2, num_rows=50, batch=8, bag=3)


def test_bars_of_tiny_tables() -> None:
    batches = [bench.batch_of(SHAPE, seed) for seed in range(2)]
    effort = Effort(rounds=1, calls=1, warm_ups=0)
    timings = bench.time_kind("int4", batches, bench.our_model(SHAPE), effort)
    assert set(timings) == {1, 2}
    names = [bar.name for bar in bench.bars_of("int4", timings)]
    assert "int4, 1 threads, over the memory limit" in names


def test_wrong_results_are_seen() -> None:
    rows = [bench.our_model(SHAPE).embedding_bags[f"t{t}"].weight.detach() for t in range(2)]
    from meshrec.ops import nbit

    with pytest.raises(AssertionError):
        bench.verify(
            {"wrong": lambda: torch.ones(8, 128)},
            [nbit.quantize(each, 8) for each in rows],
            8,
            bench.batch_of(SHAPE),
        )


def test_the_limit_reads_every_line_of_a_row() -> None:
    rows = torch.zeros(4, 68, dtype=torch.uint8)
    rows[2, 0], rows[2, 64] = 3, 5
    limit = LineLimit([rows], [torch.tensor([2, 0, 2])])
    assert limit.forward() == 2 * (3 + 5)
