import warnings

import pytest
import torch

from meshrec import optim
from meshrec.optim import (
    apply_optimizer_in_backward,
    in_backward,
    in_backward_optimizer_filter,
    in_backward_spec,
)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's package uses what torch has deprecated
    from torch.distributed.optim import _apply_optimizer_in_backward


def make_model():
    return torch.nn.ModuleDict({"a": torch.nn.Linear(2, 3, bias=False), "b": torch.nn.Linear(3, 1)})


def test_records_the_choice_and_nothing_else():
    model = make_model()
    apply_optimizer_in_backward(torch.optim.SGD, model["a"].parameters(), {"lr": 0.5})
    apply_optimizer_in_backward(optim.RowWiseAdagrad, [model["b"].weight], {"lr": 0.1})
    assert in_backward_spec(model["a"].weight) == optim.SGD(lr=0.5)
    assert in_backward_spec(model["b"].weight) == optim.RowWiseAdagrad(lr=0.1)
    assert in_backward_spec(model["b"].bias) is None
    model["a"](torch.ones(1, 2)).sum().backward()
    assert model["a"].weight.grad is not None


def test_filter_divides_the_parameters():
    model = make_model()
    apply_optimizer_in_backward(torch.optim.SGD, [model["a"].weight], {"lr": 0.5})
    names = [name for name, _ in in_backward_optimizer_filter(model.named_parameters())]
    assert names == ["b.weight", "b.bias"]
    names = [name for name, _ in in_backward_optimizer_filter(model.named_parameters(), include=True)]
    assert names == ["a.weight"]


def test_filter_knows_torchs_own_mark():
    model = make_model()
    model["a"].weight._in_backward_optimizers = [object()]
    names = [name for name, _ in in_backward_optimizer_filter(model.named_parameters(), include=True)]
    assert names == ["a.weight"]
    with pytest.raises(ValueError, match="optimizer"):
        apply_optimizer_in_backward(torch.optim.SGD, [model["a"].weight], {"lr": 0.5})


@pytest.mark.parametrize(
    "pick", [lambda m: [m["b"].bias, m["a"].weight], lambda m: [m["b"].bias, m["b"].bias]]
)
def test_two_optimizers_for_one_parameter(pick):
    model = make_model()
    apply_optimizer_in_backward(torch.optim.SGD, [model["a"].weight], {"lr": 0.5})
    message = (
        r"parameter 1 of shape \[.*\] already has an optimizer in backward, \w+\(lr=.*, and is given Adam\("
    )
    with pytest.raises(ValueError, match=message):
        apply_optimizer_in_backward(torch.optim.Adam, pick(model), {"lr": 0.1})
    assert in_backward_spec(model["b"].bias) is None
    assert in_backward_spec(model["a"].weight) == optim.SGD(lr=0.5)


def test_one_parameter_is_no_list():
    with pytest.raises(ValueError, match="parameters"):
        apply_optimizer_in_backward(torch.optim.SGD, torch.nn.Parameter(torch.ones(2, 2)), {"lr": 0.5})


def test_what_torch_recorded_counts():
    model = make_model()
    _apply_optimizer_in_backward(torch.optim.SGD, [model["a"].weight], {"lr": 0.5})
    assert in_backward_spec(model["a"].weight) == optim.SGD(lr=0.5)
    _apply_optimizer_in_backward(torch.optim.Adam, [model["a"].weight], {"lr": 0.1})
    with pytest.raises(ValueError, match=r"2 optimizers.*SGD"):
        in_backward_spec(model["a"].weight)


@pytest.mark.parametrize("second", [torch.optim.SGD, torch.optim.RMSprop])
def test_torchs_choice_beside_ours_is_an_error_that_names_both(second):
    model = make_model()
    apply_optimizer_in_backward(optim.SGD, [model["a"].weight], {"lr": 0.5})
    _apply_optimizer_in_backward(torch.optim.SGD, [model["a"].weight], {"lr": 0.5})
    assert in_backward_spec(model["a"].weight) == optim.SGD(lr=0.5)
    model = make_model()
    apply_optimizer_in_backward(optim.RowWiseAdagrad, [model["a"].weight], {"lr": 0.5})
    _apply_optimizer_in_backward(second, [model["a"].weight], {"lr": 0.25})
    with pytest.raises(ValueError, match=f"RowWiseAdagrad.*lr=0.5....*{second.__name__}"):
        in_backward_spec(model["a"].weight)
    with pytest.raises(ValueError, match="RowWiseAdagrad"):
        apply_optimizer_in_backward(torch.optim.Adam, [model["a"].weight], {"lr": 0.1})


def sharded(spec):
    """A model with a sharded table, which ``spec`` updates in the backward pass."""
    from meshrec import EmbeddingBagCollection, EmbeddingBagConfig
    from meshrec import distributed as md
    from meshrec.model_parallel import DistributedModelParallel

    table = EmbeddingBagConfig(name="t", num_embeddings=4, embedding_dim=4, feature_names=["f"])
    model = torch.nn.ModuleDict({"ebc": EmbeddingBagCollection([table]), "over": torch.nn.Linear(4, 1)})
    return DistributedModelParallel(model, sharders=[md.EmbeddingBagCollectionSharder(spec)])


def test_an_optimizer_that_would_change_no_table_is_refused_at_its_first_step(monkeypatch):
    monkeypatch.setattr(in_backward, "_accepts_fused", False)  # a test of the bridge may have come before
    model = sharded(optim.SGD(lr=0.1))
    wrong = torch.optim.Adam(model.parameters())
    for _ in range(2):
        with pytest.raises(ValueError, match=r"Adam.*\[4, 4\]"):
            wrong.step()
    right = torch.optim.Adam(dict(in_backward_optimizer_filter(model.named_parameters())).values())
    right.step()
    torch.optim.Adam(sharded(None).parameters()).step()  # whose table has ordinary gradients
