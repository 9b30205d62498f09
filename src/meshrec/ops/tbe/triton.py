"""TBE operators on GPUs, launched as Triton kernels. ``naive.py`` documents arguments and results.

A single launch serves all lookups in all tables of a dtype. For gradients, the IDs are sorted by row, then
every touched row is summed and written once. The sort is stable, so that sums do not depend on GPU
scheduling.

Unlike on the CPU, offsets and IDs are checked only with ``check_ids``, because a check synchronizes with the
GPU. The update relies on the check in the forward pass. For features without pooling, it also relies on the
output size that the caller gives.

Triton ships with PyTorch's GPU builds. Without Triton, the plain torch versions run on the GPU.
"""

import importlib.util
import logging
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshrec.ops.device_copies import cached_on_device, copy_to_device
from meshrec.ops.library import implement
from meshrec.ops.tbe import naive
from meshrec.ops.tbe.formulas import Hyper, RowSum, formula_of
from meshrec.ops.tbe.layout import Lookups
from meshrec.ops.tbe.triton_positions import PositionedLookups, position_lookups

# Shape legend: F features, K keys, R blocks, L = R * F lookups, T tables, N IDs, E entries.

_logger = logging.getLogger("meshrec")
_LISTED_BAGS, _LISTED_IDS = 8, 16
"""Bags per program of ``list_entries``, and IDs per bag that a program handles in a loop iteration."""


def tbe_forward(weights: list[Tensor], *arguments: Any) -> Tensor:
    """Look up and pool rows on a GPU, as ``naive.tbe_forward`` does."""
    *shared, out_size, out_dtype, check_ids, _ = arguments
    batch = Lookups._make([*shared, [weights[table].shape[1] for table in shared[-3]]])
    out = look_up(
        weights, [0] * len(weights), batch, out_size=out_size, out_dtype=out_dtype, check_ids=check_ids
    )
    # None: the input is invalid. The plain version raises the error.
    return naive.tbe_forward(weights, *arguments) if out is None else out


