"""Fused optimizers: update formulas in plain torch, optimizer state, and whole-row statistics.

Everything else derives from ``FORMULAS``: the state of the specs (``optim/optimizers.py``), the exchange of
row statistics (``distributed/row_stats.py``), the planner's memory estimate, Triton's constants, and
``formulas.inc`` for the C++ kernels, which setup.py generates. A new optimizer needs an ``OptimizerKind`` and
an entry here, a spec, a ``step_row`` in ``csrc/tbe/formulas.inl``, and a function in
``triton_update_kernels.py``; kernels without it fail to compile. This file imports only torch, because
setup.py runs it standalone.

All formulas compute in fp32 on touched rows. ``g`` is a row's summed gradient, ``w`` the row. With L2 decay,
``g += weight_decay * w`` comes first. With decoupled decay, ``w *= 1 - lr * weight_decay`` precedes the
gradient step without affecting it: norms use the row before decay. LAMB and LARS apply decay differently, see
their docstrings.

Norms and means are over the whole row. If a table is sharded by columns, a rank has only part of a row, and
``stats_U3`` supplies the sums over all shards, in ``RowSum`` order.
"""

from collections.abc import Callable
from enum import Enum, IntEnum, unique
from typing import NamedTuple

import torch
from torch import Tensor

# Shape legend: U touched rows, D width.

NO_DECAY, L2_DECAY, DECOUPLED_DECAY = range(3)
"""Codes for the weight decay mode, as in the kernels."""


class Hyper(NamedTuple):
    """Optimizer parameters for one update. Formulas read the relevant fields by name.

    Kernels receive a float64 tensor in this order, and also know the names (``formulas.inc``,
    ``triton_update_kernels.py``). A formula with an additional parameter adds a field here.
    """

    lr: float
    decay_mode: int = NO_DECAY
    step: int = 1
    """Update number, counted from 1."""
    seed: int = 0
    """Seed for stochastic rounding; 0 rounds to nearest."""
    row_dim: int = 0
    """Whole-row width in a column-sharded table; 0: the shard's width."""
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
        """Read the float64 tensor ``[HYPER_SIZE]`` returned by ``as_tensor``."""
        if hyper.dtype != torch.float64 or hyper.shape != (HYPER_SIZE,):
            raise ValueError(
                f"hyper must be a float64 CPU tensor with {HYPER_SIZE} entries, got {hyper.dtype} "
                f"{list(hyper.shape)}. A spec's hyper() makes one."
            )
        hyper_values = cls._make(hyper.tolist())
        return hyper_values._replace(**{name: int(getattr(hyper_values, name)) for name in _CPP_TYPES})

    def as_tensor(self) -> Tensor:
        """Return the float64 tensor ``[HYPER_SIZE]`` for the kernels."""
        return torch.tensor(self, dtype=torch.float64)


HYPER_SIZE = len(Hyper._fields)
"""``hyper`` tensor length."""
# C++ types for non-float parameters.
# A float32 step would be inexact above 2^24, and a seed needs all bits.
_CPP_TYPES = {"decay_mode": "int", "step": "uint64_t", "seed": "uint64_t", "row_dim": "double"}


class RowSum(IntEnum):
    """Sums of squares over a whole row, used as column numbers of ``stats_U3``."""

    GRADIENT = 0
    """Sum of squares of ``Formula.gradient``."""
    WEIGHT = 1
    """Sum of squares of the stored row."""
    DIRECTION = 2
    """Sum of squares of ``Formula.direction``."""


