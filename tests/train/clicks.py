"""Clicks as Parquet files, and a recipe that trains on them in a second."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from meshrec.data import parquet
from meshrec.data.features import Features, Hashed, Label, Number
from meshrec.optim import RowWiseAdagrad
from meshrec.train import DataSource, DenseOptimizer, DLRMConfig, Recipe, Training

SCHEMA = Features(
    labels=(Label(column="clicked"),),
    features=(
        Number(name="age", missing=0.0),
        Hashed(name="user", num_embeddings=64, missing=False),
        Hashed(name="tags", num_embeddings=32, missing=False, average_length=1.5),
    ),
)


def clicks(num: int, seed: int = 0) -> pa.Table:
    rng = np.random.default_rng(seed)
    users = rng.integers(0, 40, num)
    tags = [[f"t{tag}" for tag in rng.integers(0, 9, rng.integers(0, 4))] for _ in range(num)]
    return pa.table(
        {
            "clicked": (rng.random(num) < 0.2 + 0.6 * (users % 2)).astype(np.int64),
            "age": rng.normal(size=num).astype(np.float32),
            "user": [f"user-{user}" for user in users],
            "tags": tags,
        }
    )


def write_clicks(path: Path, num: int, seed: int = 0) -> Path:
    pq.write_table(clicks(num, seed), path, row_group_size=600)
    return path


@dataclass(frozen=True, kw_only=True)
class Clicks(DataSource):
    folder: Path = Path()
    """Where train.parquet and test.parquet are."""
    on_error: Literal["raise", "skip"] = "raise"
    """Handling of damaged rows."""

    def load(self):
        names = {"train": "train.parquet", "validation": "test.parquet"}
        paths = {part: self.folder / name for part, name in names.items()}
        return parquet(schema=SCHEMA, on_error=self.on_error, **paths)


def recipe() -> Recipe:
    return Recipe(
        name="clicks",
        data=Clicks(),
        model=DLRMConfig(embedding_dim=8, bottom=(8,), top=(16,)),
        tables=RowWiseAdagrad(lr=0.1),
        dense=DenseOptimizer(lr=0.01),
        training=Training(batch_size=100, epochs=1, log_every=5),
    )


def recipe_in(folder: Path) -> Recipe:
    return replace(recipe(), data=Clicks(folder=folder))
