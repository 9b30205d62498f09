"""Fused optimizers: update formulas in plain torch, optimizer state tensors, and whole-row sums.

``FORMULAS`` is the single source. These derive from it: the state tensors of the specs
(``optim/optimizers.py``), the exchange of row statistics between ranks (``distributed/row_stats.py``), the
planner's memory estimate, the constants of the Triton kernels, and ``formulas.inc`` for the C++ kernels,
which setup.py generates. A new optimizer needs an ``OptimizerKind`` and an entry here, a spec, a ``step_row``
in ``csrc/tbe/formulas.inl``, and a function in ``triton_update_kernels.py``. Kernels without it fail to
compile. This file imports only torch, because setup.py runs it standalone.

All formulas compute in fp32, and only on rows touched by the batch. ``w`` is a table row, and ``g`` is the
gradient of the row, summed over the batch. L2 decay first adds ``weight_decay * w`` to ``g``. Decoupled decay
multiplies the row by ``1 - lr * weight_decay``; the gradient step and all norms still use the row before
decay. LAMB and LARS apply decay differently, see their docstrings.

Norms and means are over the whole row. If a table is sharded by columns, a rank has only some columns of a
row. Then ``stats_U3`` supplies the sums over all shards, with a column per ``RowSum``.
"""

from collections.abc import Callable
from enum import Enum, IntEnum, unique
from typing import NamedTuple

import torch
from torch import Tensor

# Shape legend: U touched rows, D width.

NO_DECAY, L2_DECAY, DECOUPLED_DECAY = range(3)
"""Weight decay mode codes. The C++ and Triton kernels use the same numbers."""


class Hyper(NamedTuple):
    """Optimizer parameters for an update. A formula reads the fields that it needs.

    The kernels receive the fields as a float64 tensor in this order, and know the names through
    ``formulas.inc`` and ``triton_update_kernels.py``. A formula with a new parameter adds a field here.
    """

    lr: float
    decay_mode: int = NO_DECAY
    """``NO_DECAY``, ``L2_DECAY`` or ``DECOUPLED_DECAY``."""
    step: int = 1
    """Number of this update, counted from 1."""
    seed: int = 0
    """Seed for stochastic rounding of fp16 and bf16 tables; 0: round to nearest."""
    row_dim: int = 0
    """Width of a whole row, if the table is sharded by columns; 0: the width of the weight tensor."""
    weight_decay: float = 0.0
    eps: float = 0.0
    beta1: float = 0.0
    beta2: float = 0.0
    momentum: float = 0.0
    trust_coefficient: float = 0.0
    beta: float = 0.0
    l1: float = 0.0
    l2: float = 0.0
    ar_alpha: float = 0.0
    min_shrinkage: float = 0.0

    @classmethod
    def from_tensor(cls, hyper: Tensor) -> "Hyper":
        """Build a ``Hyper`` from the float64 tensor ``[HYPER_SIZE]`` returned by ``as_tensor``."""
        if hyper.dtype != torch.float64 or hyper.shape != (HYPER_SIZE,):
            raise ValueError(
                f"hyper must be a float64 CPU tensor with {HYPER_SIZE} entries, got {hyper.dtype} "
                f"{list(hyper.shape)}. A spec's hyper() makes one."
            )
        # Every field arrives as a float. Restore the fields that are integers.
        hyper_values = cls._make(hyper.tolist())
        return hyper_values._replace(**{name: int(getattr(hyper_values, name)) for name in _CPP_TYPES})

    def as_tensor(self) -> Tensor:
        """Return the fields as a float64 tensor ``[HYPER_SIZE]`` for the kernels."""
        return torch.tensor(self, dtype=torch.float64)


HYPER_SIZE = len(Hyper._fields)
"""Length of the ``hyper`` tensor."""
# C++ types for non-float parameters.
# A float32 step would be inexact above 2^24, and a seed needs all bits.
_CPP_TYPES = {"decay_mode": "int", "step": "uint64_t", "seed": "uint64_t", "row_dim": "double"}


class RowSum(IntEnum):
    """The sums of squares over a whole row that formulas may read; the values are columns of ``stats_U3``."""

    # The C++ and Triton kernels use the same column numbers.
    GRADIENT = 0
    """Sum of squares of ``Formula.gradient``."""
    WEIGHT = 1
    """Sum of squares of the stored row."""
    DIRECTION = 2
    """Sum of squares of ``Formula.direction``."""


