"""The exact best sizes of pieces, once it is settled which ranks hold a part of which table.

A table that is split over several ranks need not be split evenly. All loads are affine in the sizes of the
pieces, so the best sizes are a linear program: the lowest sum over phases of the slowest rank.
"""

from typing import NamedTuple

import numpy as np

from meshrec.planner.highs import INFINITY, LinearProgram, solve_lp, sparse_matrix
from meshrec.planner.problem import Layout
from meshrec.planner.state import Parts, State
from meshrec.planner.types import COLUMN_ALIGNMENT, Floats, Ints

_MOST_VARIABLES = 6000


def polish(state: State, *, rows_only: bool = False) -> bool:
    """Sets the sizes of split tables' pieces to the best there are; whether the step became faster.

    Columns come in multiples of 4, which can lose all that the best sizes gain. With `rows_only` the columns
    stay as they are.
    """
    tables = [
        table
        for table, parts in enumerate(state.parts_T)
        if parts is not None
        and len(parts.rank_N) > 1
        and not (rows_only and _is_by_columns(state.problem.layouts_C[parts.candidate]))
    ]
    before = state.seconds
    old = {table: state.remove(table) for table in tables}
    variables = _variables(state, old)
    if 0 < len(variables.table_V) <= _MOST_VARIABLES:
        amount_V = _solve(state, old, variables, before)
    else:
        amount_V = None
    new = old if amount_V is None else _resized(state, old, variables, amount_V)
    for table, parts in new.items():
        state.add(table, parts)
    if state.seconds < before * (1 - 1e-9) and state.fits():
        return True
    for table, parts in old.items():
        state.remove(table)
        state.add(table, parts)
    return False


def _is_by_columns(layout: Layout) -> bool:
    return layout.row_parts == 1 and not layout.by_nodes


class _Variables(NamedTuple):
    """V pieces with a variable size; those of one chunk share rows or columns, so their weighted sizes add
    up."""

    table_V: Ints
    slot_V: Ints
    chunk_V: Ints
    weight_V: Floats
    total_V: Floats
    """Weighted sizes in the piece's chunk."""
    least_V: Floats
    most_V: Floats


def _variables(state: State, parts_by_table: dict[int, Parts]) -> _Variables:
    problem = state.problem
    columns: list[tuple[Floats | Ints, ...]] = []
    chunk = 0
    for table, parts in parts_by_table.items():
        layout = problem.layouts_C[parts.candidate]
        count = len(parts.rank_N)
        if not _is_by_columns(layout):
            length = layout.row_parts * (problem.node_size if layout.by_nodes else 1)
            weight, total = np.ones(count), np.full(count, float(length))
            chunk_N = chunk + np.arange(count) // length
            least = np.minimum(np.maximum(1e-3, 2 / problem.rows_P[parts.group_N]), 1.0)
        else:
            weight = problem.width_P[parts.group_N].astype(np.float64)
            total, chunk_N = np.full(count, weight.sum()), np.full(count, chunk)
            least = problem.min_partition_Y[problem.type_T[table]] / weight
        most = (total - (np.bincount(chunk_N - chunk)[chunk_N - chunk] - 1) * least * weight) / weight
        columns.append(
            (np.full(count, table), np.arange(count), chunk_N, weight, total, least, np.maximum(most, least))
        )
        chunk = int(chunk_N[-1]) + 1
    if not columns:
        none, zeros = np.zeros(0, np.int64), np.zeros(0)
        return _Variables(none, none, none, zeros, zeros, zeros, zeros)
    joined = [np.concatenate(column) for column in zip(*columns, strict=True)]
    return _Variables(*joined)


