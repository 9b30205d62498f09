import pytest
import torch

from meshrec.train.schedule import LearningRates, Schedule


def test_warmup_then_decay():
    schedule = Schedule(warmup_steps=3, decay="linear", final=0.1)
    values = [schedule.multiplier(step, 14) for step in range(14)]
    assert values[:3] == [0.25, 0.5, 0.75]
    assert values[3] == 1
    assert values[13] == pytest.approx(0.1)
    assert values == sorted(values[:4]) + sorted(values[4:], reverse=True)
    assert Schedule(decay="cosine").multiplier(5, 11) == pytest.approx(0.5)
    assert Schedule().multiplier(7, 8) == 1


def test_rates_are_a_function_of_the_step():
    weight = torch.nn.Parameter(torch.zeros(1))
    slow, fast = torch.optim.SGD([weight], lr=0.1), torch.optim.Adam([weight], lr=1.0)
    rates = LearningRates([slow, fast], Schedule(decay="linear"), 11)
    rates.set(9)
    assert rates.set(5) == pytest.approx(0.5)
    assert slow.param_groups[0]["lr"] == pytest.approx(0.05)
    assert fast.param_groups[0]["lr"] == pytest.approx(0.5)


def test_impossible_schedules():
    with pytest.raises(ValueError, match=r"warmup_steps.*-1"):
        Schedule(warmup_steps=-1)
    with pytest.raises(ValueError, match=r"schedule.final.*2.*\[0, 1\]"):
        Schedule(final=2)
