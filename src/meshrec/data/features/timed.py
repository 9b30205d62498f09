"""Features of events, whose time is in a column."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from typing_extensions import override

from meshrec.data.dataset import Feature
from meshrec.data.encoding import Encoding, RowChecks, RowOrigin
from meshrec.data.faults import DataError, Faults
from meshrec.data.features.values import TimeUnit, microseconds_of, whole
from meshrec.data.samples import Samples, Shape

_TOO_LATE = 10**17
"""Limit of plausible times, in microseconds since 1970: after the year 5000."""


class TimedFeatures(Encoding):
    """Features whose samples also have an event time, ``Samples.times``.

    Args:
        features: fitted features.
        time: column with the event time: a time, a number, or ISO 8601 text.
        unit: unit of numbers, which count from 1970 in UTC.

    Example::

        import pyarrow as pa
        from meshrec.data.features import Features, Hashed, Label

        user = Hashed(name="user", num_embeddings=100)
        table = pa.table({"click": [0], "user": ["a"], "ts": [1.5]})
        features = Features(labels=(Label(column="click"),), features=(user,)).fit([table])
        samples = TimedFeatures(features, "ts").encode(table, RowOrigin("memory", 0), Faults("raise"))
        assert samples.times.tolist() == [1_500_000]
    """

    def __init__(self, features: Encoding, time: str, unit: TimeUnit = "s") -> None:
        self._features, self._time, self._unit = features, time, unit

    @property
    def keys(self) -> tuple[str, ...]:
        return self._features.keys

    @property
    def shape(self) -> Shape:
        return self._features.shape

    def described(self) -> tuple[Feature, ...]:
        return self._features.described()

    def columns(self) -> Sequence[str]:
        """Return the columns to read, the time column included."""
        return list(dict.fromkeys([*self._features.columns(), self._time]))

    def id_columns(self) -> tuple[str, ...]:
        return self._features.id_columns()

    def labels_of(self) -> tuple[str, ...]:
        return self._features.labels_of()

    def fitted_kinds(self) -> Mapping[str, str]:
        return self._features.fitted_kinds()

    def wrong_columns(self, schema: Any) -> list[str]:
        wrong = self._features.wrong_columns(schema)
        if schema.get_field_index(self._time) < 0:
            wrong.insert(0, f"there is no column {self._time!r} among {schema.names}")
        return wrong

    def unlabelled(self) -> "TimedFeatures":
        return TimedFeatures(self._features.unlabelled(), self._time, self._unit)

    @override
    def encode(self, table: pa.Table, origin: RowOrigin, faults: Faults) -> Samples:
        """Convert a table's rows to samples with event times. A row without a readable time is damaged."""
        samples = self._features.encode(table, origin, faults)
        is_valid = np.ones(table.num_rows, np.bool_) if samples.is_valid is None else samples.is_valid
        checks = RowChecks(origin, is_valid, faults)
        column = whole(table[self._time])
        present = column.is_valid().to_numpy(zero_copy_only=False)
        checks.require(present, self._time, "is null, and every event needs its time")
        times = np.zeros(table.num_rows, np.int64)
        try:
            times[present] = microseconds_of(column.filter(pa.array(present)), self._unit)
        except DataError:
            # Rare, so look at the rows one by one.
            readable = np.array([not some or self._is_time(column[row]) for row, some in enumerate(present)])
            checks.require(readable, self._time, f"is no time. Give a time, ISO 8601 text or {self._unit}")
            present &= readable
            times[present] = microseconds_of(column.filter(pa.array(present)), self._unit)
        # One wrong time would make all others look old.
        checks.require(
            ~present | ((times >= 0) & (times < _TOO_LATE)),
            self._time,
            f"is before 1970 or after the year 5000. Give numbers in {self._unit}, or name another unit",
        )
        return samples._replace(times=times, is_valid=None if is_valid.all() else is_valid)

    def _is_time(self, value: pa.Scalar) -> bool:
        """Return whether a single value of the time column can be read."""
        try:
            microseconds_of(pa.array([value.as_py()], value.type), self._unit)
        except DataError:
            return False
        return True
