"""Embedding collections copied, moved, saved and loaded."""

import copy
import pickle

import pytest
import torch

from meshrec import fuse
from meshrec.optim import SGD, RowWiseAdagrad, apply_optimizer_in_backward, in_backward_spec

from .models import make_bags, make_input, make_sequences, same_weights, trained


def by_pickle(module):
    return pickle.loads(pickle.dumps(module))


@pytest.mark.parametrize("copied", [copy.deepcopy, by_pickle])
@pytest.mark.parametrize("make", [make_bags, make_sequences])
@pytest.mark.parametrize("fused", [False, True])
def test_copies_are_equal_and_independent(make, fused, copied):
    module = fuse(make(), optimizer=RowWiseAdagrad(lr=0.1)) if fused else make()
    if fused:
        trained(module)
    other = copied(module)
    assert same_weights(module, other)
    if not fused:
        return
    before = copy.deepcopy(module.state_dict())
    trained(other)
    assert all(torch.equal(weight, before[name]) for name, weight in module.state_dict().items())
    trained(module)
    assert same_weights(module, other)


@pytest.mark.parametrize("copied", [copy.deepcopy, by_pickle])
def test_copies_of_a_model_keep_the_choice_of_optimizers(copied):
    model = torch.nn.Sequential(make_bags())
    apply_optimizer_in_backward(torch.optim.SGD, [model[0].embedding_bags["t1"].weight], {"lr": 0.5})
    specs = [in_backward_spec(weight) for weight in copied(model).parameters()]
    assert specs == [None, SGD(lr=0.5), None]


def test_moving_keeps_the_choice_of_optimizers():
    ebc = make_bags(device="meta")
    apply_optimizer_in_backward(torch.optim.SGD, ebc.parameters(), {"lr": 0.5})
    ebc.to_empty(device="cpu")
    assert [in_backward_spec(weight) for weight in ebc.parameters()] == [SGD(lr=0.5)] * 3


@pytest.mark.parametrize("move", [lambda m: m.half(), lambda m: m.to("meta"), lambda m: m.to(torch.bfloat16)])
def test_a_fused_module_cannot_be_moved(move):
    model = torch.nn.Sequential(fuse(make_bags(), optimizer=SGD(lr=0.1)))
    with pytest.raises(ValueError, match="module"):
        move(model)
    assert all(weight.dtype == torch.float32 and not weight.is_meta for weight in model.parameters())


def test_a_fused_module_may_be_told_to_stay_where_it_is():
    model = fuse(make_bags(), optimizer=SGD(lr=0.1)).to("cpu").float()
    assert not same_weights(trained(model), make_bags())


def test_state_dict_round_trip():
    saved = trained(fuse(make_bags(), optimizer=SGD(lr=0.1)))
    loaded = make_bags()
    loaded.load_state_dict(saved.state_dict())
    assert same_weights(saved, loaded)
    assert torch.equal(saved(make_input()).values(), loaded(make_input()).values())