class Rows(NamedTuple):
    """The touched rows of a table, as input to a formula.

    The formula returns the new weights, and modifies ``slots`` in place.
    """

    weight: Tensor
    """Rows before the update, fp32 [U, D]."""
    gradient: Tensor
    """Gradient per row, summed over the batch, fp32 [U, D]."""
    slots: list[Tensor]
    """Optimizer state, a tensor per state slot: fp32 [U, D], or [U] for a value per row."""
    stats: Tensor | None
    """Whole-row sums of squares, fp32 [U, 3], for a table sharded by columns. None: the rows are whole."""

    def sum_of_squares(self, which: RowSum, x_UD: Tensor) -> Tensor:
        """Return the sum of squares of every whole row, fp32 [U].

        Without ``stats``, the rows are whole, and the sum is computed from ``x_UD``. With ``stats``, the rows
        belong to a column shard, and the sum over all shards is read from ``stats``.

        Args:
            which: the ``stats`` column with the sum of squares of ``x_UD``.
            x_UD: fp32 [U, D].
        """
        return x_UD.square().sum(1) if self.stats is None else self.stats[:, which]


def decayed_gradient(rows: Rows, h: Hyper) -> Tensor:
    """Return the gradient ``g``; with L2 decay, ``g + weight_decay * w``."""
    if h.decay_mode == L2_DECAY:
        return rows.gradient + h.weight_decay * rows.weight
    return rows.gradient


def _plain_gradient(rows: Rows, h: Hyper) -> Tensor:
    """Return the gradient without the L2 term. LARS adds the term later, after it computed the norms."""
    return rows.gradient


def _mean_of_squares(rows: Rows, h: Hyper, g_UD: Tensor) -> Tensor:
    """Return the mean squared gradient of every whole row, fp32 [U]."""
    return rows.sum_of_squares(RowSum.GRADIENT, g_UD) / (h.row_dim or g_UD.shape[1])


def _decayed_weight(rows: Rows, h: Hyper) -> Tensor:
    """Return the rows, multiplied by ``1 - lr * weight_decay`` if the decay mode is decoupled."""
    if h.decay_mode == DECOUPLED_DECAY:
        return rows.weight * (1 - h.lr * h.weight_decay)
    return rows.weight


def _sgd(rows: Rows, h: Hyper) -> Tensor:
    """Apply w -= lr * g."""
    return _decayed_weight(rows, h) - h.lr * decayed_gradient(rows, h)


def _adagrad(rows: Rows, h: Hyper) -> Tensor:
    """Apply s += g^2; w -= lr * g / (sqrt(s) + eps)."""
    # Slots are in the order of Formula.slots.
    g, (total,) = decayed_gradient(rows, h), rows.slots
    total += g.square()
    return _decayed_weight(rows, h) - h.lr * g / (total.sqrt() + h.eps)


def _rowwise_adagrad(rows: Rows, h: Hyper) -> Tensor:
    """Apply s += mean(g^2), one value per row; w -= lr * g / (sqrt(s) + eps)."""
    g, (total,) = decayed_gradient(rows, h), rows.slots
    total += _mean_of_squares(rows, h, g)
    return _decayed_weight(rows, h) - (h.lr / (total.sqrt() + h.eps))[:, None] * g


def _moments_step(rows: Rows, h: Hyper) -> Tensor:
    """Return Adam's update direction ``m^ / (sqrt(v^) + eps)``, before the learning rate is applied.

    Updates both moments in place: ``m = beta1 * m + (1 - beta1) * g``, and ``v`` likewise with ``beta2`` and
    ``g^2``, or with ``mean(g^2)`` if ``v`` has a value per row. ``m^`` and ``v^`` are ``m / (1 -
    beta1^step)`` and ``v / (1 - beta2^step)``.
    """
    g, (m, v) = decayed_gradient(rows, h), rows.slots
    square = g.square() if v.dim() == 2 else _mean_of_squares(rows, h, g)
    # In place: the caller stores the modified slots.
    m.mul_(h.beta1).add_(g, alpha=1 - h.beta1)
    v.mul_(h.beta2).add_(square, alpha=1 - h.beta2)
    scale = (v / (1 - h.beta2**h.step)).sqrt() + h.eps
    return m / (1 - h.beta1**h.step) / (scale if v.dim() == 2 else scale[:, None])


