"""Triton kernel that updates table rows by the formulas in ``formulas.py``; ``triton.py`` launches it.

``triton_kernels.py`` defines entries and runs, and sums the gradients of a run. In the functions below, ``w``
are the rows, ``g`` the gradients, and both are fp32 [RUNS, BLOCK]. A function that takes pointers to state
also updates the state.
"""

# ruff: noqa: SIM300 - compile-time constants are in capitals
# mypy: disable-error-code="no-untyped-def, misc, untyped-decorator, no-untyped-call, operator, assignment"

import triton
import triton.language as tl

from meshrec.ops.tbe import formulas
from meshrec.ops.tbe.formulas import Hyper, OptimizerKind, RowSum
from meshrec.ops.tbe.triton_kernels import load_run_sums, run_starts

# Triton kernels may only read global constants with the type tl.constexpr.
_L2: tl.constexpr = tl.constexpr(formulas.L2_DECAY)
_DECOUPLED: tl.constexpr = tl.constexpr(formulas.DECOUPLED_DECAY)
_SGD: tl.constexpr = tl.constexpr(OptimizerKind.SGD.code)
_ADAGRAD: tl.constexpr = tl.constexpr(OptimizerKind.ADAGRAD.code)
_ROWWISE_ADAGRAD: tl.constexpr = tl.constexpr(OptimizerKind.ROW_WISE_ADAGRAD.code)
_ADAM: tl.constexpr = tl.constexpr(OptimizerKind.ADAM.code)
_PARTIAL_ROWWISE_ADAM: tl.constexpr = tl.constexpr(OptimizerKind.PARTIAL_ROW_WISE_ADAM.code)
_LAMB: tl.constexpr = tl.constexpr(OptimizerKind.LAMB.code)
_PARTIAL_ROWWISE_LAMB: tl.constexpr = tl.constexpr(OptimizerKind.PARTIAL_ROW_WISE_LAMB.code)
_LARS: tl.constexpr = tl.constexpr(OptimizerKind.LARS.code)
_FTRL: tl.constexpr = tl.constexpr(OptimizerKind.FTRL.code)
_ROWWISE_RMSPROP_AR: tl.constexpr = tl.constexpr(OptimizerKind.ROW_WISE_RMSPROP_AR.code)
_GRADIENT_SUM: tl.constexpr = tl.constexpr(int(RowSum.GRADIENT))
_WEIGHT_SUM: tl.constexpr = tl.constexpr(int(RowSum.WEIGHT))
_DIRECTION_SUM: tl.constexpr = tl.constexpr(int(RowSum.DIRECTION))


def _index_of(name):
    """Return the index of a ``Hyper`` field as a compile-time constant."""
    return tl.constexpr(Hyper._fields.index(name))


# Parameter indices in ``hyper``.
_LR: tl.constexpr = _index_of("lr")
_STEP: tl.constexpr = _index_of("step")
_SEED: tl.constexpr = _index_of("seed")
_ROW_DIM: tl.constexpr = _index_of("row_dim")
_WEIGHT_DECAY: tl.constexpr = _index_of("weight_decay")
_EPS: tl.constexpr = _index_of("eps")
_BETA1: tl.constexpr = _index_of("beta1")
_BETA2: tl.constexpr = _index_of("beta2")
_MOMENTUM: tl.constexpr = _index_of("momentum")
_TRUST: tl.constexpr = _index_of("trust_coefficient")
_BETA: tl.constexpr = _index_of("beta")
_L1: tl.constexpr = _index_of("l1")
_L2_PROXIMAL: tl.constexpr = _index_of("l2")
_AR_ALPHA: tl.constexpr = _index_of("ar_alpha")
_MIN_SHRINKAGE: tl.constexpr = _index_of("min_shrinkage")
# Adam's bias corrections follow the fields: computed on the host in float64.
_CORRECTION1: tl.constexpr = tl.constexpr(formulas.HYPER_SIZE)
_CORRECTION2: tl.constexpr = tl.constexpr(formulas.HYPER_SIZE + 1)