class Rows(NamedTuple):
    """Touched rows in one table: input to a formula, which returns new weights and modifies ``slots``."""

    weight: Tensor
    """fp32 [U, D]"""
    gradient: Tensor
    """fp32 [U, D]"""
    slots: list[Tensor]
    """Optimizer state, fp32, [U, D] or [U] per slot."""
    stats: Tensor | None
    """Whole-row sums, fp32 [U, 3]; None: compute them from these rows."""

    def sum_of_squares(self, which: RowSum, x_UD: Tensor) -> Tensor:
        """Return the sum of squares per row in ``x_UD``, fp32 [U]: from ``stats`` if given.

        Args:
            which: ``stats`` column with the sum of squares for ``x_UD``.
            x_UD: fp32 [U, D].
        """
        return x_UD.square().sum(1) if self.stats is None else self.stats[:, which]


def decayed_gradient(rows: Rows, h: Hyper) -> Tensor:
    """Return the gradient ``g``, plus ``weight_decay * w`` with L2 decay."""
    if h.decay_mode == L2_DECAY:
        return rows.gradient + h.weight_decay * rows.weight
    return rows.gradient


def _plain_gradient(rows: Rows, h: Hyper) -> Tensor:
    """Return the gradient without the L2 term, for LARS, which adds the decay after the norms."""
    return rows.gradient


def _mean_of_squares(rows: Rows, h: Hyper, g_UD: Tensor) -> Tensor:
    """Return the mean squared gradient per whole row, fp32 [U]."""
    return rows.sum_of_squares(RowSum.GRADIENT, g_UD) / (h.row_dim or g_UD.shape[1])


def _decayed_weight(rows: Rows, h: Hyper) -> Tensor:
    """Return the weights, shrunk by ``lr * weight_decay`` with decoupled decay."""
    if h.decay_mode == DECOUPLED_DECAY:
        return rows.weight * (1 - h.lr * h.weight_decay)
    return rows.weight


def _sgd(rows: Rows, h: Hyper) -> Tensor:
    """Apply w -= lr * g."""
    return _decayed_weight(rows, h) - h.lr * decayed_gradient(rows, h)


def _adagrad(rows: Rows, h: Hyper) -> Tensor:
    """Apply s += g^2; w -= lr * g / (sqrt(s) + eps)."""
    g, (total,) = decayed_gradient(rows, h), rows.slots
    total += g.square()
    return _decayed_weight(rows, h) - h.lr * g / (total.sqrt() + h.eps)


def _rowwise_adagrad(rows: Rows, h: Hyper) -> Tensor:
    """Apply s += mean(g^2), one value per row; w -= lr * g / (sqrt(s) + eps)."""
    g, (total,) = decayed_gradient(rows, h), rows.slots
    total += _mean_of_squares(rows, h, g)
    return _decayed_weight(rows, h) - (h.lr / (total.sqrt() + h.eps))[:, None] * g


def _moments_step(rows: Rows, h: Hyper) -> Tensor:
    """Return Adam's step before lr: m = b1*m + (1-b1)*g; v likewise with g^2; m^ / (sqrt(v^) + eps).

    With a row-wise v, use mean(g^2).
    """
    g, (m, v) = decayed_gradient(rows, h), rows.slots
    square = g.square() if v.dim() == 2 else _mean_of_squares(rows, h, g)
    m.mul_(h.beta1).add_(g, alpha=1 - h.beta1)
    v.mul_(h.beta2).add_(square, alpha=1 - h.beta2)
    scale = (v / (1 - h.beta2**h.step)).sqrt() + h.eps
    return m / (1 - h.beta1**h.step) / (scale if v.dim() == 2 else scale[:, None])


def _adam(rows: Rows, h: Hyper) -> Tensor:
    """Apply w -= lr * m^ / (sqrt(v^) + eps), with v per element or per row."""
    return _decayed_weight(rows, h) - h.lr * _moments_step(rows, h)


def _lamb_direction(rows: Rows, h: Hyper) -> Tensor:
    """Return LAMB's direction r: Adam's step, plus weight_decay * w with decoupled decay."""
    r = _moments_step(rows, h)
    return r + h.weight_decay * rows.weight if h.decay_mode == DECOUPLED_DECAY else r


