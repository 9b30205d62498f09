"""Fused optimizer specs: frozen dataclasses, one per update formula.

A fused optimizer is applied by a kernel to the embedding rows that a batch looks up. A *spec* tells the
formula and the hyperparameters.

In every formula ``g`` is the gradient of a table row, summed over all lookups in the batch, ``w`` is the row,
and ``t`` is the number of the update to the table, from 1. Rows that the batch does not look up keep their
values and state, without decay. Arithmetic and state are fp32; fp16 and bf16 rows are rounded stochastically.

Weight decay: with ``decoupled_weight_decay=False`` (L2), ``g + weight_decay * w`` replaces ``g``. With
``True``, ``w *= 1 - lr * weight_decay`` precedes the gradient step, as in Loshchilov and Hutter, "Decoupled
weight decay regularization" (2019). LAMB and LARS apply it elsewhere in the formula.
"""

import dataclasses
import functools
import math
from abc import ABC
from array import array
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from meshrec.ops.tbe.formulas import (
    DECOUPLED_DECAY,
    L2_DECAY,
    NO_DECAY,
    Formula,
    Hyper,
    OptimizerKind,
    formula_of,
)

_MAX_SEED = 1 << 53  # larger integers are not exact in the kernels' float64 hyperparameters
_STEP = Hyper._fields.index("step")  # position of the step number in the hyperparameters
DEFAULT_SEED = 1
"""Default seed for stochastic rounding."""
# ``ulp(0.0)`` is the smallest positive number, so the bound excludes 0.
_ABOVE_0 = (math.ulp(0.0), math.inf, "a number above 0")
_RANGES = {
    "betas": (0, 1, "two numbers in [0, 1)"),
    "decoupled_weight_decay": (0, 1, "True or False"),
    "ema_beta": (0, 1, "a number in [0, 1)"),
    "eps": _ABOVE_0,
    "min_shrinkage": (0, math.nextafter(1, 2), "a number in [0, 1]"),
    "momentum": (0, 1, "a number in [0, 1)"),
    "trust_coefficient": _ABOVE_0,
}
"""By hyperparameter: lower bound, upper bound (excluded), and a description of allowed values for messages.
Hyperparameters not listed must be >= 0."""


class StateSlot(NamedTuple):
    """Name, shape and initial value of an fp32 optimizer state tensor that a table needs."""

    name: str
    per_row: bool
    """True: a value per row, ``[num_rows]``. False: a value per element, ``[num_rows, dim]``."""
    initial_value: float = 0.0

    def shape(self, num_rows: int, dim: int) -> tuple[int, ...]:
        """Return the shape of this state tensor for a table with ``num_rows`` rows and ``dim`` columns."""
        return (num_rows,) if self.per_row else (num_rows, dim)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerSpec(ABC):
    """Base class for fused optimizer specs. A subclass has a field per hyperparameter.

    Args:
        lr: Initial learning rate. The fused optimizer's ``param_groups`` hold the current value.
        weight_decay: Weight decay coefficient; 0: no decay.
        decoupled_weight_decay: Whether weight decay is applied to the row instead of the gradient; see the
            module's docstring.

    Raises:
        ValueError: A hyperparameter is out of range.

    Example::

        >>> Adam(lr=0.01).state_slots()[0].shape(num_rows=10, dim=4)
        (10, 4)
    """

    # No default: fused and dense optimizers rarely share a good learning rate.
    lr: float
    weight_decay: float = 0.0
    decoupled_weight_decay: bool = False

    formula: ClassVar[Formula]
    """Update formula, with the necessary state tensors."""
    code: ClassVar[int]
    """Number of the formula in the kernels."""

    def __init_subclass__(cls, kind: OptimizerKind) -> None:
        # The formula is shared with the C++ and Triton kernels, which dispatch on the code.
        cls.formula = formula_of(kind)
        cls.code = kind.code

    def __post_init__(self) -> None:
        # Without helper functions: a learning rate schedule makes a new spec in every step.
        for field in dataclasses.fields(self):
            name, value = field.name, getattr(self, field.name)
            low, high, allowed = _RANGES.get(name, (0, math.inf, "a number >= 0"))
            # Only betas is a pair; treat other values as tuples of length 1.
            values = value if name == "betas" else (value,)
            is_valid = isinstance(values, tuple) and len(values) == 1 + (name == "betas")
            for number in values if is_valid else ():
                # bool is a subclass of int: True would pass as a learning rate.
                if isinstance(number, bool) or name == "decoupled_weight_decay":
                    is_valid &= isinstance(number, bool) and name == "decoupled_weight_decay"
                else:
                    # Also rejects NaN, for which both comparisons are False.
                    is_valid &= isinstance(number, int | float) and low <= number < high
            if not is_valid:
                raise ValueError(f"{type(self).__name__}: {name} must be {allowed}, got {value!r}.")

    def state_slots(self) -> tuple[StateSlot, ...]:
        """Return a description of each state tensor, in the order in which the kernels take the tensors."""
        # ``slot.initial`` names the hyperparameter with the initial value.
        return tuple(
            StateSlot(slot.name, slot.per_row, getattr(self, slot.initial) if slot.initial else 0.0)
            for slot in self.formula.slots
        )

    def hyper(self, *, lr: float, step: int, seed: int = 0, row_dim: int = 0) -> Tensor:
        """Return the hyperparameters of a single update for the kernels: float64, in the order of ``Hyper``.

        Args:
            lr: Current learning rate.
            step: Update number, counted from 1.
            seed: Stochastic rounding seed in [0, 2^53); 0 rounds to nearest.
            row_dim: Width of the full row if a table is split by columns; 0 if the table is not.
        """
        # Adam's bias correction divides by 1 - beta^step.
        assert step >= 1, step
        check_seed(seed)
        # frombuffer takes a fraction of torch.tensor's time. This runs once per step.
        return torch.frombuffer(self._pack(lr, step, seed, row_dim), dtype=torch.float64)

    def _pack(self, lr: float, step: int, seed: int, row_dim: int) -> "array[float]":
        """Return the result of ``hyper``, with the same arguments, as an array instead of a tensor."""
        return array("d", self._initial_hyper._replace(lr=lr, step=step, seed=seed, row_dim=row_dim))

    @functools.cached_property
    def _initial_hyper(self) -> Hyper:
        """The spec's fields as a ``Hyper``, cached: updates change only lr, step, seed and row_dim."""
        values = {**vars(self)}
        # The kernels have fewer fields than the specs: related hyperparameters share a field.
        if "betas" in values:
            values["beta1"], values["beta2"] = values["betas"]
        if "ema_beta" in values:
            values["beta2"] = values["ema_beta"]
        # The kernels skip decay for NO_DECAY, so a decay of 0 costs nothing.
        decay_mode = DECOUPLED_DECAY if self.decoupled_weight_decay else L2_DECAY
        values["decay_mode"] = decay_mode if self.weight_decay else NO_DECAY
        return Hyper(**{name: value for name, value in values.items() if name in Hyper._fields})


