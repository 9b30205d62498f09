"""Task files: table sets as JSON, for the command line and the benchmark."""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from meshrec.planner.json_file import read_json
from meshrec.planner.types import OptimizerKind, Table

_WEIGHT_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}


@dataclass(frozen=True, kw_only=True)
class PlannerTask:
    """Tables to plan, and for how many samples.

    Attributes:
        name: what to call it.
        tables: the tables.
        global_batch_size: samples per step over all ranks.
        world_sizes: numbers of ranks that the task is meant for.
    """

    name: str
    tables: tuple[Table, ...]
    global_batch_size: int
    world_sizes: tuple[int, ...] = ()

    def batch_size(self, world_size: int) -> int:
        """Samples per rank."""
        return max(1, self.global_batch_size // world_size)


def load_task(path: str | Path) -> PlannerTask:
    """Reads a task file: ``task``, ``global_batch_size``, ``dtype``, ``world_sizes`` and ``tables``, each
    with ``name``, ``num_embeddings``, ``embedding_dim``, ``pooling_factors``. ValueError says what is
    missing.
    """
    data = read_json(path, "a task file")
    try:
        weight_bytes = _WEIGHT_BYTES[data.get("dtype", "fp32")]
        optimizer = OptimizerKind(data.get("optimizer", OptimizerKind.ROW_WISE_ADAGRAD.value))
        tables = tuple(
            Table(
                name=table["name"],
                num_embeddings=table["num_embeddings"],
                embedding_dim=table["embedding_dim"],
                pooling_factors=tuple(table["pooling_factors"]),
                weight_bytes=weight_bytes,
                optimizer=optimizer,
            )
            for table in data["tables"]
        )
        return PlannerTask(
            name=data["task"],
            tables=tables,
            global_batch_size=data["global_batch_size"],
            world_sizes=tuple(data.get("world_sizes", ())),
        )
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is no task file: missing or unknown: {error}. It needs task, global_batch_size, dtype "
            "(fp32, fp16, bf16) and tables, each with name, num_embeddings, embedding_dim, pooling_factors."
        ) from error


def random_task(num_tables: int, *, seed: int = 0, global_batch_size: int = 65536) -> PlannerTask:
    """Random tables: rows log-uniform in 1e3..3e7, dim of 32, 64, 128, 256, pooling log-uniform in 1..100."""
    generator = np.random.default_rng(seed)
    rows = np.exp(generator.uniform(math.log(1e3), math.log(3e7), num_tables)).astype(int)
    dims = generator.choice([32, 64, 128, 256], num_tables)
    pooling = np.exp(generator.uniform(0.0, math.log(100), num_tables))
    tables = tuple(
        Table(
            name=f"t{index}",
            num_embeddings=int(rows[index]),
            embedding_dim=int(dims[index]),
            pooling_factors=(float(pooling[index]),),
        )
        for index in range(num_tables)
    )
    return PlannerTask(name=f"random_{num_tables}", tables=tables, global_batch_size=global_batch_size)