def _lamb(rows: Rows, h: Hyper) -> Tensor:
    """Apply w -= lr * |w|/|r| * r; the ratio is 1 if either norm is 0."""
    r = _lamb_direction(rows, h)
    weight_norm = rows.sum_of_squares(RowSum.WEIGHT, rows.weight).sqrt()
    step_norm = rows.sum_of_squares(RowSum.DIRECTION, r).sqrt()
    either_zero = (weight_norm == 0) | (step_norm == 0)
    ratio = torch.where(either_zero, torch.ones_like(step_norm), weight_norm / step_norm)
    return rows.weight - h.lr * ratio[:, None] * r


def _lars(rows: Rows, h: Hyper) -> Tensor:
    """Apply m = momentum * m + local_lr * (g + decay * w); w -= m.

    local_lr = lr * trust_coefficient * |w| / (|g| + decay * |w| + eps), or lr if either norm is 0. decay is
    the L2 weight decay, else 0.
    """
    g, (m,) = rows.gradient, rows.slots
    decay = h.weight_decay if h.decay_mode == L2_DECAY else 0.0
    weight_norm = rows.sum_of_squares(RowSum.WEIGHT, rows.weight).sqrt()
    grad_norm = rows.sum_of_squares(RowSum.GRADIENT, g).sqrt()
    either_zero = (weight_norm == 0) | (grad_norm == 0)
    local = h.trust_coefficient * weight_norm / (grad_norm + decay * weight_norm + h.eps)
    local_lr = h.lr * torch.where(either_zero, torch.ones_like(local), local)
    m.mul_(h.momentum).add_(local_lr[:, None] * (g + decay * rows.weight))
    return _decayed_weight(rows, h) - m


# Much smaller than any root of an accumulated square, so it changes no other quotient.
_TINY = 1e-37


def _ftrl(rows: Rows, h: Hyper) -> Tensor:
    """Apply z += g - (sqrt(n + g^2) - sqrt(n)) / lr * w; n += g^2; w = -sign(z) * max(|z| - l1, 0) / scale.

    scale = (beta + sqrt(n)) / lr + l2. The root difference is computed as g^2 / (sum of roots), which avoids
    cancellation for small g. _TINY makes it 0 if both roots are 0.
    """
    g, (n, z) = decayed_gradient(rows, h), rows.slots
    before = n.sqrt()
    n += g.square()
    root = n.sqrt()
    z += g - g.square() / (root + before + _TINY) / h.lr * rows.weight
    over = (z.abs() - h.l1).clamp(min=0)
    return torch.where(over > 0, -z.sign() * over / ((h.beta + root) / h.lr + h.l2), 0.0)


def _rowwise_rmsprop_ar(rows: Rows, h: Hyper) -> Tensor:
    """Apply v = b2*v + (1-b2)*mean(g^2), one value per row; w = shrinkage * w - lr * g / (sqrt(v) + eps).

    shrinkage = clamp(1 - lr * ar_alpha * (step - prev_iter), min_shrinkage, 1), and prev_iter = step. The
    first row update, whose prev_iter is 0, counts as 1 step.
    """
    g, (v, prev_iter) = decayed_gradient(rows, h), rows.slots
    v.mul_(h.beta2).add_(_mean_of_squares(rows, h, g), alpha=1 - h.beta2)
    gap = torch.where(prev_iter == 0, 1.0, h.step - prev_iter)
    prev_iter.fill_(h.step)
    shrinkage = (1 - h.lr * h.ar_alpha * gap).clamp(h.min_shrinkage, 1)
    return shrinkage[:, None] * _decayed_weight(rows, h) - (h.lr / (v.sqrt() + h.eps))[:, None] * g


