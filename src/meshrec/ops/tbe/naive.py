"""Table-batched embedding (TBE) in plain torch: the reference for the kernels, and the fallback without them.

A TBE operator looks up the rows for a whole batch in many tables with a single call. The operators share
these arguments (F features, K keys, T tables, N IDs, S segments, B bags per segment, D width):

- ``values_N``: the IDs of all bags, int32 or int64. ``offsets``: index of the first ID in every bag, followed
  by N; int32 or int64. The bags are stored segment by segment, see ``layout.py``. ``segments``: index of the
  first bag in every segment, int64 [S + 1] on the CPU; None: one block, with equal bag counts for all keys.
- Feature f reads key ``keys[f]`` and looks up the IDs in table ``tables[f]``. ``pooling[f]`` is 0 (SUM),
  1 (MEAN) or 2 (NONE). ``dims[f]`` is the width of the feature. In update and gradient operators, table -1
  means that the feature is skipped.
- With ``flat=False``, the output is a matrix ``[sum of B over blocks, sum of D]``, block by block. With
  ``flat=True``, it is a vector: for every block and feature a matrix ``[B, D]`` (NONE: ``[ids, D]``) in
  row-major order.
- SUM: ``out[b] = sum_i w_i * x_i`` over the IDs i in bag b, where x_i is the row and w_i the per-sample
  weight. MEAN: the same sum divided by the number of IDs, or 0 for an empty bag. NONE: ``out[i] = x_i``.
  Without per-sample weights all w_i are 1. NONE does not allow per-sample weights.

Sums are in fp32. If several IDs read the same row, their gradients are added in feature order, then in ID
order.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshrec.ops import operators
from meshrec.ops.library import dynamic_size, implement, register_fakes
from meshrec.ops.tbe.formulas import Hyper, formula_of
from meshrec.ops.tbe.layout import MEAN, NONE, FeaturePiece, Lookups, OutputLayout, check_offsets, make_layout
from meshrec.ops.tbe.naive_update import update_rows


def tbe_forward(weights: list[Tensor], *arguments: Any) -> Tensor:
    r"""Look up the rows for all IDs in all tables, and pool the rows of every bag.

    Args:
        weights: ``[rows, D]`` per table; fp32, fp16 or bf16.
        arguments: the ``Lookups`` fields without ``dims``; then ``out_size``, the number of output rows (2-D)
            or elements (flat); ``out_dtype``; ``check_ids``, whether to check IDs and weights; and ``names``,
            for error messages: the UTF-8 bytes of ``"table\\tfeature\\n"`` per feature, uint8.

    Returns:
        The output described in the module docstring, in ``out_dtype``.

    Raises:
        ValueError: invalid offsets; or, with ``check_ids``, an ID outside its table or a NaN weight.
    """
    *shared, out_size, out_dtype, check_ids, names = arguments
    # The operator gets no widths, because weights have them.
    lookups = Lookups._make([*shared, [weights[table].shape[1] for table in shared[6]]])
    values, sample_weights = lookups.values, lookups.per_sample_weights
    layout = _checked_layout(lookups)
    if layout.out_size != out_size:
        raise ValueError(f"out_size is {out_size} but the lookups give {layout.out_size}.")
    if check_ids:
        num_rows = [weights[table].shape[0] for table in lookups.tables]
        _check_ids(layout, values, sample_weights, num_rows, names)
    out = torch.zeros(lookups.output_shape(out_size), dtype=out_dtype, device=values.device)
    for piece in layout.pieces:
        table = weights[lookups.tables[piece.feature]]
        # Sum in fp32 whatever the weights' dtype, as the kernels do.
        rows_nD = table[values[piece.ids].long()].float()
        if sample_weights is not None:
            rows_nD *= sample_weights[piece.ids, None]
        mode = lookups.pooling[piece.feature]
        piece.view_of(out, table.shape[1]).copy_(rows_nD if mode == NONE else _pooled(rows_nD, piece, mode))
    return out


def tbe_update(grad: Tensor, *arguments: Any, **optional: Any) -> None:
    """Update tables in place: sum the gradients per touched row, then apply an optimizer step to the row.

    Rows without an ID in the batch do not change, nor does their optimizer state.

    Args:
        arguments: the ``Lookups`` fields, then the arguments listed below up to ``origins``. Later ones may
            follow.
        optional: arguments after ``origins``, by name.
    - ``weights``: T tables, fp32, fp16 or bf16.
    - ``state``: optimizer state, fp32, slot by slot: slot 0 of all tables, then slot 1 of all tables.
    - ``optimizer``: optimizer code, and ``hyper``: parameters, float64; see ``formulas.py``. Rounding to the
      table dtype: see ``naive_update.py``.
    - ``row_stats``: sums of squares over whole rows for every ID, fp32 [N, 3], see ``formulas.RowSum``. Given
      for tables sharded by columns; requires pooling NONE and IDs without repeats in a table.
    - ``origins``: for every weight, the row and column of the whole table at which it starts. Empty: 0, 0.
      Stochastic rounding uses these positions, so that a shard rounds like the whole table.
    - ``runs``: result of ``tbe_row_squares`` for the same gradient and batch, which avoids sorting again.
      Requires ``mean_squares``: the mean squared gradient of every touched whole row, fp32 [sum of U_t],
      where U_t rows of table t are touched. Only for optimizers that need no other row statistics.
    - ``row_keys``: for every weight, an int64 tensor with the row number that stochastic rounding uses for
      each stored row. Empty for a weight that stores its rows in order: then row numbers count from
      ``origins``.
    """
    lookups, (weights, state, optimizer, hyper, row_stats, origins, *trailing) = Lookups.split(arguments)
    # The dispatcher omits trailing defaults; direct callers may pass these by name.
    optional |= zip(("runs", "mean_squares", "row_keys"), trailing, strict=False)
    mean_squares, row_keys = optional.get("mean_squares"), optional.get("row_keys")
    h = Hyper.from_tensor(hyper)
    num_slots = len(formula_of(optimizer).slots)
    if len(state) != num_slots * len(weights):
        raise ValueError(
            f"got {len(state)} state tensors for {len(weights)} tables of an optimizer with "
            f"{num_slots} state slots."
        )
    if origins and len(origins) != 2 * len(weights):
        raise ValueError(
            f"origins must hold a row and a column for each of the {len(weights)} tables, or nothing."
        )
    num_rows = [weight.shape[0] for weight in weights]
    # Table by table, because tables differ in width and dtype.
    for table, parts in enumerate(_gradients_by_table(grad, lookups, num_rows)):
        if parts:
            rows_U, gradient_UD, inverse_n = _sum_by_row(parts)
            stats_U3 = None
            if row_stats is not None:
                # Statistics are per ID, but IDs are distinct here, so this only puts them in row order.
                stats_U3 = row_stats.new_empty(rows_U.numel(), 3)
                stats_U3[inverse_n] = torch.cat([row_stats[part.ids] for part in parts])
            if mean_squares is not None:
                # mean_squares holds the touched rows of all tables, table by table: take this
                # table's rows.
                stats_U3, mean_squares = mean_squares[: rows_U.numel(), None], mean_squares[rows_U.numel() :]
                h = h._replace(row_dim=1)  # the statistic is already a mean
            # state is slot by slot, so the slots for a table are len(weights) apart.
            slots = state[table :: len(weights)]
            # Origins make the random bits in a shard equal those in the whole table.
            origin = origins[2 * table : 2 * table + 2] or (0, 0)
            keys_U = row_keys[table][rows_U] if row_keys and len(row_keys[table]) else None
            update_rows(weights[table], slots, rows_U, gradient_UD, stats_U3, optimizer, h, origin, keys_U)


def tbe_sparse_grad(grad: Tensor, *arguments: Any) -> list[Tensor]:
    """Return the gradients of only the touched rows, for T = len(num_rows) tables.

    The last argument is ``num_rows``, the row count per table. The result alternates rows and gradients:
    ``rows_0, grads_0, rows_1, grads_1, ...``. ``rows_t`` are the distinct touched rows of table t in
    ascending order, int64 [U_t]. ``grads_t`` are the gradients summed over the batch, fp32 [U_t, D_t]. A
    table that no feature reads has U_t = 0 and D_t = 0.
    """
    lookups, (num_rows,) = Lookups.split(arguments)
    result: list[Tensor] = []
    for parts in _gradients_by_table(grad, lookups, num_rows):
        if parts:
            result += _sum_by_row(parts)[:2]
        else:
            nothing = lookups.values.new_empty(0, dtype=torch.int64)
            result += [nothing, grad.new_empty(0, 0, dtype=torch.float32)]
    return result


def tbe_row_squares(grad: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return the squared norm of the gradient of every touched row, for T = len(num_rows) tables.

    The arguments are as for ``tbe_sparse_grad``. U_t is the number of touched rows in table t.

    Returns:
        Squared norms, fp32 [sum of U_t], table by table and in ascending row order; the U_t, int64 [T] on the
            CPU; and ``runs`` to pass to ``tbe_update``, whose content only the kernels know.
    """
    flat_grads = tbe_sparse_grad(grad, *arguments)
    squares = torch.cat([grads.square().sum(1) for grads in flat_grads[1::2]])
    counts = torch.tensor([rows.numel() for rows in flat_grads[::2]], dtype=torch.int64)
    # No runs: the plain update sums gradients by row again.
    return squares, counts, grad.new_empty(0, dtype=torch.int64)


