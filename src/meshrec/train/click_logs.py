"""The source of clicks with histories: a log of what users were shown."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from meshrec.data.log_columns import LogColumns
from meshrec.train.recipe import DataSource

if TYPE_CHECKING:
    import pyarrow as pa

    from meshrec.data import Dataset
    from meshrec.data.features import Features
    from meshrec.train.sources import Frame

_COLUMNS = LogColumns()


@dataclass(frozen=True, kw_only=True)
class ClickLog(DataSource):
    """A log of what users were shown, and whether they clicked: will this user click this item?

    The files are Parquet or CSV, and are read into memory. Each row becomes a sample with the items that the
    user clicked before, see `meshrec.data.click_logs.with_histories`. The latest rows are held out. A run
    learns the vocabularies once, on the training rows, and stores them in its folder.
    """

    log: tuple[str, ...]
    """Files of the log: paths, folders or patterns."""
    columns: LogColumns = _COLUMNS
    """The columns of the log, and the rows that count."""
    label: str = "clicked"
    """Column that is 1 where the user clicked, and 0 elsewhere."""
    history: int = 20
    """Maximum number of items in a history."""
    validation_share: float = 0.1
    """Share of the rows for validation, which come before those of the test."""
    test_share: float = 0.1
    """Share of the rows for the test, the latest ones."""
    on_error: Literal["raise", "skip"] = "raise"
    """Handling of damaged rows."""
    seed: int = 0
    """Seed of the shuffle."""

    def table(self, data: Any = None) -> "pa.Table":
        """Read the log, or another one of the same form, with the history of each row."""
        from meshrec.data.click_logs import with_histories
        from meshrec.data.faults import Faults
        from meshrec.data.frames import read_columns
        from meshrec.data.interactions import HISTORY
        from meshrec.data.logs import LogTable

        paths = self.log if data is None else data
        name = paths if isinstance(paths, str) else str(paths[0])
        table = read_columns(paths, [*self.columns.names(), self.label, HISTORY])
        log = LogTable(Path(name).name, table, self.columns)
        return with_histories(log, self.label, self.history, Faults(self.on_error))

    def fit(self) -> "Features":
        """Learn the vocabularies of the training rows."""
        return self._frame().fit()

    def dataset(self, features: "Features") -> "Dataset":
        """Make the dataset with features that are fitted already."""
        return self._frame().dataset(features)

    def scored(self, features: "Features", data: Any, *, labelled: bool) -> "Dataset":
        """Open another log, whose rows have their histories from it."""
        from meshrec.data.interactions import HISTORY

        found = self._frame(data).scored(features, self.table(data), labelled=labelled)
        # The history was derived: beside a score, user and item say which row it is.
        return replace(found, id_columns=tuple(each for each in found.id_columns if each != HISTORY))

    def raw_schema(self, features: "Features") -> "pa.Schema":
        """Return the columns of a row with its history, and their types."""
        return self.table().schema

    def load(self) -> "Dataset":
        """Learn the vocabularies, and make the dataset."""
        return self.dataset(self.fit())

    def _frame(self, data: Any = None) -> "Frame":
        from meshrec.data.click_logs import features_of_clicks
        from meshrec.train.sources import Frame

        return Frame(
            train=self.table(data),
            features=features_of_clicks(self.columns, self.label, self.history),
            split_by="time",
            split_column=self.columns.time,
            split_validation=self.validation_share,
            split_test=self.test_share,
            on_error=self.on_error,
            seed=self.seed,
        )
