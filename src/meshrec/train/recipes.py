"""Built-in recipes: on packaged and synthetic data, and with published settings on data that you download.

The published settings of next-item models come from the public repository
facebookresearch/generative-recommenders, folder ``configs``. The reference metrics are in the paper: Zhai et
al., "Actions speak louder than words: trillion-parameter sequential transducers for generative
recommendations" (2024). These recipes differ from the repository in four points:

- The validation item is not the test item. The repository selects the epoch on test items.
- Training uses all windows of a user's items, not only the last window.
- All targets in a step share the same sampled negatives.
- Adam has torch's default betas.
"""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from meshrec.data.log_columns import LogColumns
from meshrec.models import SampledSoftmax
from meshrec.optim import Adam
from meshrec.train.architectures import (
    DeepFMConfig,
    DINConfig,
    DLRMConfig,
    DLRMDCNConfig,
    MultiTaskConfig,
    TwoTowerConfig,
)
from meshrec.train.hstu_ranking import hstu_ranker
from meshrec.train.log_sources import BooksRatings, MovieLensSequences
from meshrec.train.losses import BinaryCrossEntropy, NextItem, Task, Tasks
from meshrec.train.next_item_configs import BERT4RecConfig, GRU4RecConfig, HSTUConfig, SASRecConfig
from meshrec.train.published import avazu, criteo_kaggle, movielens_20m
from meshrec.train.recipe import DataSource, DenseOptimizer, ModelConfig, Placement, Recipe, Training
from meshrec.train.schedule import Schedule
from meshrec.train.sources import MovieLens, SyntheticClicks

_DOT_PRODUCTS = SampledSoftmax(num_negatives=1024)


def movielens_dlrm() -> Recipe:
    """Return a recipe for DLRM on MovieLens ratings: will this user like this movie?"""
    return Recipe(
        name="movielens_dlrm",
        data=MovieLens(),
        model=DLRMConfig(embedding_dim=128, bottom=(32,), top=(256, 128)),
        tables=Adam(lr=3e-3, weight_decay=0.1, decoupled_weight_decay=True),
        dense=DenseOptimizer(kind="adamw", lr=5e-4, weight_decay=0.1),
        schedule=Schedule(decay="linear"),
        training=Training(batch_size=1024, epochs=4, evaluate_every=26, patience=3, phases_every=20),
        # Shard the table of movies, as if it were too large for a single rank.
        placement=Placement(replicate_mib=1.0),
    )


def synthetic_clicks() -> Recipe:
    """Return a recipe for DLRM on synthetic clicks: how close does it come to the best possible AUC?"""
    return Recipe(
        name="synthetic_clicks",
        data=SyntheticClicks(),
        model=DLRMConfig(embedding_dim=16, bottom=(64,), top=(128, 64)),
        tables=Adam(lr=5e-3),
        dense=DenseOptimizer(kind="adam", lr=2e-3),
        schedule=Schedule(warmup_steps=50, decay="linear"),
        training=Training(batch_size=2048, epochs=3),
    )


def dlrm_benchmark() -> Recipe:
    """Return a recipe for DLRM as in the step benchmark: 26 tables of 100,000 rows x 64, 4 IDs per bag."""
    return Recipe(
        name="dlrm_benchmark",
        data=SyntheticClicks(
            num_features=26, num_embeddings=100_000, ids_per_feature=4, num_dense=13, exponent=1.05
        ),
        model=DLRMConfig(embedding_dim=64, bottom=(512, 256), top=(512, 512, 256)),
        dense=DenseOptimizer(kind="adagrad", lr=0.02),
        training=Training(batch_size=2048, max_steps=200, phases_every=10),
    )


def din() -> Recipe:
    """Return a recipe for DIN on MovieLens ratings: will this user like this movie, given earlier ratings?"""
    return _movielens_recipe("din", DINConfig(embedding_dim=64, attention=(64, 32), over=(128, 64)))


def deepfm() -> Recipe:
    """Return a recipe for DeepFM on MovieLens ratings: will this user like this movie?"""
    return _movielens_recipe("deepfm", DeepFMConfig(embedding_dim=64, bottom=(32,), deep=(256, 128)))