def tbe_dense_grad(grad: Tensor, weights: list[Tensor], *arguments: Any) -> list[Tensor]:
    """Return the gradients of whole tables, with the shape and dtype of every table. Sums are in fp32.

    Args:
        weights: ``[rows, D]`` per table.
    """
    # fp32 sums, rounded once at the end.
    totals = [torch.zeros_like(weight, dtype=torch.float32) for weight in weights]
    for part in _id_gradients(grad, Lookups(*arguments), [weight.shape[0] for weight in weights]):
        totals[part.table].index_add_(0, part.rows_n, part.gradient_nD)
    return [total.to(weight.dtype) for total, weight in zip(totals, weights, strict=True)]


def tbe_sample_weight_grad(
    grad: Tensor, weights: list[Tensor], values: Tensor, offsets: Tensor, *arguments: Any
) -> Tensor:
    """Return the gradient of the per-sample weights, fp32 [N].

    An ID read by several features gets the sum of their gradients. An ID read by no feature gets 0.

    Args:
        weights: ``[rows, D]`` per table.
        values: IDs [N].
        offsets: first ID index per bag, followed by N.
        arguments: the remaining ``Lookups`` fields, without ``per_sample_weights``.
    """
    # Without per-sample weights, gradients are not scaled by these.
    lookups = Lookups(values, offsets, None, *arguments)
    check_offsets(offsets, values.numel())
    _checked_layout(lookups)  # same error precedence as the kernels
    _check_pooled(lookups.pooling)
    total = torch.zeros(values.numel(), dtype=torch.float32, device=values.device)
    for part in _id_gradients(grad, lookups, [weight.shape[0] for weight in weights]):
        # Features with the same key add up.
        total[part.ids] += (weights[part.table][part.rows_n].float() * part.gradient_nD).sum(1)
    return total


