from benchmarks import serve_changes
from benchmarks.harness import Effort


def test_a_tiny_server_loses_and_tears_nothing() -> None:
    result = serve_changes.run(Effort(rounds=1, calls=1), tiny=True)
    bars = {bar.name: bar for bar in result.bars}
    assert bars["checked reads"].met
    for name in ("torn rows", "rows of another version than said", "lost over 1 SIGTERMs"):
        assert bars[name].figure == 0
