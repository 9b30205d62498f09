from enum import Enum

import pytest
import torch

from meshrec import optim
from meshrec.compat.bridge import optimizers
from meshrec.compat.bridge.optimizers import EmbOptimType, WeightDecayMode, spec_of
from meshrec.modules import DataType
from meshrec.optim import in_backward_spec


def test_fused_params_of_the_tutorials():
    given = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.02, "eps": 0.002}
    assert spec_of(given) == optim.RowWiseAdagrad(lr=0.02, eps=0.002)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"optimizer": EmbOptimType.EXACT_SGD}, optim.SGD(lr=0.01)),
        ({"optimizer": EmbOptimType.EXACT_ADAGRAD, "lr": 0.1}, optim.Adagrad(lr=0.1, eps=1e-8)),
        ({"optimizer": EmbOptimType.ADAM, "beta1": 0.8}, optim.Adam(lr=0.01, betas=(0.8, 0.999))),
        (
            {"optimizer": EmbOptimType.ADAM, "weight_decay": 0.1},
            optim.Adam(lr=0.01, weight_decay=0.1),
        ),
        ({"optimizer": EmbOptimType.LARS_SGD, "eta": 0.01}, optim.LARS(lr=0.01, trust_coefficient=0.01)),
        ({"optimizer": "PARTIAL_ROWWISE_LAMB"}, optim.PartialRowWiseLAMB(lr=0.01)),
        (
            {"optimizer": EmbOptimType.ROWWISE_RMSPROP_AR, "ar_alpha": 0.5, "ema_beta": 0.9},
            optim.RowWiseRMSpropAR(lr=0.01, ar_alpha=0.5, ema_beta=0.9, min_shrinkage=0.1),
        ),
        ({"optimizer": optim.SGD(lr=0.3)}, optim.SGD(lr=0.3)),
        ({"optimizer": torch.optim.SGD, "lr": 0.3}, optim.SGD(lr=0.3)),
        (
            {
                "optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
                "weight_decay": 0.1,
                "weight_decay_mode": WeightDecayMode.L2,
                "cache_load_factor": 0.2,
                "output_dtype": DataType.FP32,
            },
            optim.RowWiseAdagrad(lr=0.01, weight_decay=0.1),
        ),
    ],
)
def test_fused_params(given, expected):
    found = spec_of(given)
    if found.weight_decay and isinstance(expected, optim.Adam):
        assert found.decoupled_weight_decay
    names = [name for name in vars(expected) if name != "decoupled_weight_decay"]
    assert type(found) is type(expected)
    assert {name: getattr(found, name) for name in names} == {n: getattr(expected, n) for n in names}


def test_the_enum_may_be_fbgemms_own():
    theirs = Enum("EmbOptimType", {"EXACT_SGD": "exact_sgd"})
    assert spec_of({"optimizer": theirs.EXACT_SGD, "learning_rate": 0.5}) == optim.SGD(lr=0.5)
    assert str(EmbOptimType.EXACT_SGD) == "exact_sgd"


def test_without_an_optimizer_it_is_fbgemms_default():
    for given in (None, {}, {"prefetch_pipeline": True}):
        assert spec_of(given) == optim.SGD(lr=0.01)
    assert spec_of({"learning_rate": 0.1}) == optim.SGD(lr=0.1)


def test_numbers_that_the_optimizer_does_not_use_are_ignored_in_one_line(caplog):
    given = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.02, "eps": 0.002, "momentum": 0.9}
    assert spec_of(given) == optim.SGD(lr=0.02)
    assert caplog.messages == ["fused_params: SGD has no ['eps', 'momentum']; ignored, as FBGEMM does."]


def test_momentum_of_torchs_sgd_is_ignored_by_tables(caplog):
    weight = torch.nn.Parameter(torch.ones(3, 2))
    optimizers.apply_optimizer_in_backward(torch.optim.SGD, [weight], {"lr": 0.25, "momentum": 0.9})
    assert in_backward_spec(weight) == optim.SGD(lr=0.25)
    assert "updated without momentum, as FBGEMM does" in caplog.text


def test_messages_have_the_names_that_the_user_wrote():
    with pytest.raises(ValueError, match=r"fused_params.*learning_rate"):
        spec_of({"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": -1.0})
    with pytest.raises(ValueError, match=r"fused_params.*'stepsize'.*'learning_rate'"):
        spec_of({"optimizer": EmbOptimType.EXACT_SGD, "stepsize": 1.0})
    with pytest.raises(AttributeError, match="'SHAMPOO'"):
        EmbOptimType.SHAMPOO  # noqa: B018
    assert not hasattr(EmbOptimType, "_anything")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"optimizer": EmbOptimType.NONE}, "'NONE'"),
        (
            {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "weight_decay": 0.1},
            "weight_decay.*weight_decay_mode",
        ),
        ({"optimizer": EmbOptimType.EXACT_SGD, "max_gradient": 1.0}, "SGD.*'max_gradient'"),
        ({"optimizer": EmbOptimType.EXACT_SGD, "output_dtype": DataType.FP16}, "output_dtype"),
    ],
)
def test_what_cannot_be_followed(given, message):
    with pytest.raises(ValueError, match=message):
        spec_of(given)


@pytest.mark.parametrize(
    ("name", "spec"),
    [
        ("SGD", optim.SGD),
        ("Adagrad", optim.Adagrad),
        ("Adam", optim.Adam),
        ("LAMB", optim.LAMB),
        ("LarsSGD", optim.LARS),
        ("PartialRowWiseAdam", optim.PartialRowWiseAdam),
        ("PartialRowWiseLAMB", optim.PartialRowWiseLAMB),
    ],
)
def test_classes_that_name_an_optimizer_of_tables(name, spec):
    weight = torch.nn.Parameter(torch.ones(3, 2))
    optimizers.apply_optimizer_in_backward(getattr(optimizers, name), [weight], {"lr": 0.25})
    found = in_backward_spec(weight)
    assert type(found) is spec
    assert found.lr == 0.25
    with pytest.raises(ValueError, match=rf"torchrec\.optim.*{name}"):
        weight.sum().backward()


def test_torchs_optimizers_step_in_the_backward_pass():
    weight = torch.nn.Parameter(torch.ones(3, 2))
    optimizers.apply_optimizer_in_backward(torch.optim.SGD, [weight], {"lr": 0.25})
    weight.sum().backward()
    assert weight[0, 0] == 0.75
    assert weight.grad is None