def clamp_ids(
    values: Tensor,
    offsets: Tensor,
    segments: Tensor | None,
    num_keys: int,
    keys: list[int],
    tables: list[int],
    num_rows: list[int],
) -> tuple[Tensor, Tensor]:
    """Replace IDs outside their table by 0, and count the replaced IDs.

    If several features read the same key, an ID is replaced if it is outside any of their tables.

    Args:
        values: IDs [N].
        offsets: first ID index per bag, followed by N.
        segments: first bag index per segment (all bags for the same key and block), followed by the bag
            count. None: there is a single block, and all keys have the same number of bags.
        keys: key read by every feature, [F].
        tables: table read by every feature, [F].

    Returns:
        A copy of the IDs with the replacements, and the number of replaced IDs per feature, int64 [F].
    """
    _check_inputs(values, offsets, None, [])
    # Only the ID ranges matter here, so the widths and pooling modes are arbitrary.
    layout = make_layout(
        offsets, segments, num_keys, keys, [1] * len(keys), pooling=[0] * len(keys), flat=True
    )
    clamped, counts_F = values.clone(), torch.zeros(len(keys), dtype=torch.int64, device=values.device)
    for piece in layout.pieces:
        table = tables[piece.feature]
        if table >= 0:
            # From the original IDs, so that every feature counts the IDs outside its own table.
            bad = _is_outside(values[piece.ids], num_rows[table])
            clamped[piece.ids] = clamped[piece.ids].masked_fill(bad, 0)
            counts_F[piece.feature] += bad.sum()
    return clamped, counts_F