@triton.jit
def _random_bits(seed, step, row, columns):
    """Return 16 random bits per element, int32: the Triton version of ``naive_update.random_bits``."""
    # The factors in `random_bits`, written as signed integers. Products wrap like those of uint64.
    x = (row * -7046029254386353131)[:, None] + (columns * -4417276706812531889)
    x += seed * 1609587929392839161 + step * 2870177450012600261
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    return ((x ^ ((x >> 31) & 0x1FFFFFFFF)) & 0xFFFF).to(tl.int32)


@triton.jit
def _rounded(x, bits, STOCHASTIC: tl.constexpr, WEIGHT: tl.constexpr):
    """Convert rows to the weight dtype: to nearest, or as ``naive_update.stochastic_round`` if STOCHASTIC."""
    raw = x.to(tl.int32, bitcast=True)
    if WEIGHT == tl.bfloat16:
        if not STOCHASTIC:
            # To nearest, ties to even.
            bits = 0x7FFF + ((raw >> 16) & 1)
        raw = (raw + bits) & -65536
        inside = (tl.abs(x) < float("inf")) & (x == x)
    else:
        raw = (raw + (bits & 0x1FFF)) & -8192
        # Normal fp16 numbers. Others are converted to nearest by the hardware.
        inside = (tl.abs(x) >= 0.00006103515625) & (tl.abs(x) <= 65504.0) & STOCHASTIC
    return tl.where(inside, raw.to(tl.float32, bitcast=True), x).to(WEIGHT)


@triton.jit
def _load_hyper(hyper, index: tl.constexpr):
    """Load one optimizer parameter as fp32."""
    return tl.load(hyper + index).to(tl.float32)


@triton.jit
def _decoupled_decay(w, hyper, DECAY: tl.constexpr):
    """Return the rows, multiplied by ``1 - lr * weight_decay`` if the decay mode is decoupled."""
    if DECAY == _DECOUPLED:
        w = w * (1 - _load_hyper(hyper, _LR) * _load_hyper(hyper, _WEIGHT_DECAY))
    return w


@triton.jit
def _sum_of_squares(x, stats, first, column: tl.constexpr, STATS: tl.constexpr):
    """Return the sum of squares for every row.

    Without STATS, the rows ``x`` are whole, and the sum is computed from them. With STATS, ``x`` belongs to a
    column shard, which has only a part of every row. The sum over the whole row was computed before the
    update, and is read from ``stats``.
    """
    total = tl.sum(x * x, 1)
    if STATS:
        total = tl.load(stats + column, first, 0.0)
    return total


@triton.jit
def _mean_square(g, stats, first, hyper, width, STATS: tl.constexpr):
    """Return the mean squared gradient for each whole row."""
    whole = _load_hyper(hyper, _ROW_DIM)
    # 0: the weight has whole rows.
    whole = tl.where(whole == 0, width.to(tl.float32), whole)
    return _sum_of_squares(g, stats, first, _GRADIENT_SUM, STATS) / tl.where(first, whole, 1.0)


@triton.jit
def _sgd(w, g, hyper, DECAY: tl.constexpr):
    """Return the rows after an SGD step; see ``formulas._sgd``."""
    return _decoupled_decay(w, hyper, DECAY) - _load_hyper(hyper, _LR) * g


@triton.jit
def _adagrad(w, g, total_at, inside, hyper, DECAY: tl.constexpr):
    """Return the rows after an Adagrad step; see ``formulas._adagrad``."""
    total = tl.load(total_at, inside, 0.0) + g * g
    tl.store(total_at, total, inside)
    return _decoupled_decay(w, hyper, DECAY) - _load_hyper(hyper, _LR) * g / (
        tl.sqrt(total) + _load_hyper(hyper, _EPS)
    )


