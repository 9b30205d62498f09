import pytest
import torch

from benchmarks import attention, balance, kept_histories
from benchmarks.harness import Effort

ONCE = Effort(rounds=1, calls=1, warm_ups=0)


def test_tiny_attention_is_verified_and_its_memory_is_measured() -> None:
    result = attention.run(ONCE, tiny=True)
    assert len(result.bars) == 2 * len(attention.KINDS) + 1
    assert result.figures.pop("product") > 0
    assert all(each["bytes"] > 0 for by in result.figures.values() for each in by.values())


def test_lengths_have_a_quarter_of_the_longest_as_their_mean() -> None:
    lengths = attention.zipf_lengths(20_000, 200, torch.Generator().manual_seed(0))
    assert lengths.double().mean() == pytest.approx(50, rel=0.05)
    assert 1 <= lengths.min() < lengths.max() <= 200


def test_tiny_histories_give_the_same_gradients_balanced_or_not() -> None:
    assert balance.run(Effort(rounds=2), tiny=True).bars[0].figure > 0


def test_tiny_requests_have_equal_results_kept_or_not() -> None:
    assert len(kept_histories.run(ONCE, tiny=True).bars) == 2
