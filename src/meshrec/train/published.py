"""Click recipes with published settings, for data that you must download.

The settings follow BARS (Zhu et al., "BARS: towards open benchmarking for recommender systems", 2022; "Open
benchmarking for click-through rate prediction", 2021). A recipe's docstring gives the metric that BARS
reports, and differences in the settings.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from meshrec.optim import Adam
from meshrec.train.architectures import DeepFMConfig, DLRMDCNConfig
from meshrec.train.recipe import DenseOptimizer, Recipe, Training
from meshrec.train.schedule import Schedule
from meshrec.train.sources import MovieLens, Parquet

if TYPE_CHECKING:
    from meshrec.data.features import Features

CRITEO_COLUMNS = ("label", *(f"I{n}" for n in range(1, 14)), *(f"C{n}" for n in range(1, 27)))
"""Columns of ``train.txt`` from Criteo's Kaggle challenge, a file without a header."""

# Category columns. The others are the label `click`, the time `hour`, and a unique `id`.
_AVAZU_IDS = (
    *("C1", "banner_pos", "site_id", "site_domain", "site_category", "app_id", "app_domain", "app_category"),
    *("device_id", "device_ip", "device_model", "device_type", "device_conn_type"),
    *(f"C{n}" for n in range(14, 22)),
)


def csv_to_parquet(
    source: Path | str,
    out: Path | str,
    *,
    columns: Sequence[str] = (),
    delimiter: str = ",",
    texts: Sequence[str] = (),
    times: Mapping[str, str] = MappingProxyType({}),
) -> int:
    """Convert a CSV file to Parquet, block by block, so the file may be larger than memory.

    Args:
        source: CSV file, plain or compressed.
        out: Parquet file to write. Its folder is created.
        columns: column names, for a file without a header.
        delimiter: character between values.
        texts: columns to read as strings, whatever their content.
        times: time columns with their format, such as ``{"hour": "%y%m%d%H"}``.

    Returns:
        Number of rows.

    Raises:
        ArrowInvalid: a line cannot be parsed.
    """
    import pyarrow as pa
    import pyarrow.csv as csv
    import pyarrow.parquet as pq

    types = dict.fromkeys(texts, pa.string()) | dict.fromkeys(times, pa.timestamp("s"))
    # With `strings_can_be_null`, empty strings count as missing values.
    convert = csv.ConvertOptions(
        column_types=types, timestamp_parsers=list(times.values()), strings_can_be_null=True
    )
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    rows = 0
    with (
        csv.open_csv(
            source,
            csv.ReadOptions(column_names=list(columns) or None),
            csv.ParseOptions(delimiter=delimiter),
            convert,
        ) as reader,
        pq.ParquetWriter(out, reader.schema) as writer,
    ):
        # Arrow reads a block of the file at a time.
        for block in reader:
            writer.write_batch(block)
            rows += block.num_rows
    return rows


def criteo_kaggle() -> Recipe:
    """Return a recipe for DeepFM on Criteo's Kaggle data (criteo_kaggle/train.parquet).

    BARS reports AUC 0.8143.
    """
    from meshrec.data.features import Buckets, Features, Label, Number, Vocabulary

    counts, names = [f"I{n}" for n in range(1, 14)], [f"C{n}" for n in range(1, 27)]
    features = Features(
        labels=(Label(column="label"),),
        features=(
            Number(name="first", column="I1", log=True, missing=0.0),
            *(Buckets(name=name, num_buckets=64) for name in counts),
            *(Vocabulary(name=name, min_count=10) for name in names),
        ),
    )
    model = DeepFMConfig(embedding_dim=16, bottom=(16,), deep=(1000,) * 5)
    return _click_recipe("criteo_kaggle", features, model, weight_decay=1e-5)


def avazu() -> Recipe:
    """Return a recipe for DeepFM on Avazu's Kaggle data (avazu/train.parquet).

    BARS reports AUC 0.7930 for Avazu_x4.
    """
    from meshrec.data.features import DatePart, Features, Label, Number, Vocabulary

    features = Features(
        labels=(Label(column="click"),),
        features=(
            Number(name="weekday_number", column="hour", part="weekday"),
            DatePart(name="hour_of_day", column="hour", part="hour"),
            DatePart(name="weekday", column="hour", part="weekday"),
            *(Vocabulary(name=name, min_count=2) for name in _AVAZU_IDS),
        ),
    )
    return _click_recipe("avazu", features, DeepFMConfig(embedding_dim=16, bottom=(16,), deep=(2000,) * 4))


def movielens_20m() -> Recipe:
    """Return a recipe for DCN-v2 on ml-20m: will this user like this movie?

    BARS does not report a metric for this task. The most similar BARS data set is MovielensLatest_x1, which
    has tags instead of ratings. DCN-v2 reaches AUC 0.9606 on it.
    """
    return Recipe(
        name="movielens_20m",
        data=MovieLens(path=Path("ml-20m")),
        model=DLRMDCNConfig(
            embedding_dim=16, bottom=(16,), top=(500, 500, 500), num_crosses=3, low_rank_dim=32
        ),
        tables=Adam(lr=1e-3),
        dense=DenseOptimizer(kind="adam", lr=1e-3),
        training=Training(batch_size=4096, epochs=3, evaluate_every=1000, patience=2),
    )


def _click_recipe(
    name: str, features: "Features", model: DeepFMConfig, *, weight_decay: float = 0.0
) -> Recipe:
    """Return a recipe for click data: random 80/10/10 split, batch size 10,000, Adam at learning rate 0.001.

    Args:
        name: recipe name, and folder with ``train.parquet``.
        features: features to make from the columns.
        model: model configuration.
        weight_decay: weight decay for the tables.
    """
    return Recipe(
        name=name,
        data=Parquet(train=(f"{name}/train.parquet",), split_by="random", features=features),
        model=model,
        tables=Adam(lr=1e-3, weight_decay=weight_decay),
        dense=DenseOptimizer(kind="adam", lr=1e-3),
        schedule=Schedule(decay="linear"),
        training=Training(batch_size=10_000, epochs=2, evaluate_every=1500, patience=3),
    )