@triton.jit
def _rowwise_adagrad(w, g, total_at, first, stats, hyper, width, DECAY: tl.constexpr, STATS: tl.constexpr):
    """Return the rows after a row-wise Adagrad step; see ``formulas._rowwise_adagrad``."""
    total = tl.load(total_at, first, 0.0) + _mean_square(g, stats, first, hyper, width, STATS)
    tl.store(total_at, total, first)
    scale = _load_hyper(hyper, _LR) / (tl.sqrt(total) + _load_hyper(hyper, _EPS))
    return _decoupled_decay(w, hyper, DECAY) - scale[:, None] * g


@triton.jit
def _direction(
    g, m_at, v_at, inside, first, stats, hyper, width, ROW_STATE: tl.constexpr, STATS: tl.constexpr
):
    """Return Adam's update direction, and update both moments in place; see ``formulas._moments_step``.

    ``m_at`` and ``v_at`` point to the moments. With ROW_STATE, ``v`` has a value per row, otherwise a value
    per element.
    """
    beta1, beta2 = _load_hyper(hyper, _BETA1), _load_hyper(hyper, _BETA2)
    m = beta1 * tl.load(m_at, inside, 0.0) + (1 - beta1) * g
    tl.store(m_at, m, inside)
    if ROW_STATE:
        square = _mean_square(g, stats, first, hyper, width, STATS)
        v = beta2 * tl.load(v_at, first, 0.0) + (1 - beta2) * square
        tl.store(v_at, v, first)
        scale = (tl.sqrt(v / _load_hyper(hyper, _CORRECTION2)) + _load_hyper(hyper, _EPS))[:, None]
    else:
        v = beta2 * tl.load(v_at, inside, 0.0) + (1 - beta2) * g * g
        tl.store(v_at, v, inside)
        scale = tl.sqrt(v / _load_hyper(hyper, _CORRECTION2)) + _load_hyper(hyper, _EPS)
    return m / _load_hyper(hyper, _CORRECTION1) / scale


@triton.jit
def _lamb(w, r, inside, first, stats, hyper, DECAY: tl.constexpr, STATS: tl.constexpr):
    """Return the rows after a LAMB step in Adam's direction ``r``; see ``formulas._lamb``."""
    if DECAY == _DECOUPLED:
        r += _load_hyper(hyper, _WEIGHT_DECAY) * w
    w_square = _sum_of_squares(w, stats, first, _WEIGHT_SUM, STATS)
    r_square = _sum_of_squares(tl.where(inside, r, 0.0), stats, first, _DIRECTION_SUM, STATS)
    both = (w_square > 0) & (r_square > 0)
    ratio = tl.where(both, tl.sqrt(w_square) / tl.sqrt(tl.where(both, r_square, 1.0)), 1.0)
    return w - (_load_hyper(hyper, _LR) * ratio)[:, None] * r


@triton.jit
def _lars(w, g, m_at, inside, first, stats, hyper, DECAY: tl.constexpr, STATS: tl.constexpr):
    """Return the rows after a LARS step; see ``formulas._lars``."""
    decay = 0.0
    if DECAY == _L2:
        decay = _load_hyper(hyper, _WEIGHT_DECAY)
    w_norm = tl.sqrt(_sum_of_squares(w, stats, first, _WEIGHT_SUM, STATS))
    g_norm = tl.sqrt(_sum_of_squares(g, stats, first, _GRADIENT_SUM, STATS))
    both = (w_norm > 0) & (g_norm > 0)
    # Rows without a norm get the divisor 1, and their quotient is not used.
    scale = tl.where(both, g_norm + decay * w_norm + _load_hyper(hyper, _EPS), 1.0)
    local = tl.where(both, _load_hyper(hyper, _TRUST) * w_norm / scale, 1.0)
    m = _load_hyper(hyper, _MOMENTUM) * tl.load(m_at, inside, 0.0)
    m += (_load_hyper(hyper, _LR) * local)[:, None] * (g + decay * w)
    tl.store(m_at, m, inside)
    return _decoupled_decay(w, hyper, DECAY) - m


