"""A recipe on Parquet files of raw IDs, integers and texts, whose tables are hashed."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from meshrec.data.features import Features, Key, Label, Number, Vocabulary
from meshrec.optim import RowWiseAdagrad
from meshrec.train import DenseOptimizer, DLRMConfig, Parquet, Recipe, Training

FEATURES = Features(
    labels=(Label(column="clicked"),),
    features=(
        Number(name="price", missing=0.0),
        Key(name="user", max_rows=60, min_count=2),
        Key(name="words", max_rows=500, max_length=3),
        Vocabulary(name="city"),
    ),
)


def visits(num: int, seed: int = 0) -> pa.Table:
    """Users come and go: at any time 80 of them are about."""
    rng = np.random.default_rng(seed)
    users = (rng.integers(0, 80, num) + np.arange(num) // 20) * 0x5851F42D4C957F2D
    return pa.table(
        {
            "clicked": rng.random(num) < 0.2 + 0.6 * (users % 2),
            "price": rng.random(num),
            "user": users.astype(np.int64),
            "words": [[f"w{word}" for word in rng.integers(0, 99, rng.integers(0, 4))] for _ in range(num)],
            "city": [f"city {each}" for each in rng.integers(0, 9, num)],
            "time": np.arange(num),
        }
    )


def write_visits(folder: Path, num: int = 1500) -> None:
    pq.write_table(visits(num), folder / "all.parquet", row_group_size=400)


def recipe() -> Recipe:
    return Recipe(
        name="visits",
        data=Parquet(train=("missing",), features=FEATURES, split_by="time", split_column="time"),
        model=DLRMConfig(embedding_dim=8, bottom=(8,), top=(16,), table_std=0.1),
        tables=RowWiseAdagrad(lr=0.1),
        dense=DenseOptimizer(lr=0.01),
        training=Training(batch_size=100, log_every=5),
    )