def look_up(
    weights: list[Tensor],
    bits: list[int],
    batch: Lookups,
    *,
    out_size: int,
    out_dtype: torch.dtype,
    check_ids: bool,
) -> Tensor | None:
    """Look up rows in floating-point or quantized tables, and pool the rows in each bag.

    Args:
        bits: bits per quantized value, for each table; 0 for floating-point rows.
        out_size: number of output rows (2-D) or elements (flat).
        check_ids: whether to check offsets, IDs and per-sample weights.

    Returns:
        The output, or None if the check found invalid offsets, IDs or weights.
    """
    # Imported late, because Triton may be missing.
    from meshrec.ops.tbe import triton_kernels

    lookups, values = position_lookups(batch, out_size), batch.values
    if lookups.shape[0] != out_size:
        raise ValueError(f"out_size is {out_size} but the lookups give {lookups.shape[0]}.")
    num_ids, device = values.numel(), values.device
    # Without checks the kernels never write is_bad, so any tensor will do.
    is_bad = torch.zeros(1, dtype=torch.int32, device=device) if check_ids else values
    num_bags = batch.offsets.numel() - 1
    if check_ids and num_bags:
        block = triton_kernels.OFFSETS_AT_ONCE
        triton_kernels.check_offsets[(-(-num_bags // block),)](
            batch.offsets, num_bags, num_ids, is_bad, BLOCK=block
        )
    out = torch.empty(lookups.shape, dtype=out_dtype, device=device)
    # A launch serves many tables, so kernels receive addresses as integers.
    addresses = [weight.data_ptr() for weight in weights]
    num_rows = cached_on_device(device, [weight.shape[0] for weight in weights])
    for (dtype, num_bits), selected in _group_by_dtype(weights, bits).items():
        subset = lookups.of_tables(selected)
        # A program accumulates BAGS * BLOCK values in registers: at most 512, unless a row is wider.
        block = _padded_width(batch.dims[feature] for feature in subset.features)
        bags = max(1, min(16, 512 // block))
        # CUDA refuses an empty launch grid.
        if 0 in subset.grid(bags):
            continue
        triton_kernels.look_up[subset.grid(bags)](
            subset.fields,
            cached_on_device(device, addresses),
            num_rows,
            *batch[:3],
            is_bad,
            out,
            WEIGHT=_triton_dtype(dtype),
            BITS=num_bits,
            WEIGHTED=batch.per_sample_weights is not None,
            CHECK=check_ids,
            ALIGN=_alignment(batch.dims, addresses),
            BAGS=bags,
            BLOCK=block,
        )
    # The only synchronization with the GPU.
    return None if check_ids and bool(is_bad) else out


def _alignment(widths: Sequence[int], addresses: Sequence[int]) -> int:
    """Return how many fp32 values a thread may load at once: 4 if all rows are 16-byte aligned, else 1."""
    is_aligned = all(width % 4 == 0 for width in widths) and all(at % 16 == 0 for at in addresses)
    return 4 if is_aligned else 1


class _Entries(NamedTuple):
    """The gradient contributions of a batch, sorted by table row.

    An entry stands for an ID read by a feature. It has the table row of this ID, the part of the output
    gradient for the row, and a factor for this part. Not every feature reads every ID, so some entries have
    no row. These are padding, and come last.
    """

    grad: Tensor
    """Flat output gradient, fp32."""
    rows: Tensor
    """Row per entry, ascending, with rows numbered across all tables; int32 or int64 [E]."""
    order: Tensor
    """Entry number per element in ``rows``, int64 [E]. The next three fields are in entry number order."""
    starts: Tensor
    """Index in ``grad`` where the gradient for each entry starts, int64 [E]."""
    factors: Tensor
    """Gradient factor per entry, fp32 [E]: per-sample weight, times 1 / bag size for MEAN."""
    tables_of: Tensor
    """Table per entry, int32 [E]."""
    first_rows: list[int]
    """First row per table in the numbering across all tables, then the total row count; [T + 1]."""
    align: int
    """``ALIGN`` in the kernels: fp32 values in a gradient row that a thread may load at once."""

    @property
    def end_of_rows(self) -> int:
        """Row number of padding entries: the total row count, so that padding sorts last."""
        return self.first_rows[-1]

    def partial_sums(self, fields: Tensor, block: int) -> Tensor:
        """Compute partial gradient sums for long runs, fp32 [number of parts, block].

        A run is a sequence of entries with the same row. The entries are divided into parts of equal length.
        If a run continues from an earlier part, the result row of a part is the sum over the run's entries in
        this part. All other result rows are uninitialized. See ``triton_kernels.sum_parts``.
        """
        from meshrec.ops.tbe import triton_kernels

        num_entries = self.rows.numel()
        num_parts = -(-num_entries // triton_kernels.PART)
        sums = torch.empty(num_parts, block, dtype=torch.float32, device=self.rows.device)
        if num_parts > 1:
            # Part 0 never continues an earlier run, so the launch covers the other parts.
            at_once = _runs_at_once(block)
            triton_kernels.sum_parts[(-(-(num_parts - 1) // at_once),)](
                *self[:6],
                fields,
                sums,
                num_entries,
                self.end_of_rows,
                ALIGN=self.align,
                PARTS=at_once,
                BLOCK=block,
            )
        return sums


def _make_entries(
    grad: Tensor,
    lookups: PositionedLookups,
    batch: Lookups,
    table_fields: Tensor,
    *,
    num_rows: Sequence[int],
    runs: Tensor | None = None,
) -> _Entries:
    """List the gradient contributions of a batch, and sort them by row.

    Args:
        lookups: the lookups to include; others become padding.
    """
    from meshrec.ops.tbe import triton_kernels

    if grad.numel() != torch.Size(lookups.shape).numel():
        size = torch.Size(lookups.shape).numel()
        raise ValueError(f"the gradient has {grad.numel()} elements; the forward gave {size}.")
    # If several features read a key, an ID needs an entry for each of them. Entries are therefore arranged
    # in rounds with an entry per ID. The first feature that reads a key is in round 0, the second in
    # round 1, etc. An ID without a feature in a round leaves padding.
    round_of: dict[int, int] = {}
    rounds: dict[int, int] = {}
    for feature in [at for at, table in enumerate(batch.tables) if table >= 0]:
        round_of[feature] = rounds.get(batch.keys[feature], 0)
        rounds[batch.keys[feature]] = round_of[feature] + 1
    num_ids, device = batch.values.numel(), batch.values.device
    num_entries = num_ids * max(rounds.values(), default=0)
    first_rows = list(accumulate(num_rows, initial=0))
    # Radix sort time is proportional to the key width.
    row_type = torch.int32 if first_rows[-1] < 2**31 else torch.int64
    # Filled with the padding row: list_entries writes only entries with a row. The other arrays are
    # read only for those entries.
    rows = torch.full([num_entries], first_rows[-1], dtype=row_type, device=device)
    starts = torch.empty(num_entries, dtype=torch.int64, device=device)
    factors = torch.empty(num_entries, dtype=torch.float32, device=device)
    tables_of = torch.empty(num_entries, dtype=torch.int32, device=device)
    grid = lookups.grid(_LISTED_BAGS)
    if num_entries and 0 not in grid:
        triton_kernels.list_entries[grid](
            lookups.fields,
            cached_on_device(device, [round_of[feature] for feature in lookups.features]),
            num_ids,
            table_fields,
            *batch[:3],
            rows,
            starts,
            factors,
            tables_of,
            WEIGHTED=batch.per_sample_weights is not None,
            BAGS=_LISTED_BAGS,
            IDS=_LISTED_IDS,
        )
    if runs is None:
        # Stable, so that equal rows are summed in entry order in every run.
        rows, order = rows.sort(stable=True)
    else:
        # Sorted rows, their entry numbers, and run numbers, from tbe_row_squares.
        rows, order, _ = runs.view(3, -1)
    # Kernels find a gradient row by its first element, so the tensor must be flat.
    grad = grad.float().contiguous().view(-1)
    # No addresses: Triton itself checks how tensor arguments such as ``grad`` are aligned.
    return _Entries(
        grad, rows, order, starts, factors, tables_of, first_rows, align=_alignment(batch.dims, [])
    )


def tbe_update(grad: Tensor, *arguments: Any) -> None:
    """Update tables in place on a GPU, as ``naive.tbe_update`` does."""
    # The dispatcher leaves out trailing arguments with default values.
    batch, (weights, state, optimizer, hyper, row_stats, origins, *sorted_runs) = Lookups.split(arguments)
    runs, mean_squares, row_keys = (*sorted_runs, None, None, None)[:3]
    if row_keys is not None:
        raise ValueError("row_keys are for hashed tables, which are on the CPU.")
    device, num_ids = batch.values.device, batch.values.numel()
    h, num_tables, num_state = Hyper.from_tensor(hyper), len(weights), len(formula_of(optimizer).slots)
    _check_update_targets(weights, state, num_state)
    # Adam's bias corrections in float64. A power in fp32 would lose digits in the first steps.
    corrections = hyper.new_tensor([1 - h.beta1**h.step, 1 - h.beta2**h.step])
    if mean_squares is not None:
        hyper = h._replace(row_dim=1).as_tensor()  # the statistic is already a mean
    # All parameters in a single tensor, so that an update copies once to the device.
    hyper_on_device = copy_to_device(torch.cat([hyper, corrections]), device)
    lookups = position_lookups(batch, grad.numel())
    slots = [state[slot * num_tables : (slot + 1) * num_tables] for slot in range(num_state)]
    num_rows = [weight.shape[0] for weight in weights]
    fields = _table_fields(
        [weight.data_ptr() for weight in weights],
        [[tensor.data_ptr() for tensor in slot] for slot in slots],
        [weight.shape[1] for weight in weights],
        num_rows=num_rows,
        origins=origins,
        device=device,
    )
    # The kernel has one ALIGN for weights, state and gradient, so all of them must be aligned.
    align = _alignment(
        [*batch.dims, *(weight.shape[1] for weight in weights)],
        [tensor.data_ptr() for tensor in (*weights, *state)],
    )
    # Only floating-point tables are trained: 0 bits.
    kinds = _group_by_dtype(weights, [0] * num_tables)
    for (dtype, _), selected in kinds.items():
        subset = lookups.of_tables(selected)
        # The runs cover all tables, so they only apply if a single kernel serves all tables.
        entries = _make_entries(
            grad, subset, batch, fields, num_rows=num_rows, runs=runs if len(kinds) == 1 else None
        )
        num_entries = entries.rows.numel()
        if num_entries == 0:
            continue
        stats = row_stats
        if row_stats is not None and num_entries > num_ids:
            # Statistics are per ID, and every round has an entry per ID.
            stats = row_stats.repeat(num_entries // num_ids, 1)
        if runs is not None and mean_squares is not None:
            stats = _row_stats_by_entry(runs, mean_squares)
        _update_runs(
            entries,
            fields,
            stats,
            hyper_on_device,
            OPTIMIZER=optimizer,
            DECAY=h.decay_mode,
            STOCHASTIC=h.seed != 0,
            WEIGHT=_triton_dtype(dtype),
            ALIGN=align,
            BLOCK=_padded_width(weights[table].shape[1] for table in selected),
        )


def _check_update_targets(weights: list[Tensor], state: list[Tensor], num_state: int) -> None:
    """Raise ValueError if there are too few state tensors, or if a tensor to update is not contiguous."""
    if len(state) != num_state * len(weights):
        raise ValueError(
            f"got {len(state)} state tensors for {len(weights)} tables of an optimizer with {num_state} "
            "state slots. Pass slot 0 of all tables, then slot 1."
        )
    if any(not tensor.is_contiguous() for tensor in (*weights, *state)):
        raise ValueError("tables and their state must be contiguous: they are updated in place.")


def _update_runs(
    entries: _Entries, fields: Tensor, stats: Tensor | None, hyper: Tensor, **constants: Any
) -> None:
    """Launch the update kernel, which sums the gradients of every row and updates the row."""
    from meshrec.ops.tbe import triton_update_kernels

    # Programs without the first entry in a run return at once.
    num_entries, runs_at_once = entries.rows.numel(), _runs_at_once(constants["BLOCK"])
    triton_update_kernels.update_runs[(-(-num_entries // runs_at_once),)](
        *entries[:6],
        fields,
        entries.partial_sums(fields, constants["BLOCK"]),
        None if stats is None else stats.contiguous(),
        num_entries,
        entries.end_of_rows,
        hyper,
        STATS=stats is not None,
        RUNS=runs_at_once,
        **constants,
    )


def _row_stats_by_entry(runs: Tensor, mean_squares: Tensor) -> Tensor:
    """Expand the mean squared gradient per touched row to a value per entry, fp32 [E, 3].

    The other two row statistics are 0. ``needs_gradient_only`` optimizers do not read them.
    """
    _, order, run_ids = runs.view(3, -1)
    stats = mean_squares.new_zeros(order.numel(), len(RowSum))
    if mean_squares.numel():
        # Padding entries come after the last run. Kernels do not read their values.
        squares_by_entry = mean_squares[run_ids.clamp(max=mean_squares.numel() - 1)]
        stats[:, int(RowSum.GRADIENT)].index_copy_(0, order, squares_by_entry)
    return stats


def tbe_sparse_grad(grad: Tensor, *arguments: Any) -> list[Tensor]:
    """Return the gradients for touched rows on a GPU, as ``naive.tbe_sparse_grad`` does."""
    return _summed_rows(grad, *Lookups.split(arguments))[0]


def tbe_row_squares(grad: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return squared gradient norms per touched row on a GPU, as ``naive.tbe_row_squares`` does.

    Here ``runs`` is int64 [3 * E]: sorted rows, entry numbers, and the run number per sorted entry.
    """
    summed, entries, run_ids = _summed_rows(grad, *Lookups.split(arguments))
    squares = [rows.square().sum(1) for rows in summed[1::2]]
    # On the CPU, where the sizes are already known.
    counts = torch.tensor([len(table_squares) for table_squares in squares], dtype=torch.int64)
    return torch.cat(squares), counts, torch.cat([entries.rows.long(), entries.order, run_ids])


def _summed_rows(
    grad: Tensor, batch: Lookups, options: Sequence[Any]
) -> tuple[list[Tensor], _Entries, Tensor]:
    """Sum the gradients for each touched row.

    An entry is an ID read by a feature. A run is a sequence of sorted entries with the same row.

    Returns:
        - Rows and gradients per table, in alternation as in ``tbe_sparse_grad``.
        - The sorted entries of the batch.
        - Run number per sorted entry, counted across all tables, int64 [E].
    """
    (num_rows,) = options
    device, num_tables = batch.values.device, len(num_rows)
    lookups = position_lookups(batch, grad.numel())
    # Widths come from the features. A table without a feature gets 0.
    width_of = dict(zip(batch.tables, batch.dims, strict=True))
    widths = [width_of.get(table, 0) for table in range(num_tables)]
    # First pass: kernels only read widths and row numbers, so all addresses are 0.
    no_slots = [[0] * num_tables]
    fields = _table_fields([0] * num_tables, no_slots, widths, num_rows=num_rows, origins=[], device=device)
    entries = _make_entries(grad, lookups, batch, fields, num_rows=num_rows)
    # A run starts where the row differs from the previous row. Padding starts no run.
    is_first = torch.ones_like(entries.rows, dtype=torch.bool)
    is_first[1:] = entries.rows[1:] != entries.rows[:-1]
    is_first &= entries.rows < entries.end_of_rows
    runs_before = torch.cat([is_first.new_zeros(1, dtype=torch.int64), is_first.cumsum(0)])
    # searchsorted needs equal dtypes.
    first_rows = cached_on_device(device, entries.first_rows).to(entries.rows.dtype)
    # The number of runs before a table's first row is the number of the table's first run.
    first_of_table = torch.searchsorted(entries.rows, first_rows)
    first_runs = runs_before[first_of_table]
    # Synchronizes: the result sizes depend on the IDs.
    counts: list[int] = first_runs.diff().tolist()
    result: list[Tensor] = []
    for count, width in zip(counts, widths, strict=True):
        result.append(torch.empty(count, dtype=torch.int64, device=device))
        result.append(torch.empty(count, width, dtype=torch.float32, device=device))
    # Second pass: the same table fields, with the results as targets instead of state slots.
    if sum(counts):
        targets = [[tensor.data_ptr() for tensor in result[1::2]], [rows.data_ptr() for rows in result[::2]]]
        fields = _table_fields(
            [0] * num_tables, targets, widths, num_rows=num_rows, origins=[], device=device
        )
        table_of = torch.searchsorted(first_rows, entries.rows, right=True) - 1
        run_ids = runs_before[:-1] - first_runs[table_of.clamp(max=num_tables - 1)]
        _sum_runs(entries, fields, run_ids, widths, dense=False)
    return result, entries, runs_before[1:] - 1


def tbe_dense_grad(grad: Tensor, weights: list[Tensor], *arguments: Any) -> list[Tensor]:
    """Return the gradients for whole tables on a GPU, as ``naive.tbe_dense_grad`` does.

    Args:
        weights: ``[rows, D]`` per table.
    """
    batch = Lookups(*arguments)
    lookups = position_lookups(batch, grad.numel())
    # Untouched rows have gradient 0. Sums are in fp32, also for half-precision tables.
    totals = [torch.zeros_like(weight, dtype=torch.float32) for weight in weights]
    widths, num_rows = [weight.shape[1] for weight in weights], [weight.shape[0] for weight in weights]
    targets = [[total.data_ptr() for total in totals]]
    fields = _table_fields(
        [0] * len(weights), targets, widths, num_rows=num_rows, origins=[], device=batch.values.device
    )
    entries = _make_entries(grad, lookups, batch, fields, num_rows=num_rows)
    _sum_runs(entries, fields, entries.rows, widths, dense=True)
    return [total.to(weight.dtype) for total, weight in zip(totals, weights, strict=True)]


def _sum_runs(entries: _Entries, fields: Tensor, run_ids: Tensor, widths: list[int], *, dense: bool) -> None:
    """Launch the kernel that sums the gradients of equal rows; see ``triton_kernels.write_run_sums``."""
    from meshrec.ops.tbe import triton_kernels

    num_entries, block = entries.rows.numel(), _padded_width(widths)
    if num_entries:
        runs_at_once = _runs_at_once(block)
        triton_kernels.write_run_sums[(-(-num_entries // runs_at_once),)](
            *entries[:6],
            fields,
            entries.partial_sums(fields, block),
            run_ids,
            num_entries,
            entries.end_of_rows,
            DENSE=dense,
            ALIGN=entries.align,
            RUNS=runs_at_once,
            BLOCK=block,
        )


def _runs_at_once(block: int) -> int:
    """Return how many runs a program sums in parallel: at most 32, and at most 1024 values in total."""
    return max(1, min(32, 1024 // block))


def _table_fields(
    weights: list[int],
    slots: Sequence[list[int]],
    widths: list[int],
    *,
    num_rows: Sequence[int],
    origins: list[int],
    device: torch.device,
) -> Tensor:
    """Return ``triton_kernels.TABLE_FIELDS`` for each table, int64 [T, 7] on the device.

    Args:
        slots: state addresses: a list per state slot, with an address per table; at most 2 slots.
        origins: whole-table row and column where each weight starts; empty: 0, 0.
    """
    zeros = [0] * len(weights)
    first_rows = list(accumulate(num_rows, initial=0))[:-1]
    # The kernel always reads two slot addresses. It ignores those the optimizer does not use.
    slot_columns = [*slots, zeros, zeros][:2]
    columns = [weights, *slot_columns, widths, first_rows, origins[::2] or zeros, origins[1::2] or zeros]
    return cached_on_device(device, list(zip(*columns, strict=True)))


def _group_by_dtype(weights: list[Tensor], bits: list[int]) -> dict[tuple[torch.dtype, int], set[int]]:
    """Group table numbers by dtype and bits: kernels are compiled per type, so each group is a launch."""
    tables: dict[tuple[torch.dtype, int], set[int]] = {}
    for table, (weight, table_bits) in enumerate(zip(weights, bits, strict=True)):
        tables.setdefault((weight.dtype, table_bits), set()).add(table)
    return tables


def _padded_width(widths: Any) -> int:
    """Return the width of the widest table, rounded up to a power of two: ``BLOCK`` in the kernels."""
    return 1 << (max(widths, default=1) - 1).bit_length()


def _triton_dtype(dtype: torch.dtype) -> Any:
    import triton.language as tl

    return {
        torch.float32: tl.float32,
        torch.float16: tl.float16,
        torch.bfloat16: tl.bfloat16,
        torch.uint8: tl.uint8,
    }[dtype]


OPS: list[Callable[..., Any]] = [tbe_forward, tbe_update, tbe_sparse_grad, tbe_row_squares, tbe_dense_grad]
"""Operators with Triton kernels."""

if importlib.util.find_spec("triton") is not None:
    implement(OPS, "CUDA")
elif torch.version.cuda is not None:
    _logger.warning(
        "Triton is not installed: on GPUs the plain torch versions run, at a fraction of the speed. "
        "Install triton to get them."
    )
