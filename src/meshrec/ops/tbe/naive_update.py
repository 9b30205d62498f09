"""The optimizer formulas in plain torch: what ``tbe_update`` does to the touched rows of one table.

Every formula works in fp32 on the touched rows only. ``g`` is the summed gradient of a row and ``w`` the row.
With L2 decay (mode 1) ``g += weight_decay * w`` comes first. With decoupled decay (mode 2)
``w *= 1 - lr * weight_decay`` comes before the gradient step and independent of it: norms of ``w`` are those
of the row as it was. LAMB and LARS have their own place for the decay, see there.

Norms and means are over the whole row. For a table that is split by columns ``stats_U3`` supplies
``[sum of g^2, sum of w^2, sum of r^2]`` of the whole row: ``g`` as the formula squares it (after the L2 term;
LARS: before it), ``w`` as stored, ``r`` the step of LAMB before the trust ratio.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

# U touched rows, D width

SGD, ADAGRAD, ROWWISE_ADAGRAD, ADAM, PARTIAL_ROWWISE_ADAM, LAMB, PARTIAL_ROWWISE_LAMB, LARS = range(8)
"""The codes of the optimizers."""

NO_DECAY, L2_DECAY, DECOUPLED_DECAY = range(3)
"""The codes of the decay modes."""

HYPER_SIZE = 12
"""The length of the ``hyper`` tensor: the fields of Hyper and one unused place."""


class Hyper(NamedTuple):
    """The numbers of one update, in the order of the ``hyper`` tensor."""

    lr: float
    eps: float
    weight_decay: float
    decay_mode: int
    beta1: float
    beta2: float
    momentum: float
    trust_coefficient: float
    step: int
    seed: int
    row_dim: int

    @classmethod
    def from_tensor(cls, hyper: Tensor) -> "Hyper":
        """Reads a float64 tensor of 12 numbers."""
        if hyper.dtype != torch.float64 or hyper.shape != (HYPER_SIZE,):
            raise ValueError(f"hyper must be a float64 CPU tensor with {HYPER_SIZE} entries.")
        lr, eps, weight_decay, mode, beta1, beta2, momentum, trust, *counts, _ = hyper.tolist()
        return cls(
            lr,
            eps,
            weight_decay,
            int(mode),
            beta1,
            beta2,
            momentum,
            trust,
            *map(int, counts),
        )


class Rows(NamedTuple):
    """The touched rows of one table; formulas give back a new ``weight`` and change the slots in place."""

    weight: Tensor
    """fp32 [U, D]"""
    gradient: Tensor
    """fp32 [U, D]"""
    slots: list[Tensor]
    """The optimizer's state, fp32, each [U, D] or [U]."""
    stats: Tensor | None
    """fp32 [U, 3] or None: computed from what is here."""


def _sum_of_squares(rows: Rows, column: int, x_UD: Tensor) -> Tensor:
    return x_UD.square().sum(1) if rows.stats is None else rows.stats[:, column]


def _mean_of_squares(rows: Rows, h: Hyper, g_UD: Tensor) -> Tensor:
    return _sum_of_squares(rows, 0, g_UD) / (h.row_dim or g_UD.shape[1])


def decayed_gradient(rows: Rows, h: Hyper) -> Tensor:
    """``g``, with the L2 term where there is one."""
    if h.decay_mode == L2_DECAY:
        return rows.gradient + h.weight_decay * rows.weight
    return rows.gradient


def _decayed(rows: Rows, h: Hyper) -> Tensor:
    if h.decay_mode == DECOUPLED_DECAY:
        return rows.weight * (1 - h.lr * h.weight_decay)
    return rows.weight


def _sgd(rows: Rows, h: Hyper) -> Tensor:
    """w -= lr * g."""
    return _decayed(rows, h) - h.lr * decayed_gradient(rows, h)