def _solve(
    state: State, parts_by_table: dict[int, Parts], variables: _Variables, scale: float
) -> Floats | None:
    """The best sizes; `state` holds everything else, `scale` seconds become 1."""
    problem = state.problem
    num_ranks, num_phases = state.load_RK.shape
    group_V = np.concatenate([parts.group_N for parts in parts_by_table.values()])
    rank_V = np.concatenate([parts.rank_N for parts in parts_by_table.values()])
    fixed_VK, fixed_bytes_V = problem.fixed_PK[group_V], problem.fixed_bytes_P[group_V]
    load_RK, bytes_R = state.load_RK.copy(), state.bytes_R.copy()
    np.add.at(load_RK, rank_V, fixed_VK)
    np.add.at(bytes_R, rank_V, fixed_bytes_V)
    slope_VK = (problem.load_PK[group_V] - fixed_VK) / scale
    common = state.common_bytes + sum(
        problem.common_bytes_C[parts.candidate] for parts in parts_by_table.values()
    )
    room_R = 1 - (bytes_R + common) / problem.memory_cap
    num_variables, num_chunks = len(group_V), int(variables.chunk_V[-1]) + 1
    variable = np.arange(num_variables)
    phase = np.arange(num_phases)
    rank_rows = num_ranks * num_phases
    rows = [
        (rank_V[:, None] * num_phases + phase).ravel(),
        np.arange(rank_rows),
        rank_rows + rank_V,
        rank_rows + num_ranks + variables.chunk_V,
    ]
    columns = [
        np.repeat(variable, num_phases),
        num_variables + np.tile(phase, num_ranks),
        variable,
        variable,
    ]
    values = [
        slope_VK.ravel(),
        np.full(rank_rows, -1.0),
        (problem.bytes_P[group_V] - fixed_bytes_V) / problem.memory_cap,
        variables.weight_V / variables.total_V,
    ]
    program = LinearProgram(
        cost=np.concatenate((np.zeros(num_variables), np.ones(num_phases))),
        lower=np.concatenate((variables.least_V, np.zeros(num_phases))),
        upper=np.concatenate((variables.most_V, np.full(num_phases, INFINITY))),
        matrix=sparse_matrix(
            np.concatenate(rows),
            np.concatenate(columns),
            np.concatenate(values),
            num_rows=rank_rows + num_ranks + num_chunks,
            num_columns=num_variables + num_phases,
        ),
        row_lower=np.concatenate((np.full(rank_rows + num_ranks, -INFINITY), np.ones(num_chunks))),
        row_upper=np.concatenate((-load_RK.ravel() / scale, room_R, np.ones(num_chunks))),
    )
    state.work += 300_000 + 500 * (rank_rows + num_variables)
    optimum = solve_lp(program)
    return None if optimum is None else optimum.x[:num_variables]


def _resized(
    state: State, parts_by_table: dict[int, Parts], variables: _Variables, amount_V: Floats
) -> dict[int, Parts]:
    """The pieces with their new sizes, columns in multiples of 4."""
    new = {}
    first = 0
    for table, parts in parts_by_table.items():
        last = first + len(parts.rank_N)
        layout = state.problem.layouts_C[parts.candidate]
        amount_N = amount_V[first:last]
        if _is_by_columns(layout):
            least = int(state.problem.min_partition_Y[state.problem.type_T[table]])
            width_N = variables.weight_V[first:last]
            rounded_N = _round_widths(amount_N * width_N, least)
            amount_N = parts.amount_N if rounded_N is None else rounded_N / width_N
        new[table] = parts._replace(amount_N=amount_N)
        first = last
    return new


def _round_widths(width_N: Floats, least: int) -> Floats | None:
    """Widths in multiples of 4 (one takes the rest), none under `least`, with the same sum; None if there
    are none."""
    total = round(float(width_N.sum()))
    step = COLUMN_ALIGNMENT
    rounded = np.maximum(np.floor(width_N / step + 1e-9) * step, -(-least // step) * step)
    if rounded.sum() > total:
        return None
    rest = total - rounded.sum()
    order = np.argsort(rounded - width_N, kind="stable")
    for index in np.resize(order, int(rest // step)):
        rounded[index] += step
    rounded[order[0]] += rest % step
    result: Floats = rounded
    return result