def _pooled(rows_nD: Tensor, piece: FeaturePiece, mode: int) -> Tensor:
    """Return the sum or mean of the rows in every bag, fp32 [bags, D]. An empty bag gives 0."""
    # Not from the IDs, because the last bags may be empty.
    num_bags = piece.lengths_B.numel()
    pooled = rows_nD.new_zeros(num_bags, rows_nD.shape[1]).index_add_(0, piece.bag_of_id(), rows_nD)
    return pooled / piece.lengths_B.clamp(min=1)[:, None] if mode == MEAN else pooled


class _PieceGradients(NamedTuple):
    """The gradients for all IDs in a piece (a feature in a block), not yet summed over equal rows."""

    table: int
    ids: slice  # the piece's IDs in values_N
    rows_n: Tensor  # table row per ID
    gradient_nD: Tensor


def _id_gradients(grad: Tensor, lookups: Lookups, num_rows: Sequence[int]) -> Iterator[_PieceGradients]:
    """Yield the gradients of all IDs, piece by piece.

    A gradient includes the per-sample weight, and the factor 1 / (IDs in the bag) for MEAN. Features with
    table -1 are skipped.
    """
    layout = _checked_layout(lookups)
    # layout.out_size counts rows if the output is 2-D.
    out_size = layout.out_size if grad.dim() == 1 else layout.out_size * sum(lookups.dims)
    if grad.numel() != out_size:
        raise ValueError(f"the gradient has {grad.numel()} elements; the forward gave {out_size}.")
    for piece in layout.pieces:
        table, mode = lookups.tables[piece.feature], lookups.pooling[piece.feature]
        if table < 0:
            continue
        gradient = piece.view_of(grad, lookups.dims[piece.feature]).float()
        if mode == MEAN:
            gradient = gradient / piece.lengths_B.clamp(min=1)[:, None]
        if mode != NONE:
            # All IDs in a bag share the gradient of the bag.
            gradient = gradient[piece.bag_of_id()]
        if lookups.per_sample_weights is not None:
            gradient = gradient * lookups.per_sample_weights[piece.ids, None]
        rows_n = lookups.values[piece.ids].long()
        # Always checked: indexing would accept a negative row, and report a large row without its ID.
        _check_rows(piece, rows_n, num_rows[table], str(table), str(piece.feature))
        yield _PieceGradients(table, piece.ids, rows_n, gradient)


def _checked_layout(lookups: Lookups) -> OutputLayout:
    """Check the arguments shared by all operators, and return the output layout.

    Raises:
        ValueError: invalid offsets or per-sample weights.
    """
    _check_inputs(lookups.values, lookups.offsets, lookups.per_sample_weights, lookups.pooling)
    return lookups.layout()


def _gradients_by_table(
    grad: Tensor, lookups: Lookups, num_rows: Sequence[int]
) -> list[list[_PieceGradients]]:
    """Return, for every table, the gradients from all pieces that read the table."""
    parts: list[list[_PieceGradients]] = [[] for _ in num_rows]
    for part in _id_gradients(grad, lookups, num_rows):
        parts[part.table].append(part)
    return parts


