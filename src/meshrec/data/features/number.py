"""Numeric features: numbers and times as dense values."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from meshrec.data.encoding import RowChecks
from meshrec.data.faults import DataError
from meshrec.data.features.column_feature import check_time, wrong_kind
from meshrec.data.features.values import (
    DatePartName,
    Kind,
    TimeUnit,
    floats_of,
    kind_of,
    whole,
)
from meshrec.data.samples import Floats


@dataclass(frozen=True, kw_only=True)
class Number:
    """Feature that converts a column with numbers or times to a column of ``Batch.dense``.

    The conversion has these steps, in this order, if the arguments ask for them: take a time part; replace
    null and NaN by ``missing``; ``log``; ``clip``; ``standardize``.

    Args:
        name: feature name.
        column: column to read; None: the column with the feature's name.
        found: column kind when the feature was fitted; None: not fitted.
        part: time part in UTC, such as "hour". None: the number, or the time in seconds since 1970.
        unit: unit for numeric times, counted from 1970; used only with ``part``.
        missing: value for null and NaN; None: they are damage. Infinity is always damage.
        log: whether to replace x by log(1 + x), and negative x by 0.
        clip: quantiles, such as (0.01, 0.99), at whose values smaller and larger numbers are clipped.
        standardize: whether to subtract the mean and divide by the standard deviation.
        num_bins: bins, each with about equally many training values. Models that embed numbers learn a
            piecewise-linear function with these bins; other models read the value.
        low: lower clipping bound; set by fitting.
        high: upper clipping bound; set by fitting.
        mean: mean; set by fitting.
        deviation: standard deviation; set by fitting.
        edges: bin edges; set by fitting.
        time_format: strptime format for times as text; None: ISO 8601.

    Raises:
        ValueError: ``part``, ``unit``, ``clip`` or ``num_bins`` is not allowed.
    """

    allowed: ClassVar[tuple[Kind, ...]] = ("number", "integer", "time")

    name: str
    column: str | None = None
    found: Kind | None = None
    part: DatePartName | None = None
    unit: TimeUnit = "s"
    missing: float | None = None
    log: bool = False
    clip: tuple[float, float] | None = None
    standardize: bool = False
    low: float | None = None
    high: float | None = None
    mean: float | None = None
    deviation: float | None = None
    num_bins: int | None = None
    edges: tuple[float, ...] | None = None
    time_format: str | None = None

    def __post_init__(self) -> None:
        check_time(self.name, self.part, self.unit)
        if self.clip is not None and not 0 <= self.clip[0] < self.clip[1] <= 1:
            raise ValueError(f"feature {self.name!r}: clip must be two shares in [0, 1], got {self.clip}.")
        if self.num_bins is not None and self.num_bins < 2:
            raise ValueError(f"feature {self.name!r}: num_bins must be at least 2, got {self.num_bins}.")

    @property
    def source(self) -> str:
        """Column to read."""
        return self.name if self.column is None else self.column

    def kind_error(self, kinds: Mapping[str, Kind]) -> str | None:
        """Return the error message if the feature cannot read a column with this kind; None if it can."""
        return wrong_kind(self, self.allowed, kinds, part=self.part or self.time_format)

    def columns(self) -> tuple[str, ...]:
        return (self.source,)

    @property
    def is_fitted(self) -> bool:
        """Whether the feature is fitted, or needs no fitting."""
        return self.found is not None or (
            self.clip is None and not self.standardize and self.num_bins is None
        )

    def fitted(self, sample: Any) -> "Number":
        """Return the feature fitted to a sample of the column, an Arrow array.

        Raises:
            DataError: the sample has no finite number.
        """
        feature = replace(self, found=kind_of(sample.type))
        values = floats_of(sample, self.part, self.unit, self.time_format)
        # Infinity is damage, which `encode` reports.
        values = feature._fill_and_log(values[~np.isinf(values)])
        values = values[np.isfinite(values)]
        if not len(values):
            raise DataError(
                f"feature {self.name!r}: column {self.source!r} has no numbers to fit on. Drop it."
            )
        low, high = self.low, self.high
        if self.clip is not None:
            low, high = map(float, np.quantile(values, self.clip))
            # Mean and bins are fitted on clipped values, which `encode` computes.
            values = np.clip(values, low, high)
        mean, deviation = self.mean, self.deviation
        if self.standardize:
            # For equal values, the deviation may be a nonzero rounding error.
            mean, deviation = float(values.mean()), float(values.std()) if np.ptp(values) else 1.0
        edges = self.edges
        if self.num_bins is not None:
            if mean is not None and deviation is not None:
                values = (values - mean) / deviation
            edges = quantile_edges(values, self.num_bins)
        return replace(feature, low=low, high=high, mean=mean, deviation=deviation, edges=edges)

    def has_rows_of(self, earlier: Any) -> bool:
        """Return whether an earlier feature with the same name converts numbers with the same options."""
        fit = ("found", "low", "high", "mean", "deviation", "edges")
        return type(earlier) is Number and replace(
            earlier, **{name: getattr(self, name) for name in fit}
        ) == replace(self, column=earlier.column)

    def continued(self, earlier: "Number") -> "Number":
        """Return this feature with the fit of an earlier feature, for which `has_rows_of` is true."""
        return replace(earlier, column=self.column)

    def encode(self, chunks: Any, checks: RowChecks) -> Floats:
        """Return the dense value per sample, float32 [n], and mark samples with a damaged value as invalid.

        Args:
            chunks: column values, an Arrow array or chunked array.
            checks: updated with the invalid samples.
        """
        values = floats_of(whole(chunks), self.part, self.unit, self.time_format)
        good = np.isfinite(values) if self.missing is None else ~np.isinf(values)
        if not good.all():
            problem = (
                f"is null or not finite. Set missing= of feature {self.name!r} to what stands for null"
                if self.missing is None
                else "is infinite. Repair it"
            )
            checks.require(good, self.source, problem)
            # Any finite value will do, because these samples are invalid.
            values = np.where(good, values, 0.0)
        values = self._fill_and_log(values)
        if self.low is not None:
            values = np.clip(values, self.low, self.high)
        if self.mean is not None and self.deviation is not None:
            values = (values - self.mean) / self.deviation
        with np.errstate(over="ignore"):
            dense = values.astype(np.float32)
        # Numbers beyond float32 became infinite.
        small = np.isfinite(dense)
        if not small.all():
            problem = f"is too large for float32. Set log or clip of feature {self.name!r}"
            checks.require(small, self.source, problem)
            dense[~small] = 0.0
        return dense

    def _fill_and_log(self, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Run the steps that need no fitting: replace missing values, and take the logarithm."""
        if self.missing is not None:
            values = np.where(np.isnan(values), self.missing, values)
        return np.log1p(np.maximum(values, 0)) if self.log else values


def quantile_edges(values: npt.NDArray[np.float64], num_bins: int) -> tuple[float, ...]:
    """Return the edges of at most ``num_bins`` bins with about equally many values.

    Edges are ascending and distinct in float32, so there may be fewer bins.
    """
    edges = np.quantile(values, np.linspace(0, 1, num_bins + 1)).astype(np.float32)
    return tuple(np.unique(edges).tolist())
