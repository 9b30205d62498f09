"""A stream of events in a folder, and a recipe that learns from it: hashed users come and go."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from meshrec.data.features import Features, Key, Label, Number, Vocabulary
from meshrec.optim import RowWiseAdagrad
from meshrec.train import DenseOptimizer, DLRMConfig, Parquet, Recipe, Schedule, Training, WideDeepConfig

# They need no data to be fitted.
FEATURES = Features(
    labels=(Label(column="clicked"),),
    features=(
        Number(name="price", missing=0.0),
        Key(name="user", max_rows=500, ttl_seconds=600),
        Key(name="item", max_rows=90, min_count=2),
    ),
)


def events(first: int, num: int) -> pa.Table:
    """Events ``first`` to ``first + num``, a second apart. Their contents depend on their numbers only."""
    numbers = np.arange(first, first + num)
    draws = np.stack([np.random.default_rng(int(number)).random(4) for number in numbers])
    users = numbers // 10 + (20 * draws[:, 0]).astype(np.int64)
    return pa.table(
        {
            "clicked": draws[:, 1] < 0.2 + 0.6 * (users % 2),
            "price": draws[:, 2],
            "user": users * 0x5851F42D4C957F2D % (1 << 62),
            "item": (120 * draws[:, 3] ** 2).astype(np.int64),
            "city": [f"city {number % 7}" for number in numbers.tolist()],
            "ts": 1_700_000_000.0 + numbers,
            "number": numbers,
        }
    )


def write_events(folder: Path, first: int, num: int) -> None:
    """Add a file to a followed folder."""
    folder.mkdir(exist_ok=True)
    path = folder / f"{first:08d}.parquet"
    pq.write_table(events(first, num), folder / f"_{path.name}", row_group_size=128)
    (folder / f"_{path.name}").rename(path)


def recipe(*, features: Features = FEATURES, train: tuple[str, ...] = ("missing",)) -> Recipe:
    return Recipe(
        name="events",
        data=Parquet(train=train, features=features),
        model=DLRMConfig(embedding_dim=8, bottom=(8,), top=(16,), table_std=0.1),
        tables=RowWiseAdagrad(lr=0.1),
        dense=DenseOptimizer(lr=0.01),
        schedule=Schedule(warmup_steps=5),
        training=Training(batch_size=20),
    )


def fitted() -> Recipe:
    """With a vocabulary, which data must fit, and with the model of proposed recipes."""
    features = replace(FEATURES, features=(*FEATURES.features, Vocabulary(name="city")))
    model = WideDeepConfig(embedding_dim=8, layers=(16,), fit_wide=True, fit_trees=2, shrinkage=3.0)
    return replace(recipe(features=features), model=model)


def without_city() -> Recipe:
    """The model of `fitted`, without its vocabulary."""
    return replace(fitted(), data=recipe().data)