def _sum_by_row(parts: list[_PieceGradients]) -> tuple[Tensor, Tensor, Tensor]:
    """Sum the gradients of equal rows in a table.

    Returns:
        The distinct rows in ascending order, int64 [U]; the gradient sum per distinct row, fp32 [U, D]; and
            for every ID, the index of the row among the distinct rows, int64 [n].
    """
    rows_U, inverse_n = torch.cat([part.rows_n for part in parts]).unique(return_inverse=True)
    gradient_nD = torch.cat([part.gradient_nD for part in parts])
    total_UD = gradient_nD.new_zeros(rows_U.numel(), gradient_nD.shape[1])
    # index_add_ adds the entries in order, which gives the documented sum order.
    return rows_U, total_UD.index_add_(0, inverse_n, gradient_nD), inverse_n


def _is_outside(ids: Tensor, num_rows: int) -> Tensor:
    """Return whether each ID is outside [0, num_rows), as a bool tensor."""
    return (ids < 0) | (ids >= num_rows)


def _check_inputs(
    values: Tensor, offsets: Tensor, per_sample_weights: Tensor | None, pooling: Sequence[int]
) -> None:
    """Raise ValueError for invalid offsets or per-sample weights."""
    check_offsets(offsets, values.numel())
    if per_sample_weights is None:
        return
    if per_sample_weights.numel() != values.numel():
        raise ValueError(
            f"there are {values.numel()} values but {per_sample_weights.numel()} per-sample weights. "
            "Each id needs one weight."
        )
    if per_sample_weights.dtype != torch.float32:
        raise ValueError("per-sample weights must be float32. Convert them with .float().")
    _check_pooled(pooling)


def _check_pooled(pooling: Sequence[int]) -> None:
    """Raise ValueError if a feature is not pooled: per-sample weights scale rows in a sum."""
    if NONE in pooling:
        raise ValueError("per-sample weights belong to pooled lookups; a sequence lookup takes none.")


def _check_ids(
    layout: OutputLayout,
    values: Tensor,
    per_sample_weights: Tensor | None,
    num_rows_F: list[int],
    names: Tensor,
) -> None:
    """Raise ValueError, naming the ID, for the first ID outside the table or the first NaN weight."""
    for piece in layout.pieces:
        ids = values[piece.ids]
        table, feature = bytes(names.tolist()).decode().split("\n")[piece.feature].split("\t")
        _check_rows(piece, ids, num_rows_F[piece.feature], table, feature)
        if per_sample_weights is None:
            continue
        if (position := _first_true(per_sample_weights[piece.ids].isnan())) is not None:
            raise ValueError(
                f"table '{table}': the weight of id {int(ids[position])} of feature '{feature}' "
                f"(sample {int(piece.bag_of_id()[position])}) is NaN. "
                "Weights must be numbers; find where this one comes from."
            )


def _check_rows(piece: FeaturePiece, ids_n: Tensor, num_rows: int, table: str, feature: str) -> None:
    """Raise ValueError for the first ID outside [0, num_rows). ``table`` and ``feature`` are names."""
    if (position := _first_true(_is_outside(ids_n, num_rows))) is not None:
        raise ValueError(
            f"table '{table}': id {int(ids_n[position])} of feature '{feature}' "
            f"(sample {int(piece.bag_of_id()[position])}) is outside [0, {num_rows}). "
            "Raise num_embeddings, or hash the ids."
        )


def _first_true(bad: Tensor) -> int | None:
    """Return the index of the first True, or None if there is none."""
    return int(bad.nonzero()[0]) if bool(bad.any()) else None


# For all devices. Kernels registered for a device take precedence.
implement(
    [
        tbe_forward,
        tbe_update,
        tbe_sparse_grad,
        tbe_row_squares,
        tbe_dense_grad,
        tbe_sample_weight_grad,
        clamp_ids,
    ]
)


# Shapes for tracing, and the lookup gradient, shared by all kernels.


