from benchmarks import serve_hashed
from benchmarks.harness import Effort


def test_it_runs():
    result = serve_hashed.run(Effort(rounds=1, calls=1, warm_ups=0), tiny=True)
    assert len(result.bars) == 5
    assert all(bar.figure > 0 for bar in result.bars)