def _adagrad(rows: Rows, h: Hyper) -> Tensor:
    """s += g^2; w -= lr * g / (sqrt(s) + eps)."""
    g, (total,) = decayed_gradient(rows, h), rows.slots
    total += g.square()
    return _decayed(rows, h) - h.lr * g / (total.sqrt() + h.eps)


def _rowwise_adagrad(rows: Rows, h: Hyper) -> Tensor:
    """s += mean(g^2), one number per row; w -= lr * g / (sqrt(s) + eps)."""
    g, (total,) = decayed_gradient(rows, h), rows.slots
    total += _mean_of_squares(rows, h, g)
    return _decayed(rows, h) - (h.lr / (total.sqrt() + h.eps))[:, None] * g


def moments_step(rows: Rows, h: Hyper) -> Tensor:
    """Adam's step before the lr: m = b1*m + (1-b1)*g; v likewise of g^2; m^ / (sqrt(v^) + eps).

    Where v holds one number per row it takes mean(g^2).
    """
    g, (m, v) = decayed_gradient(rows, h), rows.slots
    square = g.square() if v.dim() == 2 else _mean_of_squares(rows, h, g)
    m.mul_(h.beta1).add_(g, alpha=1 - h.beta1)
    v.mul_(h.beta2).add_(square, alpha=1 - h.beta2)
    scale = (v / (1 - h.beta2**h.step)).sqrt() + h.eps
    return m / (1 - h.beta1**h.step) / (scale if v.dim() == 2 else scale[:, None])


def _adam(rows: Rows, h: Hyper) -> Tensor:
    """w -= lr * m^ / (sqrt(v^) + eps), with v per element or per row."""
    return _decayed(rows, h) - h.lr * moments_step(rows, h)


def _lamb(rows: Rows, h: Hyper) -> Tensor:
    """r = Adam's step (+ weight_decay * w if decoupled); w -= lr * |w|/|r| * r; ratio 1 if a norm is 0."""
    r = moments_step(rows, h)
    if h.decay_mode == DECOUPLED_DECAY:
        r = r + h.weight_decay * rows.weight
    weight_norm = _sum_of_squares(rows, 1, rows.weight).sqrt()
    step_norm = _sum_of_squares(rows, 2, r).sqrt()
    either_zero = (weight_norm == 0) | (step_norm == 0)
    ratio = torch.where(either_zero, torch.ones_like(step_norm), weight_norm / step_norm)
    return rows.weight - h.lr * ratio[:, None] * r


def _lars(rows: Rows, h: Hyper) -> Tensor:
    """m = momentum * m + local_lr * (g + decay * w); w -= m.

    local_lr = lr * trust_coefficient * |w| / (|g| + decay * |w| + eps), and lr where a norm is 0; decay is
    the weight decay if it is L2, else 0.
    """
    g, (m,) = rows.gradient, rows.slots
    decay = h.weight_decay if h.decay_mode == L2_DECAY else 0.0
    weight_norm = _sum_of_squares(rows, 1, rows.weight).sqrt()
    grad_norm = _sum_of_squares(rows, 0, g).sqrt()
    either_zero = (weight_norm == 0) | (grad_norm == 0)
    local = h.trust_coefficient * weight_norm / (grad_norm + decay * weight_norm + h.eps)
    local_lr = h.lr * torch.where(either_zero, torch.ones_like(local), local)
    m.mul_(h.momentum).add_(local_lr[:, None] * (g + decay * rows.weight))
    return _decayed(rows, h) - m


_FORMULAS: dict[int, tuple[int, Callable[[Rows, Hyper], Tensor]]] = {
    SGD: (0, _sgd),
    ADAGRAD: (1, _adagrad),
    ROWWISE_ADAGRAD: (1, _rowwise_adagrad),
    ADAM: (2, _adam),
    PARTIAL_ROWWISE_ADAM: (2, _adam),
    LAMB: (2, _lamb),
    PARTIAL_ROWWISE_LAMB: (2, _lamb),
    LARS: (1, _lars),
}


