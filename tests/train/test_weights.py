import pytest
import torch

from meshrec.checkpoint import CheckpointManager
from meshrec.train.progress import Progress
from meshrec.train.saver import BestWeights


@pytest.mark.parametrize("on_disk", [False, True])
def test_the_kept_weights_come_back(tmp_path, on_disk):
    model = torch.nn.BatchNorm1d(2)
    best = BestWeights(model, CheckpointManager(tmp_path, keep_last=1) if on_disk else None)
    assert not best.restore()
    progress = Progress()
    for value in (1.0, 2.0):
        model.weight.data.fill_(value)
        model.running_mean.fill_(value)
        progress.step += 1
        best.copy_weights(progress)
    model.weight.data.fill_(3.0)
    model.running_mean.fill_(3.0)
    assert best.restore() == 2
    assert model.weight.tolist() == model.running_mean.tolist() == [2.0, 2.0]
