import pytest
import torch

from meshrec.comms.mesh import default_env
from meshrec.distributed.sharded_tables import GradientSignal


def agree(finite):
    axis = default_env().world
    collected = GradientSignal(torch.device("cpu"))
    assert collected.signal.grad is None
    collected.agree(finite[axis.rank], axis)
    return collected.signal.grad.item()


@pytest.mark.parametrize(
    ("finite", "signal"), [((True, True), 0.0), ((True, False), torch.inf), ((False, False), torch.inf)]
)
def test_one_rank_speaks_for_all(ranks, finite, signal):
    assert ranks(2).run(agree, finite) == [signal, signal]


def test_the_last_word_counts():
    collected = GradientSignal(torch.device("cpu"))
    for finite in (False, True):
        collected.agree(finite, default_env().world)
    assert collected.signal.grad.item() == 0.0
