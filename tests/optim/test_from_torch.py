import pytest
import torch

from meshrec import optim
from meshrec.ops.tbe.formulas import Hyper
from meshrec.ops.tbe.naive_update import update_rows
from meshrec.optim import from_torch


@pytest.mark.parametrize(
    ("optimizer_class", "kwargs", "spec"),
    [
        (torch.optim.SGD, {}, optim.SGD(lr=1e-3)),
        (torch.optim.SGD, {"lr": 0.5, "weight_decay": 0.1}, optim.SGD(lr=0.5, weight_decay=0.1)),
        (torch.optim.Adagrad, {}, optim.Adagrad(lr=1e-2, eps=1e-10)),
        (
            torch.optim.Adagrad,
            {"lr": 0.3, "initial_accumulator_value": 0.2, "weight_decay": 0.1},
            optim.Adagrad(lr=0.3, eps=1e-10, initial_accumulator_value=0.2, weight_decay=0.1),
        ),
        (
            torch.optim.Adam,
            {"betas": [0.5, 0.6], "eps": 1e-3},
            optim.Adam(lr=1e-3, betas=(0.5, 0.6), eps=1e-3),
        ),
        (torch.optim.Adam, {"weight_decay": 0.1, "foreach": True}, optim.Adam(lr=1e-3, weight_decay=0.1)),
        (torch.optim.AdamW, {}, optim.Adam(lr=1e-3, weight_decay=1e-2, decoupled_weight_decay=True)),
    ],
)
def test_torch_optimizers_with_their_defaults(optimizer_class, kwargs, spec):
    assert from_torch(optimizer_class, kwargs) == spec
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(6, 4, generator=generator)
    parameter = torch.nn.Parameter(weight.clone())
    dense = optimizer_class([parameter], **kwargs)
    state = [torch.full(slot.shape(6, 4), slot.initial_value) for slot in spec.state_slots()]
    for step in range(1, 4):
        parameter.grad = torch.randn(6, 4, generator=generator)
        dense.step()
        hyper = Hyper.from_tensor(spec.hyper(lr=spec.lr, step=step))
        update_rows(weight, state, torch.arange(6), parameter.grad, None, spec.code, hyper)
    torch.testing.assert_close(weight, parameter.detach())


@pytest.mark.parametrize(
    ("spec", "kwargs", "expected"),
    [
        (optim.RowWiseAdagrad, {"lr": 0.02, "eps": 1e-4}, optim.RowWiseAdagrad(lr=0.02, eps=1e-4)),
        (optim.SGD, {"learning_rate": 0.1}, optim.SGD(lr=0.1)),
        (optim.Adam, {"lr": 0.1, "beta1": 0.5}, optim.Adam(lr=0.1, betas=(0.5, 0.999))),
        (optim.LAMB, {"lr": 0.1, "beta2": 0.5}, optim.LAMB(lr=0.1, betas=(0.9, 0.5))),
        (
            optim.PartialRowWiseAdam,
            {"lr": 0.1, "betas": [0.1, 0.2]},
            optim.PartialRowWiseAdam(lr=0.1, betas=(0.1, 0.2)),
        ),
        (optim.LARS, {"lr": 0.1, "eta": 0.3}, optim.LARS(lr=0.1, trust_coefficient=0.3)),
    ],
)
def test_specs_as_classes_take_their_own_and_torchrecs_words(spec, kwargs, expected):
    assert from_torch(spec, kwargs) == expected


@pytest.mark.parametrize(
    ("optimizer_class", "kwargs", "message"),
    [
        (
            torch.optim.SGD,
            {"momentum": 0.9},
            "torch.optim.SGD.*momentum=0.9.*momentum=0",
        ),
        (torch.optim.SGD, {"maximize": True}, "maximize=True"),
        (torch.optim.Adagrad, {"lr_decay": 0.1}, "lr_decay=0.1"),
        (torch.optim.Adam, {"amsgrad": True}, "amsgrad=True"),
        (torch.optim.Adam, {"differentiable": True}, "differentiable=True"),
        (torch.optim.SGD, {"lr": torch.tensor(0.1)}, "lr.*0"),
        (torch.optim.SGD, {"rho": 1}, "torch.optim.SGD.*'rho'"),
        (torch.optim.RMSprop, {}, "RMSprop.*torch.optim.SGD"),
        (torch.nn.Linear, {}, "Linear"),
        (optim.SGD, {"lr": 0.1, "momentum": 0.9}, "SGD.*'momentum'"),
        (optim.SGD, {}, "SGD"),
        (optim.SGD, {"lr": 0.1, "learning_rate": 0.1}, "given"),
        (optim.Adam, {"lr": 0.1, "beta1": 0.1, "betas": (0.1, 0.2)}, "betas"),
    ],
)
def test_what_a_spec_cannot_express(optimizer_class, kwargs, message):
    with pytest.raises(ValueError, match=message):
        from_torch(optimizer_class, kwargs)