def _adam(rows: Rows, h: Hyper) -> Tensor:
    """Apply w -= lr * m^ / (sqrt(v^) + eps), with v per element or per row."""
    return _decayed_weight(rows, h) - h.lr * _moments_step(rows, h)


def _lamb_direction(rows: Rows, h: Hyper) -> Tensor:
    """Return LAMB's update direction: Adam's direction, plus ``weight_decay * w`` with decoupled decay."""
    r = _moments_step(rows, h)
    return r + h.weight_decay * rows.weight if h.decay_mode == DECOUPLED_DECAY else r


def _lamb(rows: Rows, h: Hyper) -> Tensor:
    """Apply ``w -= lr * |w| / |r| * r``, where ``r`` is the update direction from ``_lamb_direction``.

    The ratio of the norms is 1 if either norm is 0.
    """
    r = _lamb_direction(rows, h)
    weight_norm = rows.sum_of_squares(RowSum.WEIGHT, rows.weight).sqrt()
    step_norm = rows.sum_of_squares(RowSum.DIRECTION, r).sqrt()
    # Quotients with a zero norm are discarded below.
    either_zero = (weight_norm == 0) | (step_norm == 0)
    ratio = torch.where(either_zero, torch.ones_like(step_norm), weight_norm / step_norm)
    return rows.weight - h.lr * ratio[:, None] * r


def _lars(rows: Rows, h: Hyper) -> Tensor:
    """Apply ``m = momentum * m + local_lr * (g + decay * w)``, then ``w -= m``.

    ``local_lr = lr * trust_coefficient * |w| / (|g| + decay * |w| + eps)``, or ``lr`` if either norm is 0.
    ``decay`` is the weight decay in L2 mode, otherwise 0.
    """
    g, (m,) = rows.gradient, rows.slots
    decay = h.weight_decay if h.decay_mode == L2_DECAY else 0.0
    weight_norm = rows.sum_of_squares(RowSum.WEIGHT, rows.weight).sqrt()
    grad_norm = rows.sum_of_squares(RowSum.GRADIENT, g).sqrt()
    # Quotients with a zero norm are discarded below.
    either_zero = (weight_norm == 0) | (grad_norm == 0)
    local = h.trust_coefficient * weight_norm / (grad_norm + decay * weight_norm + h.eps)
    local_lr = h.lr * torch.where(either_zero, torch.ones_like(local), local)
    m.mul_(h.momentum).add_(local_lr[:, None] * (g + decay * rows.weight))
    return _decayed_weight(rows, h) - m


# Much smaller than any root of an accumulated square, so it changes no other quotient.
_TINY = 1e-37


def _ftrl(rows: Rows, h: Hyper) -> Tensor:
    """Apply z += g - (sqrt(n + g^2) - sqrt(n)) / lr * w; n += g^2; w = -sign(z) * max(|z| - l1, 0) / scale.

    scale = (beta + sqrt(n)) / lr + l2. The difference of the roots is computed as g^2 divided by the sum of
    the roots, which avoids cancellation for a small g. _TINY in the divisor gives 0 if both roots are 0.
    """
    g, (n, z) = decayed_gradient(rows, h), rows.slots
    before = n.sqrt()
    n += g.square()
    root = n.sqrt()
    z += g - g.square() / (root + before + _TINY) / h.lr * rows.weight
    # Weights are 0 where |z| is at most l1, which makes the table sparse.
    over = (z.abs() - h.l1).clamp(min=0)
    return torch.where(over > 0, -z.sign() * over / ((h.beta + root) / h.lr + h.l2), 0.0)


