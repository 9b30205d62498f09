"""Planner inputs drawn from seeds. Odd seeds are for development; even seeds are only for the report.

`draw(seed)` makes one input: a family of table sets with 4 to 2,000 tables, on 2 to 1,024 ranks in nodes of
eight.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from meshrec.planner import Table, Topology
from meshrec.planner.enumerators import build_problem
from meshrec.planner.estimators import CostModel

_MOST_WEIGHTS, _MOST_MEMORY = 0.4, 0.6
"""Shares of the memory of all ranks that weights, and the whole input, may take, unless the family says
otherwise.
"""
_MEMORY, _RESERVE = 80 * 2**30, 0.15


class PlannerInput(NamedTuple):
    """Tables and the machine to plan them for; `batch_size` samples per rank."""

    name: str
    family: str
    tables: tuple[Table, ...]
    topology: Topology
    batch_size: int


class _Sizes(NamedTuple):
    rows_T: npt.NDArray[np.float64]
    columns_T: npt.NDArray[np.int64]
    ids_T: npt.NDArray[np.float64]


_Random = np.random.Generator


def _log_uniform(random: _Random, least: float, most: float, count: int) -> npt.NDArray[np.float64]:
    return np.exp(random.uniform(math.log(least), math.log(most), count))


def _mixed(random: _Random, count: int) -> _Sizes:
    columns_T = random.choice([16, 32, 64, 96, 128, 192, 256], count)
    return _Sizes(_log_uniform(random, 1e3, 3e7, count), columns_T, _log_uniform(random, 1, 50, count))


def _few_large(random: _Random, count: int) -> _Sizes:
    columns_T = random.choice([64, 128, 256], count)
    return _Sizes(_log_uniform(random, 1e7, 2e8, count), columns_T, _log_uniform(random, 1, 20, count))


def _many_small(random: _Random, count: int) -> _Sizes:
    columns_T = random.choice([8, 16, 32, 64], count)
    return _Sizes(_log_uniform(random, 10, 1e5, count), columns_T, _log_uniform(random, 1, 10, count))


def _zipf(random: _Random, count: int) -> _Sizes:
    rank_T = random.permutation(count) + 1.0
    rows_T = np.maximum(1e8 / rank_T ** random.uniform(0.8, 1.5), 10)
    return _Sizes(rows_T, np.full(count, random.choice([32, 64, 128])), _log_uniform(random, 1, 30, count))


def _wide_and_narrow(random: _Random, count: int) -> _Sizes:
    is_wide_T = random.random(count) < 0.2
    columns_T = np.where(is_wide_T, random.choice([512, 768, 1024], count), random.choice([4, 8, 16], count))
    return _Sizes(_log_uniform(random, 1e3, 1e7, count), columns_T, _log_uniform(random, 1, 20, count))


def _multi_hot(random: _Random, count: int) -> _Sizes:
    columns_T = random.choice([64, 128], count)
    return _Sizes(_log_uniform(random, 1e4, 1e8, count), columns_T, _log_uniform(random, 20, 500, count))


def _one_giant(random: _Random, count: int) -> _Sizes:
    sizes = _mixed(random, count)
    sizes.rows_T[0] = 30 * sizes.rows_T[1:].sum()
    sizes.columns_T[0], sizes.ids_T[0] = 128, 50.0
    return sizes


_FAMILIES: dict[str, tuple[Callable[[_Random, int], _Sizes], tuple[int, int], float | None]] = {
    "few large": (_few_large, (4, 40), None),
    "many small": (_many_small, (100, 2000), None),
    "zipf": (_zipf, (8, 2000), None),
    "wide and narrow": (_wide_and_narrow, (8, 1000), None),
    "multi-hot": (_multi_hot, (4, 500), None),
    "memory 60 %": (_mixed, (4, 1000), 0.6),
    "memory 80 %": (_mixed, (4, 1000), 0.8),
    "memory 95 %": (_mixed, (4, 1000), 0.95),
    "one giant": (_one_giant, (4, 500), None),
    "mixed": (_mixed, (4, 2000), None),
}
"""A family of inputs: distribution of sizes, number of tables, and least share of the memory that any plan
takes.
"""
NUM_FAMILIES = len(_FAMILIES)


def draw(seed: int) -> PlannerInput:
    """Draw the input of a seed. Seeds 2k and 2k + 1 share a family; there are ten families in rotation."""
    family = list(_FAMILIES)[seed // 2 % NUM_FAMILIES]
    sizes_of, (least, most), memory = _FAMILIES[family]
    random = np.random.default_rng(seed)
    count = round(float(_log_uniform(random, least, most, 1)[0]))
    num_ranks = 2 ** int(random.integers(1, 11))
    return _input(f"seed {seed}", family, sizes_of(random, count), num_ranks, 65536, memory)


def largest(seed: int) -> PlannerInput:
    """Return an input of 2,000 tables on 1,024 ranks."""
    sizes = _mixed(np.random.default_rng(seed), 2000)
    return _input(f"seed {seed}, largest", "mixed", sizes, 1024, 65536, None)


def random_input(num_tables: int, num_ranks: int) -> PlannerInput:
    """Draw tables of all sizes: rows log-uniform in 1e3..3e7, widths 32 to 256, pooling log-uniform in
    1..100.
    """
    random = np.random.default_rng(0)
    rows_T = _log_uniform(random, 1e3, 3e7, num_tables).astype(int)
    columns_T = random.choice([32, 64, 128, 256], num_tables)
    ids_T = np.exp(random.uniform(0.0, math.log(100), num_tables))
    sizes = _Sizes(rows_T.astype(float), columns_T, ids_T)
    topology = Topology(world_size=num_ranks, hardware="h100")
    batch_size = max(65536 // num_ranks, 1)
    return PlannerInput(f"random_{num_tables} on {num_ranks}", "named", _tables(sizes), topology, batch_size)


def _tables(sizes: _Sizes) -> tuple[Table, ...]:
    return tuple(
        Table(
            name=f"t{index}",
            num_embeddings=int(rows),
            embedding_dim=int(columns),
            pooling_factors=(float(ids),),
        )
        for index, (rows, columns, ids) in enumerate(zip(*sizes, strict=True))
    )


def _input(
    name: str, family: str, sizes: _Sizes, num_ranks: int, global_batch: int, memory: float | None
) -> PlannerInput:
    """Reduce the rows and the batch until the tables fit on the ranks."""
    room = num_ranks * _MEMORY * (1 - _RESERVE)
    weights = float((sizes.rows_T * (4 * sizes.columns_T + 4)).sum())
    rows_T = np.maximum(sizes.rows_T * min(1.0, _MOST_WEIGHTS * room / weights), 4).astype(int)
    tables = _tables(sizes._replace(rows_T=rows_T.astype(float)))
    batch_size = max(global_batch // num_ranks, 1)
    topology = Topology(world_size=num_ranks, local_world_size=min(8, num_ranks), hardware="h100")
    while batch_size > 1 and _least_bytes(tables, topology, batch_size) > _MOST_MEMORY * room / num_ranks:
        batch_size //= 2
    if memory is not None:
        cap = round(_least_bytes(tables, topology, batch_size) / memory / (1 - _RESERVE))
        topology = Topology(
            world_size=num_ranks, local_world_size=min(8, num_ranks), hardware="h100", hbm_cap=cap
        )
    return PlannerInput(f"{name}: {len(tables)} x {num_ranks}", family, tables, topology, batch_size)


def _least_bytes(tables: tuple[Table, ...], topology: Topology, batch_size: int) -> float:
    """Return the bytes per rank that every plan needs: those of tables that are split into pieces of this
    size.
    """
    problem = build_problem(CostModel(tables, topology, batch_size=batch_size), {})
    mean_C, piece_C = problem.mean_bytes_C(), problem.piece_bytes_C() + problem.common_bytes_C

    def needed(cap: float) -> float:
        least_Y = np.full(int(problem.type_C[-1]) + 1, np.inf)
        np.minimum.at(least_Y, problem.type_C, np.where(piece_C <= cap, mean_C, np.inf))
        return float(least_Y[problem.type_T].sum())

    low, high = needed(np.inf), float(mean_C.max()) * len(tables) + float(piece_C.max())
    while high - low > 1e-4 * low:
        middle = (low + high) / 2
        low, high = (low, middle) if needed(middle) <= middle else (middle, high)
    return high