def num_slots(optimizer: int) -> int:
    """How many state tensors per table the optimizer keeps."""
    if optimizer not in _FORMULAS:
        raise ValueError(f"optimizer {optimizer} is unknown; codes 0 to {len(_FORMULAS) - 1} exist.")
    return _FORMULAS[optimizer][0]


def update_rows(
    weight: Tensor,
    state: list[Tensor],
    rows_U: Tensor,
    gradient_UD: Tensor,
    stats_U3: Tensor | None,
    optimizer: int,
    h: Hyper,
    origin: Sequence[int] = (0, 0),
) -> None:
    """Applies one optimizer step to the distinct rows ``rows_U`` of one table, in place.

    ``origin``: the row and the column of the whole table where ``weight`` begins.
    """
    _, formula = _FORMULAS[optimizer]
    slots = [slot[rows_U] for slot in state]
    updated = formula(Rows(weight[rows_U].float(), gradient_UD, slots, stats_U3), h)
    weight[rows_U] = _rounded(updated, weight.dtype, rows_U, h, origin)
    for slot, values in zip(state, slots, strict=True):
        slot[rows_U] = values


def _rounded(x_UD: Tensor, dtype: torch.dtype, rows_U: Tensor, h: Hyper, origin: Sequence[int]) -> Tensor:
    if dtype == torch.float32 or h.seed == 0:
        return x_UD.to(dtype)
    first_row, first_column = origin
    columns_D = torch.arange(first_column, first_column + x_UD.shape[1], device=x_UD.device)
    return stochastic_round(x_UD, dtype, random_bits(rows_U + first_row, columns_D, h.seed, h.step))


def _signed(x: int) -> int:
    """The int64 with the bits of an unsigned 64-bit number."""
    x %= 1 << 64
    return x - (1 << 64) if x >= 1 << 63 else x


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def random_bits(rows_U: Tensor, columns_D: Tensor, seed: int, step: int) -> Tensor:
    """int64 [U, D]: 16 random bits for every element, from a counter: the order of updates does not matter.

    ``x = row * 0x9E3779B97F4A7C15 + column * 0xC2B2AE3D27D4EB4F + seed * 0x165667B19E3779F9 + step *
    0x27D4EB2F165667C5`` modulo 2^64 goes through the finalizer of splitmix64 (Steele, Lea, Flood: "Fast
    splittable pseudorandom number generators", 2014), and the low 16 bits remain.
    """
    start = _signed(seed * 0x165667B19E3779F9 + step * 0x27D4EB2F165667C5)
    x = rows_U.long()[:, None] * _signed(0x9E3779B97F4A7C15) + columns_D * _signed(0xC2B2AE3D27D4EB4F) + start
    x = (x ^ _shifted(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shifted(x, 27)) * _signed(0x94D049BB133111EB)
    return (x ^ _shifted(x, 31)) & 0xFFFF


def stochastic_round(x: Tensor, dtype: torch.dtype, bits: Tensor) -> Tensor:
    """Rounds fp32 up or down, with a chance proportional to the nearness, so that the mean is right.

    bf16: adds the 16 random bits below the precision, then cuts them off. fp16: likewise with their low 13
    bits in the range of normal numbers (2^-14 to 65504). Everything else (fp16 subnormals and overflow, inf,
    nan) is rounded to nearest.
    """
    raw = x.view(torch.int32).long() & 0xFFFFFFFF
    if dtype == torch.bfloat16:
        dropped, in_range = 16, x.isfinite()
    else:
        assert dtype == torch.float16, dtype
        dropped, in_range = 13, (x.abs() >= 2.0**-14) & (x.abs() <= 65504.0)
    mask = (1 << dropped) - 1
    raw = (raw + (bits & mask)) & ~mask
    # Sign-extended by hand: int64 to int32 keeps the low 32 bits only for numbers that int32 can hold.
    cut = torch.where(raw >= 1 << 31, raw - (1 << 32), raw).to(torch.int32).view(torch.float32)
    return torch.where(in_range, cut, x).to(dtype)