def _rowwise_rmsprop_ar(rows: Rows, h: Hyper) -> Tensor:
    """Apply v = beta2 * v + (1 - beta2) * mean(g^2), then w = shrinkage * w - lr * g / (sqrt(v) + eps).

    ``v`` has a value per row. A row shrinks once for all steps since its previous update:
    ``shrinkage = clamp(1 - lr * ar_alpha * (step - prev_iter), min_shrinkage, 1)``. ``prev_iter`` is the step
    of the previous update, or 0 if there was none; then the row shrinks as for 1 step.
    """
    g, (v, prev_iter) = decayed_gradient(rows, h), rows.slots
    v.mul_(h.beta2).add_(_mean_of_squares(rows, h, g), alpha=1 - h.beta2)
    gap = torch.where(prev_iter == 0, 1.0, h.step - prev_iter)
    # State is fp32, which represents steps exactly up to 2^24.
    prev_iter.fill_(h.step)
    shrinkage = (1 - h.lr * h.ar_alpha * gap).clamp(h.min_shrinkage, 1)
    return shrinkage[:, None] * _decayed_weight(rows, h) - (h.lr / (v.sqrt() + h.eps))[:, None] * g


@unique
class OptimizerKind(Enum):
    """Fused optimizers. The values are the names in plan files and recipes."""

    # Plan files and recipes contain these values, so they must not change.
    NONE = "none"
    SGD = "sgd"
    ADAGRAD = "adagrad"
    ROW_WISE_ADAGRAD = "row_wise_adagrad"
    ADAM = "adam"
    PARTIAL_ROW_WISE_ADAM = "partial_row_wise_adam"
    LAMB = "lamb"
    PARTIAL_ROW_WISE_LAMB = "partial_row_wise_lamb"
    LARS = "lars"
    FTRL = "ftrl"
    ROW_WISE_RMSPROP_AR = "row_wise_rmsprop_ar"

    @property
    def code(self) -> int:
        """Number that stands for the optimizer in the kernels: the index of the formula in ``FORMULAS``.

        Raises:
            ValueError: the kind is NONE.
        """
        return formula_of(self).code

    @property
    def state_per_row(self) -> tuple[int, int]:
        """Optimizer state size per table row, in fp32 values: (values per column, values per row).

        Row-wise Adam needs (1, 1): a first moment per column, and a second moment per row.
        """
        # NONE has no formula, hence no state.
        slots = _BY_KIND[self].slots if self in _BY_KIND else ()
        num_per_row = sum(slot.per_row for slot in slots)
        return len(slots) - num_per_row, num_per_row

    @property
    def row_statistics(self) -> int:
        """Number of fp32 values per row that the ranks with column shards must sum before the update."""
        return len(_BY_KIND[self].row_sums) if self in _BY_KIND else 0


class Slot(NamedTuple):
    """Name, shape and initial value for an optimizer state tensor, which is fp32."""

    name: str
    """Name of the tensor in state dicts and checkpoints."""
    per_row: bool = False
    """Whether the shape is ``[num_rows]`` instead of ``[num_rows, dim]``."""
    initial: str | None = None
    """Name of the spec field with the initial value; None: start from 0."""


class Formula(NamedTuple):
    """Update formula for an optimizer, with the state and the whole-row sums that it needs."""

    kind: OptimizerKind
    name: str
    """Name of the spec in ``meshrec.optim``. The C++ constant has the same name with the prefix ``k``."""
    apply: Callable[[Rows, Hyper], Tensor]
    """Return the new weights, and modify the state slots in place."""
    slots: tuple[Slot, ...] = ()
    """Optimizer state; at most two slots, because the kernels pass two addresses."""
    row_sums: frozenset[RowSum] = frozenset()
    """The whole-row sums that the formula reads."""
    gradient: Callable[[Rows, Hyper], Tensor] = decayed_gradient
    """Return the gradient from which ``RowSum.GRADIENT`` is computed."""
    direction: Callable[[Rows, Hyper], Tensor] | None = None
    """Return the direction from which ``RowSum.DIRECTION`` is computed; modifies the slots like ``apply``."""

    @property
    def code(self) -> int:
        """Number that stands for the optimizer in the kernels: the index in ``FORMULAS``."""
        return FORMULAS.index(self)


# First and second moments in Adam and LAMB: all per element, or with a second moment per row.
_MOMENTS = (Slot("exp_avg"), Slot("exp_avg_sq"))
_ROW_MOMENTS = (Slot("exp_avg"), Slot("exp_avg_sq", per_row=True))

