"""TorchRec's staged learning-rate schedules. The position is saved and resumed with the optimizer.

MeshRec programs use ``meshrec.train.Schedule``, or a ``torch.optim.lr_scheduler``.
"""

import math
from collections import ChainMap
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum, unique
from typing import Any, cast

import torch

from meshrec.compat.bridge.keyed import Forwarding, apply_torchrec_conventions
from meshrec.optim.keyed import Closure, KeyedOptimizer

# End of the implicit last stage: longer than any training.
_FOREVER = 1 << 62


@unique
class WarmupPolicy(Enum):
    """Formula for the learning-rate multiplier at iteration ``i``.

    Names in a formula, such as ``value``, are fields of `WarmupStage`.
    """

    NONE = "none"
    """The multiplier is 1."""
    LINEAR = "linear"
    """Linear from ``value`` to 1: ``value + (1 - value) * i / max_iters``."""
    CONSTANT = "constant"
    """The multiplier is ``value``."""
    POLY = "poly"
    """The multiplier is ``(1 - i / decay_iters) ^ value``."""
    STEP = "step"
    """The multiplier is ``value ^ floor(i / decay_iters)``."""
    INVSQRT = "inv_sqrt"
    """The multiplier is ``1 / sqrt(i)``, and 1 for ``i = 0``."""
    COSINE_ANNEALING_WARM_RESTARTS = "cosine_annealing_warm_restarts"
    """``value + (1 - value) * (1 + cos(pi * (i mod sgdr_period) / sgdr_period)) / 2``; Loshchilov, Hutter:
    "SGDR: stochastic gradient descent with warm restarts" (2017), with periods of one length."""
    INTERPOLATE = "interpolate"
    """Linear from ``value`` at ``start_interpolating_iters`` to ``end_value`` at ``max_iters``."""


