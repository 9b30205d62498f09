"""A recipe on Parquet files of strings, nulls and lists, whose features are fitted."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from meshrec.data.features import DatePart, Features, Hashed, Label, Number, Vocabulary
from meshrec.optim import RowWiseAdagrad
from meshrec.train import ClickTowersConfig, DenseOptimizer, DLRMConfig, Parquet, Recipe, Training

FEATURES = Features(
    labels=(Label(column="clicked"),),
    features=(
        Number(name="price", log=True, standardize=True, missing=0.0),
        Vocabulary(name="user", min_count=2),
        Vocabulary(name="tags", max_length=3),
        Hashed(name="city", num_embeddings=16),
        DatePart(name="hour", column="time", part="hour"),
    ),
)


def shop(num: int, seed: int = 0) -> pa.Table:
    rng = np.random.default_rng(seed)
    users = rng.integers(0, 40, num)
    cities = [None if each == 0 else f"city {each}" for each in rng.integers(0, 9, num)]
    return pa.table(
        {
            "clicked": rng.random(num) < 0.2 + 0.6 * (users % 2),
            "price": pa.array(rng.lognormal(size=num), mask=rng.random(num) < 0.1),
            "user": [f"user-{user}" for user in users],
            "tags": [[f"t{tag}" for tag in rng.integers(0, 9, rng.integers(0, 5))] for _ in range(num)],
            "city": cities,
            "time": pa.array(1000 * (1_700_000_000 + 60 * np.arange(num)), pa.timestamp("ms")),
        }
    )


def write_shop(folder: Path, num: int = 1500) -> None:
    pq.write_table(shop(num), folder / "all.parquet", row_group_size=400)


def source(**more) -> Parquet:
    return Parquet(
        **{"train": ("missing",), "features": FEATURES, "split_by": "time", "split_column": "time"} | more
    )


def recipe() -> Recipe:
    return Recipe(
        name="shop",
        data=source(),
        model=DLRMConfig(embedding_dim=8, bottom=(8,), top=(16,)),
        tables=RowWiseAdagrad(lr=0.1),
        dense=DenseOptimizer(lr=0.01),
        training=Training(batch_size=100, log_every=5),
    )


def two_towers() -> Recipe:
    return replace(
        recipe(), name="towers", model=ClickTowersConfig(item_features=("city", "tags"), layers=(8, 4))
    )