class StepHyper:
    """Hyperparameters for successive updates, in a tensor that is reused. Only the step number changes.

    Args:
        spec: Optimizer spec.
        seed: Stochastic rounding seed, as in `OptimizerSpec.hyper`.
    """

    def __init__(self, spec: OptimizerSpec, seed: int) -> None:
        check_seed(seed)
        self._arguments = spec, seed
        # An array, because it can be written in place and shares memory with a tensor.
        self._values = spec._pack(spec.lr, 1, seed, 0)
        # Shares memory with _values. Every update must have read it before the next call to at().
        self._tensor = torch.frombuffer(self._values, dtype=torch.float64)

    def at(self, step: int) -> Tensor:
        """Return the hyperparameters for update ``step``, float64. The next call overwrites the tensor."""
        # Writing an array element is much faster than creating a tensor.
        self._values[_STEP] = step
        return self._tensor

    def __reduce__(self) -> tuple[Any, ...]:
        # Copied separately, the tensor and the buffer would no longer share memory.
        return type(self), self._arguments


@dataclasses.dataclass(frozen=True, kw_only=True)
class SGD(OptimizerSpec, kind=OptimizerKind.SGD):
    """Stochastic gradient descent: ``w -= lr * g``. No momentum, which would move rows not looked up."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adagrad(OptimizerSpec, kind=OptimizerKind.ADAGRAD):
    """Adagrad: ``s += g^2; w -= lr * g / (sqrt(s) + eps)``, elementwise.

    ``s`` starts at ``initial_accumulator_value``. Duchi, Hazan, Singer: "Adaptive subgradient methods"
    (2011).
    """

    eps: float = 1e-8
    initial_accumulator_value: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowWiseAdagrad(OptimizerSpec, kind=OptimizerKind.ROW_WISE_ADAGRAD):
    """Adagrad with a single state value per row: ``s += mean(g^2); w -= lr * g / (sqrt(s) + eps)``.

    ``s`` starts at ``initial_accumulator_value``. Mudigere et al.: "Software-hardware co-design for fast and
    scalable training of deep learning recommendation models" (2022), section 4.1.2.
    """

    eps: float = 1e-8
    initial_accumulator_value: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adam(OptimizerSpec, kind=OptimizerKind.ADAM):
    """Adam: ``m = b1*m + (1-b1)*g; v = b2*v + (1-b2)*g^2; w -= lr * m^ / (sqrt(v^) + eps)``.

    ``m^ = m / (1 - b1^t)`` and ``v^ = v / (1 - b2^t)``, where ``t`` counts updates to the table, not to the
    row. With decoupled weight decay this is AdamW. Kingma, Ba: "Adam: a method for stochastic optimization"
    (2015).
    """

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8


@dataclasses.dataclass(frozen=True, kw_only=True)
class PartialRowWiseAdam(OptimizerSpec, kind=OptimizerKind.PARTIAL_ROW_WISE_ADAM):
    """Adam with a single second moment per row: ``v = b2*v + (1-b2)*mean(g^2)``.

    Half the state of Adam. FBGEMM has the same optimizer under this name.
    """

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8


@dataclasses.dataclass(frozen=True, kw_only=True)
class LAMB(OptimizerSpec, kind=OptimizerKind.LAMB):
    """LAMB with rows as layers: ``r = m^ / (sqrt(v^) + eps); w -= lr * |w|/|r| * r``.

    ``m^`` and ``v^`` as in Adam; the ratio is 1 if either norm is 0. Decoupled weight decay (the default
    here) is added before the norm is taken: ``r += weight_decay * w``. You et al.: "Large batch optimization
    for deep learning" (2020).
    """

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    # Unlike in the base class.
    decoupled_weight_decay: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class PartialRowWiseLAMB(OptimizerSpec, kind=OptimizerKind.PARTIAL_ROW_WISE_LAMB):
    """LAMB with a single second moment per row: ``v = b2*v + (1-b2)*mean(g^2)``."""

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    decoupled_weight_decay: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class LARS(OptimizerSpec, kind=OptimizerKind.LARS):
    """LARS with rows as layers: ``m = momentum * m + local_lr * (g + weight_decay * w); w -= m``.

    ``local_lr = lr * trust_coefficient * |w| / (|g| + weight_decay * |w| + eps)``, or ``lr`` if either norm
    is 0. With decoupled weight decay both ``weight_decay`` terms vanish. Momentum moves a row only when it is
    looked up. You, Gitman, Ginsburg: "Large batch training of convolutional networks" (2017).
    """

    momentum: float = 0.9
    trust_coefficient: float = 0.001
    eps: float = 1e-8


@dataclasses.dataclass(frozen=True, kw_only=True)
class FTRL(OptimizerSpec, kind=OptimizerKind.FTRL):
    """FTRL-proximal, elementwise; ``l1`` makes rows sparse.

    ``z += g - (sqrt(n + g^2) - sqrt(n)) / lr * w; n += g^2``, and then ``w = -sign(z) * max(|z| - l1, 0) /
    ((beta + sqrt(n)) / lr + l2)``. McMahan et al.: "Ad click prediction: a view from the trenches" (2013),
    algorithm 1, where ``lr`` is alpha. ``n`` (``sum``) starts at ``initial_accumulator_value``, ``z``
    (``linear``) at 0. Every update computes ``w`` again from ``z`` and ``n``, so tables usually start with
    zeros. L2 weight decay is added to the gradient and differs from ``l2``.

    Raises:
        ValueError: A hyperparameter is out of range; ``lr`` is 0, by which the formula divides; or weight
            decay is decoupled, which would change ``w`` without its state.
    """

    beta: float = 1.0
    l1: float = 0.0
    l2: float = 0.0
    initial_accumulator_value: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        # The base class allows 0, as other formulas do not divide by the learning rate.
        if self.lr == 0:
            raise ValueError("FTRL: lr must be a number above 0, got 0. To pause training, skip the steps.")
        if self.weight_decay and self.decoupled_weight_decay:
            raise ValueError(
                "FTRL: decoupled_weight_decay must be False, got True: rows follow from their state. Use l2."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowWiseRMSpropAR(OptimizerSpec, kind=OptimizerKind.ROW_WISE_RMSPROP_AR):
    """Row-wise RMSprop with adaptive regularization: the longer a row was not updated, the more it shrinks.

    ``v = ema_beta * v + (1 - ema_beta) * mean(g^2); w = shrinkage * w - lr * g / (sqrt(v) + eps)``, where
    ``shrinkage = max(min_shrinkage, 1 - lr * ar_alpha * (t - prev_iter))`` and ``prev_iter`` is the step of
    the row's previous update. The first update of a row shrinks it by one step. ``v`` (``sum``) and
    ``prev_iter`` are one value per row; step numbers are exact up to 2^24. FBGEMM 1.9 has the same optimizer
    as ``ROWWISE_RMSPROP_AR``.
    """

    ar_alpha: float = 0.0
    """Decay per step since the previous update, relative to ``lr``. 0 is plain RMSprop."""
    ema_beta: float = 0.99
    min_shrinkage: float = 0.1
    eps: float = 1e-8


SPECS: tuple[type[OptimizerSpec], ...] = tuple(OptimizerSpec.__subclasses__())
"""All fused optimizer spec classes."""


def check_seed(seed: int) -> None:
    """Check that a stochastic rounding seed is in [0, 2^53). These integers are exact in float64.

    Raises:
        ValueError: The seed is out of range.
    """
    if not 0 <= seed < _MAX_SEED:
        raise ValueError(f"seed must be in [0, 2^53), got {seed}.")