@unique
class OptimizerKind(Enum):
    """Fused optimizers. The values are the names in plan files and recipes."""

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
        """Optimizer number in the kernels: the index in ``FORMULAS``.

        Raises:
            ValueError: the kind is NONE.
        """
        return formula_of(self).code

    @property
    def state_per_row(self) -> tuple[int, int]:
        """Optimizer state values (fp32) per table row: per column, and per row.

        Row-wise Adam needs (1, 1): a first moment per column, and a second moment per row.
        """
        slots = _BY_KIND[self].slots if self in _BY_KIND else ()
        num_per_row = sum(slot.per_row for slot in slots)
        return len(slots) - num_per_row, num_per_row

    @property
    def row_statistics(self) -> int:
        """fp32 value count per row for column shards to sum over ranks before the update."""
        return len(_BY_KIND[self].row_sums) if self in _BY_KIND else 0


class Slot(NamedTuple):
    """One optimizer state tensor for a table, fp32."""

    name: str
    per_row: bool = False
    """Whether the shape is ``[num_rows]`` instead of ``[num_rows, dim]``."""
    initial: str | None = None
    """Spec field name with the initial value; None: 0."""


class Formula(NamedTuple):
    """Optimizer update formula, with the required state and statistics."""

    kind: OptimizerKind
    name: str
    """Spec name in ``meshrec.optim`` and, prefixed with ``k``, C++ constant name."""
    apply: Callable[[Rows, Hyper], Tensor]
    """Returns the new weights, and modifies the state slots in place."""
    slots: tuple[Slot, ...] = ()
    """Optimizer state; at most two slots."""
    row_sums: frozenset[RowSum] = frozenset()
    """Whole-row sums read by the formula."""
    gradient: Callable[[Rows, Hyper], Tensor] = decayed_gradient
    """Returns the gradient whose squares ``RowSum.GRADIENT`` sums."""
    direction: Callable[[Rows, Hyper], Tensor] | None = None
    """Returns the direction whose squares ``RowSum.DIRECTION`` sums; modifies the slots like ``apply``."""

    @property
    def code(self) -> int:
        """Optimizer number in the kernels: the index in ``FORMULAS``."""
        return FORMULAS.index(self)


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
"""Formulas for all optimizers. The formula index is the optimizer code."""

_BY_KIND = {formula.kind: formula for formula in FORMULAS}


def formula_of(optimizer: int | OptimizerKind) -> Formula:
    """Return the optimizer formula, given its code or kind.

    Raises:
        ValueError: unknown code or kind.
    """
    if isinstance(optimizer, OptimizerKind) and optimizer in _BY_KIND:
        return _BY_KIND[optimizer]
    if isinstance(optimizer, int) and 0 <= optimizer < len(FORMULAS):
        return FORMULAS[optimizer]
    raise ValueError(f"optimizer {optimizer} is unknown; codes 0 to {len(FORMULAS) - 1} exist.")


def needs_gradient_only(optimizer: int, hyper: Hyper) -> bool:
    """Return whether the update needs no whole-row statistic except the squared gradient.

    Column shards can then exchange a single value per row, without looking up the weights.
    """
    formula = formula_of(optimizer)
    reads_weight = formula.gradient is decayed_gradient and hyper.decay_mode == L2_DECAY
    return formula.row_sums == {RowSum.GRADIENT} and not reads_weight


def as_cpp() -> str:
    """Return the ``formulas.inc`` content: ``Hyper`` fields and optimizers, in order, as C++ macros."""
    lines = ["// Written by setup.py from ops/tbe/formulas.py: change that.", "#ifdef HYPER"]
    lines += [f"HYPER({_CPP_TYPES.get(name, 'float')}, {name})" for name in Hyper._fields]
    lines += ["#endif", "#ifdef FORMULA"]
    for formula in FORMULAS:
        per_row = [str(slot.per_row).lower() for slot in formula.slots]
        arguments = [formula.name, str(len(per_row)), *per_row, "false", "false"][:4]
        lines.append(f"FORMULA({', '.join(arguments)})")
    return "\n".join([*lines, "#endif", ""])
