import copy
import math

import pytest
import torch

from meshrec.compat.bridge.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage
from meshrec.optim import CombinedOptimizer, KeyedOptimizerWrapper


def make(stages, lr=2.0, **kwargs):
    params = {"a": torch.nn.Parameter(torch.ones(2)), "b": torch.nn.Parameter(torch.ones(2))}
    parts = [
        (name, KeyedOptimizerWrapper({"x": parameter}, lambda p: torch.optim.Adam(p, lr=9.0)))
        for name, parameter in params.items()
    ]
    return WarmupOptimizer(CombinedOptimizer(parts), stages, lr, **kwargs), params


def rates(optimizer, count):
    seen = [optimizer.param_groups[0]["lr"]]
    for _ in range(count):
        optimizer.step()
        assert len({group["lr"] for group in optimizer.param_groups}) == 1
        seen.append(optimizer.param_groups[0]["lr"])
    return seen


@pytest.mark.parametrize(
    ("stage", "expected"),
    [
        (WarmupStage(policy=WarmupPolicy.NONE, max_iters=3), [1, 1, 1, 1]),
        (WarmupStage(policy=WarmupPolicy.LINEAR, max_iters=4, value=0.2), [0.2, 0.4, 0.6, 0.8, 1.0]),
        (WarmupStage(policy=WarmupPolicy.CONSTANT, max_iters=3, value=0.3), [0.3] * 4),
        (WarmupStage(policy=WarmupPolicy.POLY, max_iters=4, value=2.0), [1, 9 / 16, 1 / 4, 1 / 16, 0]),
        (WarmupStage(policy=WarmupPolicy.POLY, max_iters=2, value=1.0, decay_iters=8), [1, 7 / 8, 6 / 8]),
        (WarmupStage(policy=WarmupPolicy.STEP, max_iters=3, value=0.5), [1, 0.5, 0.25, 0.125]),
        (
            WarmupStage(policy=WarmupPolicy.STEP, max_iters=4, value=0.5, decay_iters=2),
            [1, 1, 0.5, 0.5, 0.25],
        ),
        (WarmupStage(policy=WarmupPolicy.INVSQRT, max_iters=4), [1, 1, 2**-0.5, 3**-0.5, 0.5]),
        (
            WarmupStage(
                policy=WarmupPolicy.COSINE_ANNEALING_WARM_RESTARTS, max_iters=5, value=0.2, sgdr_period=4
            ),
            [1, 0.2 + 0.4 * (1 + math.cos(math.pi / 4)), 0.6, 0.2 + 0.4 * (1 - math.cos(math.pi / 4)), 1],
        ),
        (
            WarmupStage(
                policy=WarmupPolicy.INTERPOLATE,
                max_iters=4,
                value=0.5,
                end_value=2.5,
                start_interpolating_iters=0,
            ),
            [0.5, 1.0, 1.5, 2.0, 2.5],
        ),
        (WarmupStage(policy=WarmupPolicy.CONSTANT, max_iters=3, value=0.5, lr_scale=3.0), [1.5] * 4),
    ],
)
def test_multipliers(stage, expected):
    assert [stage.multiplier(i) for i in range(len(expected))] == pytest.approx(expected)


def test_stages_follow_one_another_and_count_from_the_start():
    optimizer, _ = make(
        [
            WarmupStage(policy=WarmupPolicy.LINEAR, max_iters=2, value=0.5),
            WarmupStage(policy=WarmupPolicy.STEP, max_iters=5, value=0.5, decay_iters=4),
        ]
    )
    assert rates(optimizer, 7) == pytest.approx([1.0, 1.5, 2.0, 2.0, 1.0, 1.0, 2.0, 2.0])


def test_without_stages_the_rate_is_lr():
    optimizer, _ = make([])
    assert rates(optimizer, 2) == [2.0, 2.0, 2.0]


def test_the_position_is_saved_and_resumed():
    stages = [WarmupStage(policy=WarmupPolicy.LINEAR, max_iters=10, value=0.0)]
    optimizer, params = make(stages)
    for parameter in params.values():
        parameter.grad = torch.ones(2)
    optimizer.step()
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    assert saved["state"]["__warmup"]["warmup"].tolist() == [2, 0]
    assert set(saved["state"]) == {"a.x", "b.x", "__warmup"}
    resumed, _ = make(stages)
    assert resumed.param_groups[0]["lr"] == 0
    resumed.load_state_dict(saved)
    assert resumed.param_groups[1]["lr"] == optimizer.param_groups[1]["lr"] == pytest.approx(0.4)
    assert rates(resumed, 1)[1] == pytest.approx(0.6)


def test_the_wrapped_optimizer_keeps_its_own_state():
    optimizer, _ = make([], param_name="progress")
    optimizer.init_state()
    assert set(optimizer.state_dict()["state"]) == {"a.x", "b.x", "progress"}
    assert set(optimizer._optimizer.state_dict()["state"]) == {"a.x", "b.x"}
    assert not optimizer.updates_in_backward
    with pytest.raises(ValueError, match=r"'progress'.*state_dict"):
        optimizer.load_state_dict(optimizer._optimizer.state_dict())


def test_new_groups_get_the_rate():
    keyed = KeyedOptimizerWrapper({"a": torch.nn.Parameter(torch.ones(2))}, torch.optim.SGD)
    optimizer = WarmupOptimizer(
        keyed, [WarmupStage(policy=WarmupPolicy.CONSTANT, max_iters=5, value=0.5)], lr=1.0
    )
    optimizer.add_param_group({"params": {"b": torch.nn.Parameter(torch.ones(2))}})
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.5]


def test_another_name_for_the_rate_and_a_closure():
    keyed = KeyedOptimizerWrapper({"a": torch.nn.Parameter(torch.ones(2))}, torch.optim.SGD)
    keyed.param_groups[0]["rate"] = 0.0
    optimizer = WarmupOptimizer(keyed, [], lr=0.7, lr_param="rate")
    assert optimizer.step(lambda: 4.0) == 4.0
    assert keyed.param_groups[0]["rate"] == 0.7
    assert keyed.param_groups[0]["lr"] == 1e-3


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"max_iters": 0}, "max_iters.*sgdr_period.*1.*0.*1"),
        ({"sgdr_period": 0}, "1.*1.*0"),
        ({"policy": WarmupPolicy.POLY, "max_iters": 5, "decay_iters": 4}, "POLY.*reaches 0.*decay_iters.*4"),
        ({"policy": WarmupPolicy.INTERPOLATE, "max_iters": 5}, "INTERPOLATE.*end_value"),
        (
            {
                "policy": WarmupPolicy.INTERPOLATE,
                "max_iters": 5,
                "end_value": 1.0,
                "start_interpolating_iters": 5,
            },
            "start_interpolating_iters.*max_iters.*5",
        ),
    ],
)
def test_stages_that_cannot_be(kwargs, message):
    with pytest.raises(ValueError, match=message):
        WarmupStage(**kwargs)


def test_stages_must_rise_and_names_be_free():
    with pytest.raises(ValueError, match=r"max_iters.*\[3, 3\]"):
        make([WarmupStage(max_iters=3), WarmupStage(max_iters=3)])
    with pytest.raises(ValueError, match=r"'a.x'"):
        make([], param_name="a.x")
