import pytest
import torch
from torch import nn

from meshrec.compat.bridge.lazy_extension import LazyModuleExtensionMixin, lazy_apply


class Counter(LazyModuleExtensionMixin, nn.Module):
    def __init__(self):
        super().__init__()
        self.count = torch.tensor(0)

    def initialize_parameters(self, input, scale=1):
        self.scale = scale

    def forward(self, input, scale=1):
        return self.count.clone()


def count(module):
    if isinstance(module, Counter):
        module.count += 1


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: lazy_apply(Counter(), count), 1),
        (lambda: lazy_apply(nn.Sequential(Counter(), Counter()), count), 1),
        (lambda: lazy_apply(lazy_apply(Counter(), count), count), 2),
        (lambda: lazy_apply(nn.Sequential(lazy_apply(Counter(), count), nn.Identity()), count), 2),
    ],
)
def test_functions_wait_for_the_first_forward_pass_and_run_once(make, expected):
    module = make()
    assert [int(module(torch.ones(1))) for _ in range(3)] == [0, expected, expected]


def test_keywords_reach_the_initialization():
    module = Counter()
    with pytest.raises(RuntimeError, match="initialized"):
        module.apply(count)
    module(torch.ones(1), scale=3)
    assert module.scale == 3
    module.apply(count)
    assert module.count == 1
