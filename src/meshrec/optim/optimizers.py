"""Specs of the fused optimizers: frozen dataclasses, one per formula.

In every formula ``g`` is the gradient of one row of a table, summed over all its lookups in the batch, ``w``
is the row, and ``t`` is the step, counted from 1. Only rows that a batch looks up are touched. Other rows
keep their values and their state, and do not decay. All arithmetic and all state are fp32; fp16 and bf16
tables are rounded stochastically.

Weight decay: with ``decoupled_weight_decay=False`` (L2), ``g + weight_decay * w`` replaces ``g``. With
``True``, ``w *= 1 - lr * weight_decay`` comes before the gradient step, as in Loshchilov and Hutter,
"Decoupled weight decay regularization" (2019). LAMB and LARS apply it elsewhere in their formulas.
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

_MAX_SEED = 1 << 53
_STEP = Hyper._fields.index("step")
DEFAULT_SEED = 1
"""Default seed of stochastic rounding."""


class StateSlot(NamedTuple):
    """One fp32 tensor of optimizer state per table."""

    name: str
    per_row: bool
    """Whether it has one value per row (shape ``[num_rows]``) or one per element (``[num_rows, dim]``)."""
    initial_value: float = 0.0

    def shape(self, num_rows: int, dim: int) -> tuple[int, ...]:
        """Return the shape for a table of ``num_rows`` rows of width ``dim``."""
        return (num_rows,) if self.per_row else (num_rows, dim)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerSpec(ABC):
    """Base of all specs.

    Raises:
        ValueError: a number is out of its range.
    """

    lr: float
    """Initial learning rate. The fused optimizer's ``param_groups`` hold the current one."""
    weight_decay: float = 0.0
    decoupled_weight_decay: bool = False

    formula: ClassVar[Formula]
    """Formula, with the state that it keeps."""
    code: ClassVar[int]
    """Number of the formula in the kernels."""

    def __init_subclass__(cls, kind: OptimizerKind) -> None:
        cls.formula = formula_of(kind)
        cls.code = kind.code

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            _check(type(self).__name__, field.name, getattr(self, field.name))

    def state_slots(self) -> tuple[StateSlot, ...]:
        """Return the state of each table, in the order of the kernels."""
        return tuple(
            StateSlot(slot.name, slot.per_row, getattr(self, slot.initial) if slot.initial else 0.0)
            for slot in self.formula.slots
        )

    def hyper(self, *, lr: float, step: int, seed: int = 0, row_dim: int = 0) -> Tensor:
        """Return the hyperparameters of one update for the kernels: float64, in the order of ``Hyper``.

        Args:
            lr: the current learning rate.
            step: number of the update, counted from 1.
            seed: seed of stochastic rounding, in [0, 2^53); 0 rounds to nearest.
            row_dim: width of the whole row if a table is split by columns; 0: the table's own width.
        """
        assert step >= 1, step
        check_seed(seed)
        # A tensor around a buffer is made in a fraction of torch.tensor's time.
        return torch.frombuffer(self._numbers(lr, step, seed, row_dim), dtype=torch.float64)

    def _numbers(self, lr: float, step: int, seed: int, row_dim: int) -> "array[float]":
        return array("d", self._at_start._replace(lr=lr, step=step, seed=seed, row_dim=row_dim))

    @functools.cached_property
    def _at_start(self) -> Hyper:
        """Fields of the spec that are also fields of ``Hyper``."""
        numbers = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        if "betas" in numbers:
            numbers["beta1"], numbers["beta2"] = numbers["betas"]
        decay_mode = DECOUPLED_DECAY if self.decoupled_weight_decay else L2_DECAY
        numbers["decay_mode"] = decay_mode if self.weight_decay else NO_DECAY
        return Hyper(**{name: value for name, value in numbers.items() if name in Hyper._fields})


class HyperOfSteps:
    """Hyperparameters in one tensor that is reused for all steps. Each step reads it before the next one
    begins.

    Args: see `OptimizerSpec.hyper`.
    """

    def __init__(self, spec: OptimizerSpec, seed: int) -> None:
        check_seed(seed)
        self._arguments = spec, seed
        self._numbers = spec._numbers(spec.lr, 1, seed, 0)
        self._tensor = torch.frombuffer(self._numbers, dtype=torch.float64)

    def at(self, step: int) -> Tensor:
        """Return the hyperparameters of a step, float64. The tensor is valid until the next call."""
        self._numbers[_STEP] = step
        return self._tensor

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of the tensor would not follow the copy of its numbers.
        return type(self), self._arguments


@dataclasses.dataclass(frozen=True, kw_only=True)
class SGD(OptimizerSpec, kind=OptimizerKind.SGD):
    """Stochastic gradient descent: ``w -= lr * g``. It has no momentum, because it would move rows that are
    not looked up.
    """


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adagrad(OptimizerSpec, kind=OptimizerKind.ADAGRAD):
    """Adagrad: ``s += g^2; w -= lr * g / (sqrt(s) + eps)``, element by element.

    Duchi, Hazan, Singer: "Adaptive subgradient methods" (2011). ``s`` starts at
    ``initial_accumulator_value``.
    """

    eps: float = 1e-8
    initial_accumulator_value: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowWiseAdagrad(OptimizerSpec, kind=OptimizerKind.ROW_WISE_ADAGRAD):
    """Adagrad with one number of state per row: ``s += mean(g^2); w -= lr * g / (sqrt(s) + eps)``.

    Mudigere et al.: "Software-hardware co-design for fast and scalable training of deep learning
    recommendation models" (2022), section 4.1.2. ``s`` starts at ``initial_accumulator_value``.
    """

    eps: float = 1e-8
    initial_accumulator_value: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adam(OptimizerSpec, kind=OptimizerKind.ADAM):
    """Adam: ``m = b1*m + (1-b1)*g; v = b2*v + (1-b2)*g^2; w -= lr * m^ / (sqrt(v^) + eps)``.

    ``m^ = m / (1 - b1^t)``, ``v^ = v / (1 - b2^t)``; ``t`` counts the updates of the table, not of the row.
    Kingma, Ba: "Adam: a method for stochastic optimization" (2015). Decoupled weight decay makes it AdamW.
    """

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8