def _forward_fake(weights: list[Tensor], values: Tensor, *arguments: Any) -> Tensor:
    """Return the result shape of ``tbe_forward``, for tracing."""
    tables, _, flat, out_size, out_dtype, *_ = arguments[5:]
    shape = [out_size] if flat else [out_size, sum(weights[table].shape[1] for table in tables)]
    return values.new_empty(shape, dtype=out_dtype)


def _sparse_grad_fake(grad: Tensor, *arguments: Any) -> list[Tensor]:
    """Return the result shapes of ``tbe_sparse_grad``, for tracing."""
    lookups, (num_rows,) = Lookups.split(arguments)
    values, tables, dims = lookups.values, lookups.tables, lookups.dims
    result: list[Tensor] = []
    for table in range(len(num_rows)):
        # The number of touched rows depends on the IDs, so it is a symbol in the traced graph.
        read = table in tables
        num_touched = dynamic_size() if read else 0
        dim = dims[tables.index(table)] if read else 0
        result.append(values.new_empty([num_touched], dtype=torch.int64))
        result.append(grad.new_empty([num_touched, dim], dtype=torch.float32))
    return result


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Save the inputs of ``tbe_forward`` for the backward pass."""
    weights, values, offsets, per_sample_weights, segments, *options = inputs
    # Tensors are saved through torch, which then detects in-place writes before the backward pass.
    ctx.save_for_backward(values, offsets, per_sample_weights, segments, *weights)
    num_keys, keys, tables, pooling, flat = options[:5]
    ctx.lookups = num_keys, keys, tables, pooling, flat
    # Gradient operators take the widths as an argument, because they need not have the weights.
    ctx.dims = [weights[table].shape[1] for table in tables]


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    """Return a gradient per argument of ``tbe_forward``; None for all but weights and per-sample weights."""
    values, offsets, per_sample_weights, segments, *weights = ctx.saved_tensors
    weights_grad: list[Tensor | None] = [None] * len(weights)
    sample_grad = None
    if any(ctx.needs_input_grad[0]):
        dense = operators.tbe_dense_grad(
            grad, weights, values, offsets, per_sample_weights, segments, *ctx.lookups, ctx.dims
        )
        # For a list of tensors, torch has a flag per tensor.
        needed = ctx.needs_input_grad[0]
        weights_grad = [gradient if need else None for gradient, need in zip(dense, needed, strict=True)]
    if ctx.needs_input_grad[3]:
        sample_grad = operators.tbe_sample_weight_grad(
            grad, weights, values, offsets, segments, *ctx.lookups, ctx.dims
        ).to(per_sample_weights.dtype)
    # A result per tbe_forward argument: weights, values, offsets, per_sample_weights, then ten others.
    return (weights_grad, None, None, sample_grad, *[None] * 10)


register_fakes(
    tbe_forward=_forward_fake,
    tbe_update=lambda *_: None,
    tbe_sparse_grad=_sparse_grad_fake,
    tbe_row_squares=lambda grad, *args: (
        grad.new_empty([dynamic_size()], dtype=torch.float32),
        torch.empty([len(args[-1])], dtype=torch.int64),
        grad.new_empty([dynamic_size()], dtype=torch.int64),
    ),
    tbe_dense_grad=lambda grad, weights, *_: [weight.new_empty(weight.shape) for weight in weights],
    tbe_sample_weight_grad=lambda grad, weights, values, *_: values.new_empty(
        values.shape, dtype=torch.float32
    ),
    clamp_ids=lambda values, offsets, segments, num_keys, keys, *_: (
        torch.empty_like(values),
        values.new_empty([len(keys)], dtype=torch.int64),
    ),
)
torch.library.register_autograd("meshrec::tbe_forward", _backward, setup_context=_setup_context)

# The update has no gradient. Without the fallthrough, torch inspects every argument tensor on every call.
_registration = torch.library.Library("meshrec", "IMPL")
_registration.impl("tbe_update", torch.library.fallthrough_kernel, "Autograd")
