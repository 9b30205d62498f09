import torch

from meshrec.modules.interaction import DotInteraction


def test_all_pairs_once():
    torch.manual_seed(0)
    dense, sparse = torch.randn(3, 4), torch.randn(3, 2, 4)
    out = DotInteraction(2)(dense, sparse)
    expected = [
        (dense * sparse[:, 0]).sum(1),
        (dense * sparse[:, 1]).sum(1),
        (sparse[:, 0] * sparse[:, 1]).sum(1),
    ]
    torch.testing.assert_close(out, torch.cat([dense, torch.stack(expected, 1)], 1))
    assert out.shape[1] == DotInteraction(2).out_features(4)
    assert DotInteraction(0)(dense, sparse[:, :0]) is dense