@dataclass(frozen=True)
class WarmupStage:
    """Stage of a learning-rate schedule. Iterations count from the start of training, not of the stage.

    Raises:
        ValueError: the policy cannot use the values.
    """

    policy: WarmupPolicy = WarmupPolicy.LINEAR
    max_iters: int = 1
    """Last iteration of the stage."""
    value: float = 1.0
    lr_scale: float = 1.0
    """Additional factor."""
    decay_iters: int = -1
    """Period for POLY and STEP. If not positive: ``max_iters`` for POLY, 1 for STEP."""
    sgdr_period: int = 1
    start_interpolating_iters: int | None = None
    end_value: float | None = None

    def __post_init__(self) -> None:
        if self.max_iters < 1 or self.sgdr_period < 1:
            raise ValueError(
                f"max_iters and sgdr_period must be at least 1, got {self.max_iters} and {self.sgdr_period}."
            )
        if self.policy is WarmupPolicy.POLY and 0 < self.decay_iters < self.max_iters:
            raise ValueError(
                f"POLY reaches 0 at decay_iters, {self.decay_iters}, before the stage ends at max_iters, "
                f"{self.max_iters}. End the stage by then, or raise decay_iters."
            )
        if self.policy is WarmupPolicy.INTERPOLATE:
            start, end = self.start_interpolating_iters, self.end_value
            if start is None or end is None or start >= self.max_iters:
                raise ValueError(
                    f"INTERPOLATE needs end_value and a start_interpolating_iters below max_iters, "
                    f"{self.max_iters}, got {end} and {start}."
                )

    def multiplier(self, iteration: int) -> float:
        """Return the learning-rate factor at ``iteration``."""
        return self._policy_multiplier(iteration) * self.lr_scale

    def _policy_multiplier(self, iteration: int) -> float:
        """Return the learning-rate factor before ``lr_scale`` is applied."""
        value = self.value
        match self.policy:
            case WarmupPolicy.NONE:
                return 1.0
            case WarmupPolicy.LINEAR:
                return value + (1.0 - value) * iteration / self.max_iters
            case WarmupPolicy.CONSTANT:
                return value
            case WarmupPolicy.POLY:
                # Without decay_iters, the curve reaches 0 at the end of the stage.
                decay_iters = self.decay_iters if self.decay_iters > 0 else self.max_iters
                return math.pow(1.0 - iteration / decay_iters, value)
            case WarmupPolicy.STEP:
                return math.pow(value, iteration // max(self.decay_iters, 1))
            case WarmupPolicy.INVSQRT:
                return 1.0 / math.sqrt(max(iteration, 1))
            case WarmupPolicy.COSINE_ANNEALING_WARM_RESTARTS:
                phase = math.pi * (iteration % self.sgdr_period) / self.sgdr_period
                return value + (1.0 - value) * 0.5 * (1.0 + math.cos(phase))
            case WarmupPolicy.INTERPOLATE:
                start, end = self.start_interpolating_iters, self.end_value
                assert start is not None
                assert end is not None
                return value + (end - value) * (iteration - start) / (self.max_iters - start)


class WarmupOptimizer(Forwarding, KeyedOptimizer):
    """Optimizer wrapper with a staged learning rate, set before the first step and after every step.

    At iteration ``i`` every group gets ``lr * stage.multiplier(i)``, with the first stage where ``i <=
    max_iters``. After the last stage it gets ``lr``. The rate is set before the backward pass, so optimizers
    that update in backward also follow it. The position is saved as state under ``param_name``.

    Args:
        optimizer: optimizer to wrap. Both share the param groups.
        stages: stages with increasing ``max_iters``.
        lr: base learning rate.
        lr_param: group key for the learning rate.
        param_name: state dict name for the position.

    Raises:
        ValueError: ``max_iters`` does not increase, or ``param_name`` is taken.
    """

    _optimizer: KeyedOptimizer

    def __init__(
        self,
        optimizer: KeyedOptimizer,
        stages: Sequence[WarmupStage],
        lr: float = 0.1,
        lr_param: str = "lr",
        param_name: str = "__warmup",
    ) -> None:
        ends = [stage.max_iters for stage in stages]
        if ends != sorted(set(ends)):
            raise ValueError(
                f"max_iters must rise from stage to stage, got {ends}. It counts from the start of training."
            )
        if param_name in optimizer.params:
            raise ValueError(f"there is a parameter named {param_name!r}. Choose another param_name.")
        self._optimizer = optimizer
        # After the last stage, the rate stays at `lr`.
        self._stages = [*stages, WarmupStage(policy=WarmupPolicy.NONE, max_iters=_FOREVER)]
        self._lr = lr
        self._lr_param = lr_param
        self._position = torch.zeros(2, dtype=torch.int64)  # iteration, stage
        # An empty parameter: state dicts hold state by parameter name, so the position needs one.
        placeholder = torch.nn.Parameter(torch.empty(0), requires_grad=False)
        super().__init__(
            ChainMap({param_name: placeholder}, cast(Any, optimizer.params)),
            ChainMap({placeholder: {"warmup": self._position}}, optimizer.state),
            optimizer.param_groups,
        )
        # The loaded position must take effect before the next backward pass.
        self.register_load_state_dict_post_hook(_resume)
        self._set_lr()
        apply_torchrec_conventions(self)

    @property
    def updates_in_backward(self) -> bool:
        return self._optimizer.updates_in_backward

    def step(self, closure: Closure = None) -> float | None:  # type: ignore[override]
        loss = self._optimizer.step(closure)
        iteration, stage = self._position.tolist()
        iteration += 1
        stage += iteration > self._stages[stage].max_iters
        # In place, because the state dict refers to this tensor.
        self._position.copy_(torch.tensor([iteration, stage]))
        self._set_lr()
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self._optimizer.add_param_group(param_group)
        self._set_lr()

    def create_state(self, names: Collection[str], sparse_names: Collection[str] = ()) -> None:
        self._optimizer.create_state(names, sparse_names)

    def _set_lr(self) -> None:
        """Set the learning rate of all groups for the current iteration and stage."""
        iteration, stage = self._position.tolist()
        for group in self.param_groups:
            group[self._lr_param] = self._lr * self._stages[stage].multiplier(iteration)


def _resume(optimizer: torch.optim.Optimizer) -> None:
    """Set the learning rate for the loaded iteration and stage (hook after a state dict was loaded)."""
    assert isinstance(optimizer, WarmupOptimizer)
    optimizer._set_lr()