@dataclasses.dataclass(frozen=True, kw_only=True)
class PartialRowWiseAdam(OptimizerSpec, kind=OptimizerKind.PARTIAL_ROW_WISE_ADAM):
    """Adam with one second moment per row: ``v = b2*v + (1-b2)*mean(g^2)``; the rest as in Adam.

    Half the state of Adam; FBGEMM's optimizer of that name.
    """

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8


@dataclasses.dataclass(frozen=True, kw_only=True)
class LAMB(OptimizerSpec, kind=OptimizerKind.LAMB):
    """LAMB, with a row for a layer: ``r = m^ / (sqrt(v^) + eps); w -= lr * |w|/|r| * r``.

    ``m^`` and ``v^`` as in Adam; the ratio is 1 where a norm is 0. You et al.: "Large batch optimization for
    deep learning" (2020). As there, decoupled weight decay (the default here) joins the step before its norm
    is taken: ``r += weight_decay * w``.
    """

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    decoupled_weight_decay: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class PartialRowWiseLAMB(OptimizerSpec, kind=OptimizerKind.PARTIAL_ROW_WISE_LAMB):
    """LAMB with one second moment per row: ``v = b2*v + (1-b2)*mean(g^2)``; the rest as in LAMB."""

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    decoupled_weight_decay: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class LARS(OptimizerSpec, kind=OptimizerKind.LARS):
    """LARS, with a row for a layer: ``m = momentum * m + local_lr * (g + weight_decay * w); w -= m``.

    ``local_lr = lr * trust_coefficient * |w| / (|g| + weight_decay * |w| + eps)``, and ``lr`` where a norm is
    0. You, Gitman, Ginsburg: "Large batch training of convolutional networks" (2017). With decoupled weight
    decay both terms with ``weight_decay`` vanish. The momentum of a row moves it only when it is looked up.
    """

    momentum: float = 0.9
    trust_coefficient: float = 0.001
    eps: float = 1e-8


@dataclasses.dataclass(frozen=True, kw_only=True)
class FTRL(OptimizerSpec, kind=OptimizerKind.FTRL):
    """Follow the regularised leader, proximal, element by element; ``l1`` makes rows sparse.

    ``z += g - (sqrt(n + g^2) - sqrt(n)) / lr * w; n += g^2``, and then
    ``w = -sign(z) * max(|z| - l1, 0) / ((beta + sqrt(n)) / lr + l2)``. McMahan et al.: "Ad click prediction:
    a view from the trenches" (2013), algorithm 1, where ``lr`` is alpha. ``n`` (``sum``) starts at
    ``initial_accumulator_value``, ``z`` (``linear``) at 0; as ``w`` follows from them, tables usually begin
    with zeros. L2 decay adds to the gradient, which is not what ``l2`` does.

    Raises:
        ValueError: for a number outside its range, ``lr`` = 0, which the formula divides by, and decoupled
            weight decay, which would change a row behind the back of its state.
    """

    beta: float = 1.0
    l1: float = 0.0
    l2: float = 0.0
    initial_accumulator_value: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lr == 0:
            raise ValueError("FTRL: lr must be a number above 0, got 0. To rest, leave out the steps.")
        if self.weight_decay and self.decoupled_weight_decay:
            raise ValueError(
                "FTRL: decoupled_weight_decay must be False, got True: rows follow from their state. Use l2."
            )


SPECS: tuple[type[OptimizerSpec], ...] = tuple(OptimizerSpec.__subclasses__())
"""All optimizer specs."""


def check_seed(seed: int) -> None:
    """Raise ValueError if a seed of stochastic rounding does not fit into a float64."""
    if not 0 <= seed < _MAX_SEED:
        raise ValueError(f"seed must be in [0, 2^53), got {seed}.")


def _check(spec: str, name: str, value: object) -> None:
    if name == "decoupled_weight_decay":
        allowed, fits = "True or False", isinstance(value, bool)
    elif name == "betas":
        allowed = "two numbers in [0, 1)"
        fits = isinstance(value, tuple) and len(value) == 2 and all(_within(beta, 0, 1) for beta in value)
    elif name == "momentum":
        allowed, fits = "a number in [0, 1)", _within(value, 0, 1)
    elif name in ("eps", "trust_coefficient"):
        allowed, fits = "a number above 0", _within(value, 0, math.inf) and value != 0
    else:
        allowed, fits = "a number >= 0", _within(value, 0, math.inf)
    if not fits:
        raise ValueError(f"{spec}: {name} must be {allowed}, got {value!r}.")


def _within(value: object, low: float, high: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and low <= value < high
