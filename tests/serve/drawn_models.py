"""Models of every architecture on drawn features, and data for them. A run keeps a copy of this file."""

import os
from datetime import date, datetime, timedelta

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from meshrec.data.features import (
    Buckets,
    Cross,
    DatePart,
    Features,
    Hashed,
    Integer,
    Key,
    Label,
    Number,
    Vocabulary,
)
from meshrec.optim import Adam
from meshrec.train import (
    BERT4RecConfig,
    BinaryCrossEntropy,
    ClickTowersConfig,
    DeepFMConfig,
    DINConfig,
    DLRMConfig,
    DLRMDCNConfig,
    GRU4RecConfig,
    HSTUConfig,
    Log,
    MultiTaskConfig,
    Parquet,
    Recipe,
    SASRecConfig,
    SquaredError,
    Task,
    Tasks,
    Training,
    TwoTowerConfig,
    WideDeepConfig,
)

START = datetime(2024, 1, 1)
ONLY_UNSEEN = "v21"
"""A user of new logs whose items training did not meet."""
CLICKS = (
    DLRMConfig(embedding_dim=4, bottom=(8,), top=(8,)),
    WideDeepConfig(embedding_dim=4, layers=(8,), members=2),
    DINConfig(embedding_dim=4, attention=(4,), over=(8,)),
    DLRMDCNConfig(embedding_dim=4, bottom=(8,), top=(8,), low_rank_dim=4),
    ClickTowersConfig(item_features=("item",), embedding_dim=4, layers=(8, 4)),
    WideDeepConfig(embedding_dim=4, layers=(8,), fit_wide=True, fit_trees=5),
    DeepFMConfig(embedding_dim=4, bottom=(8,), deep=(8,)),
    WideDeepConfig(embedding_dim=4, layers=(8,), fit_wide=True),
)
TASKS = MultiTaskConfig(mixture="ple", embedding_dim=4, expert=(8,), tower=(4,))
HISTORIES = (
    HSTUConfig(embedding_dim=8),
    SASRecConfig(embedding_dim=8),
    TwoTowerConfig(embedding_dim=8, layers=(8, 8)),
    GRU4RecConfig(embedding_dim=8, hidden_dim=8),
    BERT4RecConfig(embedding_dim=8),
)


def clicks_of(rng: np.random.Generator, num: int, *, is_new: bool) -> pa.Table:
    """Draw rows with a column of every kind; new ones have unseen values, nulls and very long lists."""
    high = 60 if is_new else 30

    def column(value, kind: pa.DataType, share: float = 0.2) -> pa.Array:
        numbers, null = rng.integers(0, high, num).tolist(), rng.random(num) < share
        null[0] = False
        return pa.array([None if no else value(x) for x, no in zip(numbers, null, strict=True)], kind)

    def several(value):
        longest = 300 if is_new and rng.random() < 0.1 else 6
        return [
            None if rng.random() < 0.1 else value(int(x))
            for x in rng.integers(0, high, rng.integers(longest))
        ]

    data = pa.table(
        {
            "y": rng.integers(0, 2, num),
            "item": column(lambda x: x * (1 << 34 if x > 50 else 1), pa.int64()),
            "past": column(lambda _: several(int), pa.list_(pa.int64())),
            "user": column(lambda x: ["", " u0", "ü"][x] if x < 3 else f"u{x}", pa.string()),
            "code": column(lambda x: x - 4, pa.int64() if is_new else pa.int8()),
            "row": column(lambda x: x % 30, pa.int32()),
            "flag": column(lambda x: x > 9, pa.bool_()),
            "price": column(lambda x: [np.nan, x / 3, -1e9][(x > 1) + (x > 55)], pa.float64()),
            "rate": column(lambda x: x / 7, pa.float32()),
            "at": column(lambda x: START + timedelta(hours=5 * x), pa.timestamp("ms")),
            "day": column(lambda x: date(2024, 1, 1) + timedelta(days=x), pa.date32()),
            "tags": column(lambda _: several("t{}".format), pa.list_(pa.string())),
            "words": column(lambda x: f" a{x} | b{x % 5}||", pa.string()),
        }
    )
    weights = [
        None if past is None else [1 / (1 + at) for at in range(len(past))]
        for past in data["past"].to_pylist()
    ]
    data = data.append_column("counts", pa.array(weights, pa.list_(pa.float32())))
    return data.append_column("spent", pc.multiply(data["y"], 2.5))


