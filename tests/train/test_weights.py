import torch

from meshrec.train.weights import BestWeights


def test_the_kept_weights_come_back():
    model = torch.nn.BatchNorm1d(2)
    best = BestWeights(model)
    assert not best.restore()
    for value in (1.0, 2.0):
        model.weight.data.fill_(value)
        model.running_mean.fill_(value)
        best.keep()
    model.weight.data.fill_(3.0)
    model.running_mean.fill_(3.0)
    assert best.restore()
    assert model.weight.tolist() == model.running_mean.tolist() == [2.0, 2.0]
