import pytest
import torch
from torch import nn

from meshrec.compat.bridge.train_pipeline import (
    EvalPipelineSparseDist,
    PrefetchTrainPipelineSparseDist,
    TrainPipelineBase,
    TrainPipelineSemiSync,
    TrainPipelineSparseDist,
)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0]))

    def forward(self, batch):
        output = self.weight * batch
        return output.square(), output.detach()


def batches():
    return iter([torch.tensor([1.0]), torch.tensor([2.0])])


def pipeline(kind, **given):
    model = Model()
    return model, kind(model, torch.optim.SGD(model.parameters(), lr=0.25), torch.device("cpu"), **given)


@pytest.mark.parametrize("kind", [TrainPipelineBase, TrainPipelineSparseDist])
def test_each_call_trains_on_a_batch(kind):
    model, train = pipeline(kind)
    data = batches()
    assert train.progress(data).tolist() == [1.0]
    assert model.weight.item() == 0.5
    assert train.progress(data).tolist() == [1.0]
    assert model.weight.item() == -0.5
    with pytest.raises(StopIteration):
        train.progress(data)
    train.reset()
    assert train.progress(batches()).tolist() == [-0.5]


def test_a_model_in_eval_mode_is_not_trained():
    model, train = pipeline(TrainPipelineBase)
    model.eval()
    assert train.progress(batches()).tolist() == [1.0]
    assert model.weight.item() == 1.0


def test_another_forward():
    _, train = pipeline(TrainPipelineBase, custom_model_fwd=lambda batch: (batch.requires_grad_(), "mine"))
    assert train.progress(batches()) == "mine"


def test_evaluation():
    model, evaluate = pipeline(EvalPipelineSparseDist)
    with pytest.raises(ValueError, match=r"model\.eval"):
        evaluate.progress(batches())
    model.eval()
    assert evaluate.progress(batches()).tolist() == [1.0]


def test_batches_in_flight_may_be_left_out():
    _, train = pipeline(TrainPipelineSparseDist, execute_all_batches=False)
    data = iter([torch.tensor([float(number)]) for number in range(5)])
    for _ in range(4):
        train.progress(data)
    with pytest.raises(StopIteration):  # one was in flight when the end was seen
        train.progress(data)


def test_detach_and_attach():
    model, train = pipeline(TrainPipelineSparseDist)
    data = iter([torch.tensor([1.0]), torch.tensor([2.0]), torch.tensor([3.0])])
    train.progress(data)
    assert train.detach() is model
    assert train.detach() is model
    train.attach()
    train.progress(data)
    other = Model()
    train.attach(other)
    with pytest.raises(StopIteration):
        train.progress(data)


def test_overlapping_pipelines_train_as_the_plain_one():
    data = [torch.tensor([float(number)]) for number in range(6)]
    expected = None
    for kind in (
        TrainPipelineBase,
        TrainPipelineSparseDist,
        PrefetchTrainPipelineSparseDist,
        TrainPipelineSemiSync,
    ):
        _, train = pipeline(kind)
        iterator = iter(data)
        outputs = [train.progress(iterator).item() for _ in data]
        expected = expected or outputs
        assert outputs == expected


@pytest.mark.parametrize("kind", [TrainPipelineSparseDist, PrefetchTrainPipelineSparseDist])
@pytest.mark.parametrize("copies", [False, True])
def test_copies_in_a_thread_change_no_number(kind, copies):
    outputs = []
    for given in ({}, {"async_inplace_copy": copies}):
        data, train = batches(), pipeline(kind, **given)[1]
        outputs.append([train.progress(data).item() for _ in range(2)])
    assert outputs[0] == outputs[1]