def features_of(rng: np.random.Generator, kind: str = "clicks") -> Features:
    """Draw features: an item and its history, and some of every kind.

    ``kind``: of ``weighted`` features, the history is a bag of weighted IDs; of ``tasks``, there are two
    labels.
    """
    pool = [
        Number(name="price", missing=0.5, standardize=True, clip=(0.1, 0.9)),
        Number(name="rate", missing=0.0, log=True, num_bins=4),
        Number(name="month", column="at", part="month", missing=0.0),
        Buckets(name="prices", column="price", num_buckets=5),
        Buckets(name="day", num_buckets=3),
        DatePart(name="hour", column="at", part="hour"),
        Vocabulary(name="user", min_count=2, num_unseen=3),
        Vocabulary(name="rates", column="rate"),
        Vocabulary(name="words", separator="|"),
        Hashed(name="users", column="user", num_embeddings=40, seed=3),
        Hashed(name="tags", num_embeddings=50, max_length=3),
        Hashed(name="days", column="day", num_embeddings=20),
        Integer(name="row", num_embeddings=30, missing=0),
        Key(name="code", max_rows=500, evict="error"),
        Cross(name="both", columns_crossed=("user", "flag", "code"), num_embeddings=99),
    ]
    chosen = rng.choice(len(pool), rng.integers(3, 9), replace=False)
    item = Vocabulary(name="item", num_unseen=2)
    kept = {"weights": "counts"} if kind == "weighted" else {"sequence": True}
    past = Vocabulary(name="past", table="item", num_unseen=2, max_length=5, **kept)
    labels = (Label(column="y"), *((Label(column="spent", kind="number"),) if kind == "tasks" else ()))
    return Features(labels=labels, features=(item, past, *(pool[at] for at in sorted(chosen))))


def log_of(rng: np.random.Generator, *, is_new: bool) -> pa.Table:
    """Draw a log; a new one has unseen items and users, long histories, and a user of unseen items alone."""
    rows = []
    for user in range(8 if is_new else 40):
        num = int(rng.integers(3, 60 if is_new else 12))
        items = [f"s{item}" for item in rng.integers(0, 40 if is_new else 25, num)]
        name = f"v{user * (5 if is_new and user % 2 == 0 else 7)}"
        if is_new and name == ONLY_UNSEEN:
            items = ["new", "newer"]
        rows += [(name, item, 1_700_000_000 + 3600 * at) for at, item in enumerate(items)]
    return pa.table(dict(zip(("user", "item", "time"), map(list, zip(*rows, strict=True)), strict=True)))


def recipe() -> Recipe:
    """The recipe of the draw that the environment names: its seed, and the folder of its data."""
    kind, number, folder = os.environ["MESHREC_DRAWN"].split(":")
    seed, file = int(number), (os.path.join(folder, "train.parquet"),)
    rng = np.random.default_rng([seed, 1])
    options = {"name": "drawn", "training": Training(batch_size=64, seed=seed)}
    if kind != "histories":
        models = CLICKS
        if kind == "weighted":  # DIN reads its history item by item, not as a weighted bag
            models = [model for model in CLICKS if not isinstance(model, DINConfig)]
        model = TASKS if kind == "tasks" else models[seed % len(models)]
        if kind == "tasks":
            options["loss"] = Tasks(tasks=(Task("y", BinaryCrossEntropy()), Task("spent", SquaredError())))
        data = Parquet(train=file, features=features_of(rng, kind), split_by="random", seed=seed)
        return Recipe(data=data, model=model, **options)
    from meshrec.train.recipes import two_tower

    model = HISTORIES[seed % len(HISTORIES)]
    is_tower = isinstance(model, TwoTowerConfig)
    hashed = 200 if not is_tower and rng.random() < 0.3 else None
    log = Log(log=file, history=int(rng.integers(3, 9)), windows=not is_tower, hashed=hashed, seed=seed)
    return Recipe(data=log, model=model, loss=two_tower().loss, tables=Adam(lr=0.01), **options)