@triton.jit
def _ftrl(w, g, n_at, z_at, inside, hyper):
    """Return the rows after an FTRL step; see ``formulas._ftrl``."""
    lr, n = _load_hyper(hyper, _LR), tl.load(n_at, inside, 0.0)
    root = tl.sqrt(n + g * g)
    tl.store(n_at, n + g * g, inside)
    z = tl.load(z_at, inside, 0.0) + g - g * g / (root + tl.sqrt(n) + 1e-37) / lr * w
    tl.store(z_at, z, inside)
    over = tl.abs(z) - _load_hyper(hyper, _L1)
    # Below the threshold, root and beta may both be 0. Avoid the division.
    scale = tl.where(
        over > 0, (_load_hyper(hyper, _BETA) + root) / lr + _load_hyper(hyper, _L2_PROXIMAL), 1.0
    )
    return tl.where(over > 0, tl.where(z > 0, -over, over) / scale, 0.0)


@triton.jit
def _rowwise_rmsprop_ar(
    w, g, v_at, iter_at, first, stats, hyper, width, DECAY: tl.constexpr, STATS: tl.constexpr
):
    """Return the rows after a row-wise RMSprop step with shrinkage; see ``formulas._rowwise_rmsprop_ar``."""
    lr, beta2, step = _load_hyper(hyper, _LR), _load_hyper(hyper, _BETA2), _load_hyper(hyper, _STEP)
    v = beta2 * tl.load(v_at, first, 0.0)
    v += (1 - beta2) * _mean_square(g, stats, first, hyper, width, STATS)
    tl.store(v_at, v, first)
    prev_iter = tl.load(iter_at, first, 0.0)
    tl.store(iter_at, tl.zeros_like(v) + step, first)
    shrinkage = 1 - lr * _load_hyper(hyper, _AR_ALPHA) * tl.where(prev_iter == 0, 1.0, step - prev_iter)
    shrinkage = tl.minimum(tl.maximum(shrinkage, _load_hyper(hyper, _MIN_SHRINKAGE)), 1.0)
    scale = lr / (tl.sqrt(v) + _load_hyper(hyper, _EPS))
    return shrinkage[:, None] * _decoupled_decay(w, hyper, DECAY) - scale[:, None] * g


@triton.jit
def _pointers(fields, first, TYPE: tl.constexpr, ALIGN: tl.constexpr):
    """Load the address in a table field (the weight or a state slot) for every run, as a typed pointer."""
    return tl.multiple_of(tl.load(fields, first, 0).to(tl.pointer_type(TYPE)), [4 * ALIGN])


