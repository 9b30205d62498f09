import pytest
import torch

from meshrec.modules.crossnet import CrossNet, LowRankCrossNet


def test_crosses_follow_the_formula():
    torch.manual_seed(0)
    x = torch.randn(4, 5)
    net = CrossNet(5, 2)
    once = x * net.layers[0](x) + x
    torch.testing.assert_close(net(x), x * net.layers[1](once) + once)
    low = LowRankCrossNet(5, 1, low_rank=2)
    torch.testing.assert_close(low(x), x * low.up[0](low.down[0](x)) + x)
    assert LowRankCrossNet(5, 1, device="meta").up[0].weight.is_meta


def test_rank_must_be_positive():
    with pytest.raises(ValueError, match="low_rank must be 1 or more, got 0"):
        LowRankCrossNet(5, 1, low_rank=0)
