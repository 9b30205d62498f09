"""Data source for click logs, which adds the user's earlier clicks (the history) to every row."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from meshrec.data.csv_dialects import DETECTED, CsvFormat
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
    """A log of impressions (shown items) with click labels. The model predicts whether a user clicks an item.

    The files are Parquet or CSV, and are read into memory. Every row becomes a sample, together with the
    user's earlier clicks; see `meshrec.data.click_logs.with_histories`. The latest rows are held out for
    validation and test. A run learns vocabularies once, from the training rows, and stores them in the run
    folder.
    """

    log: tuple[str, ...]
    """Log files: paths, folders or patterns."""
    csv: CsvFormat = DETECTED
    """CSV format. Settings that are not given are detected."""
    columns: LogColumns = _COLUMNS
    """Names of the log's columns, and conditions by which rows are selected."""
    label: str = "clicked"
    """Column with 1 if the user clicked the item, and 0 otherwise."""
    history: int = 20
    """Maximum history length, in items."""
    validation_share: float = 0.1
    """Share of rows for validation. In time order, they come before the test rows."""
    test_share: float = 0.1
    """Share of rows for the test. They are the latest rows."""
    on_error: Literal["raise", "skip"] = "raise"
    """Whether a damaged row raises an error or is skipped."""
    seed: int = 0
    """Shuffle seed."""

    def table(self, data: Any = None, features: "Features | None" = None) -> "pa.Table":
        """Read the log, or another log with the same columns, and add a history to every row.

        Args:
            data: paths of another log; None: the recipe's log.
            features: fitted features, which determine the column types in CSV files. None: infer the types.
        """
        from meshrec.data.click_logs import with_histories
        from meshrec.data.faults import Faults
        from meshrec.data.frames import read_columns
        from meshrec.data.interactions import HISTORY
        from meshrec.data.logs import LogTable

        paths = self.log if data is None else data
        name = str(paths if isinstance(paths, str | Path) else paths[0])
        kinds = {**self.columns.kinds(features), self.label: "numeric"}
        table = read_columns(paths, [*self.columns.names(), self.label, HISTORY], kinds, self.csv)
        log = LogTable(Path(name).name, table, self.columns, paths)
        return with_histories(log, self.label, self.history, Faults(self.on_error))

    def fit(self) -> "Features":
        """Learn vocabularies from the training rows."""
        return self._frame().fit()

    def dataset(self, features: "Features") -> "Dataset":
        """Read the log, and return the dataset encoded with fitted features."""
        return self._frame(features=features).dataset(features)

    def dataset_for_scoring(self, features: "Features", data: Any, *, labelled: bool) -> "Dataset":
        """Open another log for scoring.

        A history has the user's earlier clicks in that other log. If the log has a column with histories,
        that column is used instead.

        Args:
            features: fitted features.
            data: paths, folders or patterns.
            labelled: whether the log has labels to evaluate against.
        """
        from meshrec.data.interactions import HISTORY

        table = self.table(data, features)
        dataset = self._frame(data, features).dataset_for_scoring(features, table, labelled=labelled)
        # The history is not written next to a score, because user and item already identify the row.
        return replace(
            dataset, id_columns=tuple(column for column in dataset.id_columns if column != HISTORY)
        )

    def load(self) -> "Dataset":
        """Learn vocabularies from the training rows, and return the dataset."""
        return self.dataset(self.fit())

    def _frame(self, data: Any = None, features: "Features | None" = None) -> "Frame":
        """Return a data source for the table with histories. The arguments are those of `table`."""
        from meshrec.data.click_logs import features_of_clicks
        from meshrec.train.sources import Frame

        return Frame(
            train=self.table(data, features),
            features=features_of_clicks(self.columns, self.label, self.history),
            # Later rows are held out, because histories must not contain future clicks.
            split_by="time",
            split_column=self.columns.time,
            split_validation=self.validation_share,
            split_test=self.test_share,
            on_error=self.on_error,
            seed=self.seed,
        )