FORMULAS = (
    Formula(OptimizerKind.SGD, "SGD", _sgd),
    Formula(
        OptimizerKind.ADAGRAD,
        "Adagrad",
        _adagrad,
        slots=(Slot("sum", initial="initial_accumulator_value"),),
    ),
    Formula(
        OptimizerKind.ROW_WISE_ADAGRAD,
        "RowWiseAdagrad",
        _rowwise_adagrad,
        slots=(Slot("sum", per_row=True, initial="initial_accumulator_value"),),
        row_sums=frozenset({RowSum.GRADIENT}),
    ),
    # All per element, so column shards need no whole-row sums.
    Formula(OptimizerKind.ADAM, "Adam", _adam, slots=_MOMENTS),
    Formula(
        OptimizerKind.PARTIAL_ROW_WISE_ADAM,
        "PartialRowWiseAdam",
        _adam,
        slots=_ROW_MOMENTS,
        row_sums=frozenset({RowSum.GRADIENT}),
    ),
    Formula(
        OptimizerKind.LAMB,
        "LAMB",
        _lamb,
        slots=_MOMENTS,
        row_sums=frozenset({RowSum.WEIGHT, RowSum.DIRECTION}),
        direction=_lamb_direction,
    ),
    Formula(
        OptimizerKind.PARTIAL_ROW_WISE_LAMB,
        "PartialRowWiseLAMB",
        _lamb,
        slots=_ROW_MOMENTS,
        # The row-wise second moment adds the gradient sum to those that LAMB needs.
        row_sums=frozenset(RowSum),
        direction=_lamb_direction,
    ),
    Formula(
        OptimizerKind.LARS,
        "LARS",
        _lars,
        slots=(Slot("momentum_buffer"),),
        row_sums=frozenset({RowSum.GRADIENT, RowSum.WEIGHT}),
        gradient=_plain_gradient,
    ),
    Formula(
        OptimizerKind.FTRL,
        "FTRL",
        _ftrl,
        slots=(Slot("sum", initial="initial_accumulator_value"), Slot("linear")),
    ),
    Formula(
        OptimizerKind.ROW_WISE_RMSPROP_AR,
        "RowWiseRMSpropAR",
        _rowwise_rmsprop_ar,
        slots=(Slot("sum", per_row=True), Slot("prev_iter", per_row=True)),
        row_sums=frozenset({RowSum.GRADIENT}),
    ),
)
"""The formulas of all optimizers. The index of a formula is the optimizer code in the kernels."""

_BY_KIND = {formula.kind: formula for formula in FORMULAS}


def formula_of(optimizer: int | OptimizerKind) -> Formula:
    """Return the formula of an optimizer, given as a code or as an ``OptimizerKind``.

    Raises:
        ValueError: unknown code or kind.
    """
    # A kind without a formula, such as NONE, falls through to the error.
    if isinstance(optimizer, OptimizerKind) and optimizer in _BY_KIND:
        return _BY_KIND[optimizer]
    if isinstance(optimizer, int) and 0 <= optimizer < len(FORMULAS):
        return FORMULAS[optimizer]
    raise ValueError(f"optimizer {optimizer} is unknown; codes 0 to {len(FORMULAS) - 1} exist.")


def needs_gradient_only(optimizer: int, hyper: Hyper) -> bool:
    """Return whether the squared gradient is the only whole-row sum that the update needs.

    Column shards then exchange a single value per row, and need not look up the weights for it.
    """
    formula = formula_of(optimizer)
    # L2 decay adds a multiple of the weight to the gradient, so the squared gradient then depends on the
    # weight.
    reads_weight = formula.gradient is decayed_gradient and hyper.decay_mode == L2_DECAY
    return formula.row_sums == {RowSum.GRADIENT} and not reads_weight


def as_cpp() -> str:
    """Return the content of ``formulas.inc``: C++ macros for the ``Hyper`` fields and for the optimizers."""
    lines = ["// Written by setup.py from ops/tbe/formulas.py: change that.", "#ifdef HYPER"]
    lines += [f"HYPER({_CPP_TYPES.get(name, 'float')}, {name})" for name in Hyper._fields]
    lines += ["#endif", "#ifdef FORMULA"]
    for formula in FORMULAS:
        per_row = [str(slot.per_row).lower() for slot in formula.slots]
        # The macro always takes two slot flags, so pad with "false".
        arguments = [formula.name, str(len(per_row)), *per_row, "false", "false"][:4]
        lines.append(f"FORMULA({', '.join(arguments)})")
    return "\n".join([*lines, "#endif", ""])
