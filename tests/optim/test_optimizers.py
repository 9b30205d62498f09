import copy
import dataclasses

import pytest
import torch

from meshrec import optim
from meshrec.ops.tbe import formulas
from meshrec.ops.tbe.formulas import FORMULAS, Hyper
from meshrec.ops.tbe.naive_update import update_rows
from meshrec.optim.optimizers import StepHyper

from .models import KINDS


@pytest.mark.parametrize(
    ("spec", "slots"),
    [
        (optim.SGD, {}),
        (optim.Adagrad, {"sum": (9, 4)}),
        (optim.RowWiseAdagrad, {"sum": (9,)}),
        (optim.Adam, {"exp_avg": (9, 4), "exp_avg_sq": (9, 4)}),
        (optim.PartialRowWiseAdam, {"exp_avg": (9, 4), "exp_avg_sq": (9,)}),
        (optim.LAMB, {"exp_avg": (9, 4), "exp_avg_sq": (9, 4)}),
        (optim.PartialRowWiseLAMB, {"exp_avg": (9, 4), "exp_avg_sq": (9,)}),
        (optim.LARS, {"momentum_buffer": (9, 4)}),
        (optim.FTRL, {"sum": (9, 4), "linear": (9, 4)}),
        (optim.RowWiseRMSpropAR, {"sum": (9,), "prev_iter": (9,)}),
    ],
)
def test_names_and_shapes_of_state(spec, slots):
    assert {slot.name: slot.shape(9, 4) for slot in spec(lr=0.1).state_slots()} == slots


@pytest.mark.parametrize("spec", KINDS)
def test_the_kernels_take_the_state_and_the_numbers(spec):
    made = spec(lr=0.1)
    state = [torch.full(slot.shape(5, 3), slot.initial_value) for slot in made.state_slots()]
    weight = torch.ones(5, 3)
    hyper = Hyper.from_tensor(made.hyper(lr=0.1, step=1))
    update_rows(weight, state, torch.tensor([3]), torch.ones(1, 3), None, made.code, hyper)
    assert bool((weight[3] < 1).all())
    assert bool((weight[:3] == 1).all())


def test_codes_are_distinct():
    assert sorted(spec.code for spec in KINDS) == list(range(len(FORMULAS)))


def test_hyper_puts_every_number_in_its_place():
    lars = optim.LARS(lr=1, eps=2e-3, weight_decay=0.3, momentum=0.4, trust_coefficient=0.5)
    found = Hyper.from_tensor(lars.hyper(lr=0.25, step=7, seed=11, row_dim=96))
    assert found == Hyper(
        lr=0.25,
        eps=2e-3,
        weight_decay=0.3,
        decay_mode=formulas.L2_DECAY,
        momentum=0.4,
        trust_coefficient=0.5,
        step=7,
        seed=11,
        row_dim=96,
    )
    adam = optim.Adam(lr=1, betas=(0.8, 0.95), eps=1e-5, weight_decay=0.1, decoupled_weight_decay=True)
    found = Hyper.from_tensor(adam.hyper(lr=0.5, step=2))
    assert found == Hyper(
        lr=0.5,
        eps=1e-5,
        weight_decay=0.1,
        decay_mode=formulas.DECOUPLED_DECAY,
        beta1=0.8,
        beta2=0.95,
        step=2,
    )
    rmsprop = optim.RowWiseRMSpropAR(lr=1, ar_alpha=0.7, ema_beta=0.8, min_shrinkage=0.2, eps=1e-5)
    found = Hyper.from_tensor(rmsprop.hyper(lr=0.5, step=2))
    assert found == Hyper(lr=0.5, eps=1e-5, beta2=0.8, ar_alpha=0.7, min_shrinkage=0.2, step=2)


def test_the_hyper_of_steps_is_what_each_step_would_make():
    spec = optim.Adam(lr=0.5, weight_decay=0.1)
    steps = StepHyper(spec, 11)
    steps.at(2)
    copied = copy.deepcopy(steps)
    for step, numbers in ((3, steps), (4, copied), (5, steps)):
        assert torch.equal(numbers.at(step), spec.hyper(lr=0.5, step=step, seed=11))
    with pytest.raises(ValueError, match="seed"):
        StepHyper(spec, -1)


@pytest.mark.parametrize("decoupled", [False, True])
def test_no_decay_when_weight_decay_is_zero(decoupled):
    hyper = optim.SGD(lr=0.1, decoupled_weight_decay=decoupled).hyper(lr=0.1, step=1)
    assert Hyper.from_tensor(hyper).decay_mode == formulas.NO_DECAY


def test_adagrad_state_starts_at_its_initial_value():
    for spec in (optim.Adagrad, optim.RowWiseAdagrad):
        (slot,) = spec(lr=0.1, initial_accumulator_value=0.5).state_slots()
        assert slot.initial_value == 0.5


@pytest.mark.parametrize(
    ("spec", "kwargs", "message"),
    [
        (optim.SGD, {"lr": -0.1}, "SGD.*0.*-0.1"),
        (optim.SGD, {"lr": float("nan")}, "lr.*0"),
        (optim.SGD, {"lr": float("inf")}, "lr.*0"),
        (optim.SGD, {"lr": "0.1"}, "lr.*0.*'0.1'"),
        (optim.SGD, {"lr": 1, "weight_decay": -1}, "weight_decay.*0.*-1"),
        (optim.SGD, {"lr": 1, "decoupled_weight_decay": 1}, "True.*1"),
        (optim.Adagrad, {"lr": 1, "eps": 0}, "above 0.*0"),
        (
            optim.RowWiseAdagrad,
            {"lr": 1, "initial_accumulator_value": -1},
            "initial_accumulator_value",
        ),
        (optim.Adam, {"lr": 1, "betas": (0.9, 1.0)}, r"Adam.*\[0.*1"),
        (optim.LAMB, {"lr": 1, "betas": (0.9,)}, "LAMB"),
        (optim.LARS, {"lr": 1, "momentum": 1.0}, r"LARS.*\[0.*1.*1.0"),
        (optim.FTRL, {"lr": 0}, "FTRL.*above 0.*0"),
        (optim.FTRL, {"lr": 1, "l1": -1}, "FTRL.*l1.*0.*-1"),
        (
            optim.FTRL,
            {"lr": 1, "weight_decay": 0.1, "decoupled_weight_decay": True},
            "FTRL.*decoupled_weight_decay",
        ),
        (optim.LARS, {"lr": 1, "trust_coefficient": 0}, "trust_coefficient.*above 0"),
        (optim.RowWiseRMSpropAR, {"lr": 1, "ema_beta": 1}, r"ema_beta.*\[0.*1\).*1"),
        (optim.RowWiseRMSpropAR, {"lr": 1, "min_shrinkage": 1.1}, r"min_shrinkage.*\[0.*1\].*1.1"),
    ],
)
def test_numbers_out_of_range(spec, kwargs, message):
    with pytest.raises(ValueError, match=message):
        spec(**kwargs)


@pytest.mark.parametrize("seed", [-1, 2**53])
def test_seed_out_of_range(seed):
    with pytest.raises(ValueError, match=r"seed.*\[0.*2.*53"):
        optim.SGD(lr=0.1).hyper(lr=0.1, step=1, seed=seed)


def test_specs_are_frozen_and_compare_by_value():
    spec = optim.Adam(lr=0.1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.lr = 0.2
    assert spec == optim.Adam(lr=0.1)
    assert len({spec, optim.Adam(lr=0.1), optim.LAMB(lr=0.1)}) == 2
