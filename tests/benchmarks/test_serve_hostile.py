from benchmarks import serve_hostile
from benchmarks.harness import Effort


def test_a_tiny_server_answers_every_good_request_rightly() -> None:
    result = serve_hostile.run(Effort(rounds=1, calls=1), tiny=True)
    assert len(result.bars) == len(serve_hostile.WAYS) + 1