def dcn() -> Recipe:
    """Return a recipe for DCN-v2 (DLRM-DCN) on MovieLens ratings: will this user like this movie?"""
    return _movielens_recipe(
        "dcn", DLRMDCNConfig(embedding_dim=64, bottom=(32,), top=(256, 128), low_rank_dim=64)
    )


def mmoe() -> Recipe:
    """Return a recipe for MMoE on MovieLens ratings: will this user like this movie, and give it 5 stars?"""
    return dataclasses.replace(
        _movielens_recipe("mmoe", MultiTaskConfig(mixture="mmoe", embedding_dim=64, expert=(128, 64))),
        data=MovieLens(liked_from=(4.0, 5.0)),
        loss=Tasks(tasks=(Task("from_4", BinaryCrossEntropy()), Task("from_5", BinaryCrossEntropy()))),
    )


def sasrec() -> Recipe:
    """Return a recipe for SASRec on MovieLens ratings: which movie does a user rate next?"""
    return _next_item_recipe("sasrec", SASRecConfig(softmax=_DOT_PRODUCTS))


def hstu() -> Recipe:
    """Return a recipe for HSTU on MovieLens ratings: which movie does a user rate next?"""
    return _next_item_recipe("hstu", HSTUConfig(softmax=_cosine_softmax(1024)))


def bert4rec() -> Recipe:
    """Return a recipe for BERT4Rec on MovieLens ratings: which movie does a user rate next?"""
    return _next_item_recipe("bert4rec", BERT4RecConfig(softmax=_DOT_PRODUCTS))


def gru4rec() -> Recipe:
    """Return a recipe for GRU4Rec on MovieLens ratings: which movie does a user rate next?"""
    return _next_item_recipe("gru4rec", GRU4RecConfig(softmax=_DOT_PRODUCTS))


def two_tower() -> Recipe:
    """Return a recipe for two towers on MovieLens ratings: which movie, of all, does a user rate next?"""
    return Recipe(
        name="two_tower",
        data=MovieLensSequences(history=20, windows=False),
        model=TwoTowerConfig(embedding_dim=64, layers=(128, 64)),
        loss=NextItem(),
        tables=Adam(lr=2e-3),
        dense=DenseOptimizer(kind="adam", lr=1e-3),
        training=Training(batch_size=512, epochs=6, patience=2, log_every=48),
    )


def sasrec_ml1m() -> Recipe:
    """Return a recipe for SASRec on ml-1m as published: 2 blocks of width 50."""
    return _ml_1m_recipe("sasrec_ml1m", SASRecConfig)


def hstu_ml1m() -> Recipe:
    """Return a recipe for HSTU on ml-1m as published: 2 layers of width 50."""
    return _ml_1m_recipe("hstu_ml1m", HSTUConfig)


def hstu_large_ml1m() -> Recipe:
    """Return a recipe for HSTU-large on ml-1m as published: 8 layers of width 50 with 2 heads."""
    return _ml_1m_recipe("hstu_large_ml1m", HSTUConfig, num_blocks=8, num_heads=2)


def sasrec_ml20m() -> Recipe:
    """Return a recipe for SASRec on ml-20m as published: 4 blocks of width 256 with 4 heads."""
    return _ml_20m_recipe("sasrec_ml20m", SASRecConfig, num_blocks=4, num_heads=4)


def hstu_ml20m() -> Recipe:
    """Return a recipe for HSTU on ml-20m as published: 4 layers of width 256 with 4 heads."""
    return _ml_20m_recipe("hstu_ml20m", HSTUConfig, num_blocks=4, num_heads=4)


def hstu_large_ml20m() -> Recipe:
    """Return a recipe for HSTU-large on ml-20m as published: 16 layers of width 256 with 8 heads."""
    return _ml_20m_recipe("hstu_large_ml20m", HSTUConfig, num_blocks=16, num_heads=8)


def sasrec_books() -> Recipe:
    """Return a recipe for SASRec on Amazon books as published: 4 blocks of width 64 with 4 heads."""
    return _books_recipe("sasrec_books", SASRecConfig, num_blocks=4, num_heads=4)


def hstu_books() -> Recipe:
    """Return a recipe for HSTU on Amazon books as published: 4 layers of width 64 with 4 heads."""
    return _books_recipe("hstu_books", HSTUConfig, num_blocks=4, num_heads=4)


