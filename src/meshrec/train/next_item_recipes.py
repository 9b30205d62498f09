"""Recipes for next-item models: on packaged ratings, and with published settings on data that you download.

The published settings come from the public repository facebookresearch/generative-recommenders, folder
``configs``. The reference metrics are in the paper: Zhai et al., "Actions speak louder than words:
trillion-parameter sequential transducers for generative recommendations" (2024). These recipes differ from
the repository in four points:

- The validation item is not the test item. The repository selects the epoch on test items.
- Training uses all windows of a user's items, not only the last window.
- All targets in a step share the same sampled negatives.
- Adam has torch's default betas.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from meshrec.data.log_columns import LogColumns
from meshrec.models import SampledSoftmax
from meshrec.optim import Adam
from meshrec.train.architectures import TwoTowerConfig
from meshrec.train.log_sources import BooksRatings, MovieLensSequences
from meshrec.train.losses import NextItem
from meshrec.train.next_item_configs import (
    BERT4RecConfig,
    GRU4RecConfig,
    HSTUConfig,
    SASRecConfig,
)
from meshrec.train.recipe import DataSource, DenseOptimizer, ModelConfig, Recipe, Training
from meshrec.train.schedule import Schedule

_DOT_PRODUCTS = SampledSoftmax(num_negatives=1024)


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


NEXT_ITEM_RECIPES = {
    function.__name__: function
    for function in (
        *(sasrec, hstu, bert4rec, gru4rec, two_tower),
        *(sasrec_ml1m, hstu_ml1m, hstu_large_ml1m),
        *(sasrec_ml20m, hstu_ml20m, hstu_large_ml20m),
        *(sasrec_books, hstu_books, hstu_large_books),
    )
}
"""All recipes in this file, by name."""


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
    """Return a recipe with the published settings for ml-1m.

    Args:
        name: recipe name.
        config: class of the model configuration.
        options: further fields of the model configuration.
    """
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