@triton.jit
def update_runs(
    grad,
    rows,
    order,
    starts,
    factors,
    tables_of,
    tables,
    parts,
    row_stats,
    num_entries,
    end_of_rows,
    hyper,
    OPTIMIZER: tl.constexpr,
    DECAY: tl.constexpr,
    STATS: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    WEIGHT: tl.constexpr,
    ALIGN: tl.constexpr,
    RUNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sum the gradients of the runs that start in this program, and update their rows and optimizer state.

    An entry is an ID read by a feature. A run is a sequence of sorted entries with the same row.

    Args:
        rows: row per entry, ascending.
        row_stats: sums of squares over whole rows, by entry number, fp32 [E, 3]; read if STATS.
    """
    at, row, first = run_starts(rows, num_entries, end_of_rows, RUNS)
    if tl.max(first.to(tl.int32), 0) == 0:
        return
    # All entries in a run read the same table, so the first entry tells the table.
    entry = tl.load(order + at, first, 0)
    fields = tables + tl.load(tables_of + entry, first, 0) * 7
    width = tl.multiple_of(tl.load(fields + 3, first, 0), [ALIGN])
    # The row within the weight; rows are numbered across all tables.
    local = row - tl.load(fields + 4, first, 0)
    columns = tl.arange(0, BLOCK)
    inside = first[:, None] & (columns[None, :] < width[:, None])
    element = (local * width)[:, None] + columns[None, :]
    # Tables are separate tensors, so every run has a base address.
    target = _pointers(fields, first, WEIGHT, ALIGN)[:, None] + element
    w = tl.load(target, inside, 0.0).to(tl.float32)  # load early, to overlap with the gradient sum
    g = load_run_sums(
        grad, rows, order, starts, factors, parts, at, row, first, num_entries, width, ALIGN, RUNS, BLOCK
    )
    slot0, slot1 = (
        _pointers(fields + 1, first, tl.float32, ALIGN),
        _pointers(fields + 2, first, tl.float32, ALIGN),
    )
    # Optimizer state has a value per element (at0, at1) or per row (row0, row1). Only the addresses for
    # existing slots are read.
    at0, at1, row0, row1 = slot0[:, None] + element, slot1[:, None] + element, slot0 + local, slot1 + local
    stats = row_stats
    if STATS:
        # By entry number. All entries in a run have the same statistics.
        stats = row_stats + entry * 3
    # LARS adds the decay after it computed the norms.
    if (DECAY == _L2) & (OPTIMIZER != _LARS):
        g += _load_hyper(hyper, _WEIGHT_DECAY) * w

    # Compile-time branches: a compiled kernel contains a single formula.
    if OPTIMIZER == _SGD:
        w = _sgd(w, g, hyper, DECAY)
    elif OPTIMIZER == _ADAGRAD:
        w = _adagrad(w, g, at0, inside, hyper, DECAY)
    elif OPTIMIZER == _ROWWISE_ADAGRAD:
        w = _rowwise_adagrad(w, g, row0, first, stats, hyper, width, DECAY, STATS)
    elif OPTIMIZER == _ADAM:
        r = _direction(g, at0, at1, inside, first, stats, hyper, width, False, STATS)
        w = _decoupled_decay(w, hyper, DECAY) - _load_hyper(hyper, _LR) * r
    elif OPTIMIZER == _PARTIAL_ROWWISE_ADAM:
        r = _direction(g, at0, row1, inside, first, stats, hyper, width, True, STATS)
        w = _decoupled_decay(w, hyper, DECAY) - _load_hyper(hyper, _LR) * r
    elif OPTIMIZER == _LAMB:
        r = _direction(g, at0, at1, inside, first, stats, hyper, width, False, STATS)
        w = _lamb(w, r, inside, first, stats, hyper, DECAY, STATS)
    elif OPTIMIZER == _PARTIAL_ROWWISE_LAMB:
        r = _direction(g, at0, row1, inside, first, stats, hyper, width, True, STATS)
        w = _lamb(w, r, inside, first, stats, hyper, DECAY, STATS)
    elif OPTIMIZER == _LARS:
        w = _lars(w, g, at0, inside, first, stats, hyper, DECAY, STATS)
    elif OPTIMIZER == _FTRL:
        w = _ftrl(w, g, at0, at1, inside, hyper)
    elif OPTIMIZER == _ROWWISE_RMSPROP_AR:
        w = _rowwise_rmsprop_ar(w, g, row0, row1, first, stats, hyper, width, DECAY, STATS)
    else:
        tl.static_assert(False, "an optimizer of formulas.py has no formula here")

    if WEIGHT == tl.float32:
        tl.store(target, w, inside)
    else:
        # Loaded as float64, because fp32 would round them.
        seed, step = tl.load(hyper + _SEED).to(tl.int64), tl.load(hyper + _STEP).to(tl.int64)
        # Positions in the whole table, so that a shard rounds like the whole table.
        whole_row = tl.load(fields + 5, first, 0) + local
        whole_columns = tl.load(fields + 6, first, 0)[:, None] + columns[None, :].to(tl.int64)
        bits = _random_bits(seed, step, whole_row, whole_columns)
        tl.store(target, _rounded(w, bits, STOCHASTIC, WEIGHT), inside)