def hstu_large_books() -> Recipe:
    """Return a recipe for HSTU-large on Amazon books as published: 16 layers of width 64 with 8 heads."""
    return _books_recipe("hstu_large_books", HSTUConfig, num_blocks=16, num_heads=8)


RECIPES: Mapping[str, Callable[[], Recipe]] = {
    function.__name__: function
    for function in (
        *(movielens_dlrm, synthetic_clicks, dlrm_benchmark, din, deepfm, dcn, mmoe, hstu_ranker),
        *(criteo_kaggle, avazu, movielens_20m),
        *(sasrec, hstu, bert4rec, gru4rec, two_tower),
        *(sasrec_ml1m, hstu_ml1m, hstu_large_ml1m),
        *(sasrec_ml20m, hstu_ml20m, hstu_large_ml20m),
        *(sasrec_books, hstu_books, hstu_large_books),
    )
}
"""Functions of the built-in recipes, by name."""


def _movielens_recipe(name: str, model: ModelConfig) -> Recipe:
    """Return the recipe `movielens_dlrm` with another name and model."""
    return dataclasses.replace(
        movielens_dlrm(),
        name=name,
        model=model,
        training=Training(batch_size=1024, epochs=4, evaluate_every=26, patience=3),
    )


def _next_item_recipe(name: str, model: ModelConfig) -> Recipe:
    """Return a recipe for the packaged MovieLens ratings, which evaluates about once per epoch."""
    # An epoch has about 572 steps of 16 samples, and training metrics are logged four times in it.
    return Recipe(
        name=name,
        data=MovieLensSequences(history=50),
        model=model,
        loss=NextItem(),
        tables=Adam(lr=6e-3),
        dense=DenseOptimizer(kind="adam", lr=1e-3),
        schedule=Schedule(warmup_steps=50, decay="linear"),
        training=Training(batch_size=16, epochs=16, evaluate_every=572, log_every=143),
    )


def _ml_1m_recipe(name: str, config: Callable[..., ModelConfig], **options: Any) -> Recipe:
    """Return a recipe with the published settings for ml-1m."""
    model = config(embedding_dim=50, softmax=_cosine_softmax(128), **options)
    return _published_recipe(name, _movielens_ratings("ml-1m", 1_000_209), model, epochs=101)


def _ml_20m_recipe(name: str, config: Callable[..., ModelConfig], **options: Any) -> Recipe:
    """Return a recipe with the published settings for ml-20m; the arguments are those of `_ml_1m_recipe`."""
    model = config(embedding_dim=256, softmax=_cosine_softmax(128), **options)
    return _published_recipe(name, _movielens_ratings("ml-20m", 20_000_263), model, epochs=101)


def _books_recipe(name: str, config: Callable[..., ModelConfig], **options: Any) -> Recipe:
    """Return a recipe with the published settings for Amazon books.

    The arguments are those of `_ml_1m_recipe`.
    """
    model = config(dropout=0.5, softmax=_cosine_softmax(512), **options)
    return _published_recipe(name, BooksRatings(path=Path("books")), model, epochs=201)


def _cosine_softmax(num_negatives: int) -> SampledSoftmax:
    """Return a sampled softmax loss over cosine similarities, with the published temperature."""
    return SampledSoftmax(num_negatives=num_negatives, similarity="cosine", temperature=0.05)


def _movielens_ratings(folder: str, num_ratings: int) -> MovieLensSequences:
    """Return a data source for the ratings in a MovieLens folder, with histories of up to 200 movies."""
    columns = LogColumns(item="movie", rating="rating", ties="shuffle")
    return MovieLensSequences(path=Path(folder), history=200, num_ratings=num_ratings, columns=columns)


def _published_recipe(name: str, data: DataSource, model: ModelConfig, *, epochs: int) -> Recipe:
    """Return a recipe with the published optimizers and batch size."""
    return Recipe(
        name=name,
        data=data,
        model=model,
        loss=NextItem(),
        tables=Adam(lr=1e-3),
        dense=DenseOptimizer(kind="adamw", lr=1e-3),
        training=Training(batch_size=128, epochs=epochs, patience=10),
    )
