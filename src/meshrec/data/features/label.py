"""Labels: columns that a model learns to predict."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from meshrec.data.encoding import RowChecks
from meshrec.data.faults import shown
from meshrec.data.features.values import Kind, array_of, floats_of, hashes_of, is_missing, whole
from meshrec.data.samples import Bools, Floats

LabelKind = Literal["binary", "number", "class", "query"]
_QUERY_BITS = 24
"""Bits of a query hash, as many as float32 represents exactly. Among Q queries, a query has the same hash as
another with a probability of about Q / 2^24.
"""


@dataclass(frozen=True, kw_only=True)
class Label:
    """Column that a model learns to predict.

    Args:
        column: name of the column. It has numbers or booleans; with ``classes`` and for queries, values of
            any kind.
        kind: the model's prediction. "binary": the probability that the label is 1. "number": the value.
            "class": which of ``classes``. "query": nothing; the column has the query, user or session within
            which samples are ranked.
        classes: for a class label, two or more values. For a binary label, the negative and the positive
            value, such as ``("no", "yes")``, or nothing for a column with numbers or booleans.
        missing: "raise": a row without a label is damage. "skip": the row is omitted, and counted in
            ``Dataset.skipped``.
        positive_from: for a binary label, the smallest value that counts as 1. None: values are in [0, 1].

    Raises:
        ValueError: arguments do not fit together.
    """

    column: str
    kind: LabelKind = "binary"
    positive_from: float | None = None
    classes: tuple[Any, ...] = ()
    missing: Literal["raise", "skip"] = "raise"

    def __post_init__(self) -> None:
        # JSON has lists. On a frozen dataclass, only object.__setattr__ can assign.
        object.__setattr__(self, "classes", tuple(self.classes))
        if self.kind not in get_args(LabelKind):
            raise ValueError(
                f"label {self.column!r:.100}: kind is one of {list(get_args(LabelKind))}, got "
                f"{self.kind!r:.100}."
            )
        if self.missing not in ("raise", "skip"):
            raise ValueError(
                f"label {self.column!r:.100}: missing is 'raise' or 'skip', got {self.missing!r:.100}."
            )
        if self.kind != "binary" and self.positive_from is not None:
            raise ValueError(
                f"label {self.column!r:.100}: positive_from makes 0 and 1 of a column, and "
                f"kind={self.kind!r} takes it as it is. Leave one of them out."
            )
        if self.positive_from is not None and self.classes:
            raise ValueError(
                f"label {self.column!r:.100} has positive_from={self.positive_from} and classes "
                f"{list(self.classes)!r:.100}: both say which rows are positive. Leave one of them out."
            )
        num = len(set(self.classes))
        # Per kind, whether the number of classes fits. Other kinds must not have classes.
        allowed = {"class": num > 1, "binary": len(self.classes) == num and num in (0, 2)}
        if not allowed.get(self.kind, num == 0):
            raise ValueError(
                f"label {self.column!r:.100} of kind={self.kind!r} has classes {list(self.classes)!r:.100}: "
                "give a label of kind='class' two or more, one of kind='binary' none or the negative and the "
                "positive value, and others none."
            )

    def kind_error(self, kinds: Mapping[str, Kind]) -> str | None:
        """Return the error message if the label cannot be read from columns with these kinds, or None."""
        kind = kinds[self.column]
        if kind in ("integer", "number") or (self._is_categorical and kind in ("text", "time")):
            return None
        remedy = ""
        if self.kind == "binary" and kind == "text":
            remedy = ", unless its two values are named: classes=(negative, positive)"
        return f"column {self.column!r} holds {kind}, and a label holds numbers or booleans{remedy}"

    @property
    def _is_categorical(self) -> bool:
        """Whether values are only compared for equality, so they need not be numbers."""
        return self.kind == "query" or bool(self.classes)

    def targets(self, array: Any) -> npt.NDArray[np.float64]:
        """Return the labels for n rows, without checks, as float64 [n].

        A label is a number, or the position in ``classes``; NaN for missing labels and unknown classes.

        Args:
            array: column values, an Arrow array.
        """
        if self.classes:
            hits = self._hits(array)
            return np.where(hits.any(1), hits.argmax(1), np.nan)
        values = floats_of(array, None, "s")
        if self.positive_from is None:
            return values
        return np.where(np.isnan(values), np.nan, values >= self.positive_from)

    def _hits(self, array: Any) -> Bools:
        """Return whether a row has a class, for all n rows and C classes, bool [n, C]."""
        # Hashes, so values match whatever the width or string type of the column is.
        names = [hashes_of(array_of([value]))[0] for value in self.classes]
        hits: Bools = hashes_of(array)[:, None] == np.array(names, np.uint64)
        missing = is_missing(array)
        return hits if missing is None else hits & ~missing[:, None]

    def encode(self, chunks: Any, checks: RowChecks) -> Floats:
        """Return the labels for n rows, float32 [n], and mark rows with a damaged label as invalid.

        Null, NaN and infinity are damage, and so are binary labels outside [0, 1].

        Args:
            chunks: column values, an Arrow array or chunked array.
            checks: updated with the invalid rows.
        """
        if self._is_categorical:
            return self._codes(whole(chunks), checks)
        values = floats_of(whole(chunks), None, "s")
        finite = np.isfinite(values)
        if not finite.all():
            self._check_missing(np.isnan(values), checks)
            checks.require(finite, self.column, "has an infinite label")
        if self.positive_from is not None:
            return (values >= self.positive_from).astype(np.float32)
        labels = values.astype(np.float32)
        if self.kind == "binary":
            good = (labels >= 0) & (labels <= 1)
            # Only valid rows: a missing label was reported above.
            bad = checks.valid & ~good
            if bad.any():
                problem = (
                    f"has the label {labels[bad.argmax()]:g}, outside [0, 1], which the loss takes. Make "
                    "labels of this range, set positive_from, or kind='number'"
                )
                checks.require(good, self.column, problem)
        return labels

    def _codes(self, array: Any, checks: RowChecks) -> Floats:
        """Return a number per row that stands for the class or the query, float32 [n]; see `encode`."""
        missing = is_missing(array)
        if missing is not None:
            self._check_missing(missing, checks)
        if self.kind == "query":
            # float32 represents integers exactly only up to 2^24.
            return (hashes_of(array) >> np.uint64(64 - _QUERY_BITS)).astype(np.float32)
        hits = self._hits(array)
        is_class = np.asarray(hits.any(1))
        bad = checks.valid & ~is_class
        if bad.any():
            first = array[int(bad.argmax())]
            try:
                value = first.as_py()
            except UnicodeDecodeError:
                value = first.as_buffer().to_pybytes()
            problem = (
                f"has the label {shown(value)}, which is none of {list(self.classes)}. "
                "Name it among the classes, or leave it out"
            )
            checks.require(is_class, self.column, problem)
        codes: Floats = hits.argmax(1).astype(np.float32)
        return codes

    def _check_missing(self, missing: Bools, checks: RowChecks) -> None:
        """Mark rows without a label as invalid: as damage, or as omitted by ``missing="skip"``."""
        is_allowed = self.missing == "skip"
        remedy = "" if is_allowed else f". Set missing='skip' of label {self.column!r}"
        checks.require(~missing, self.column, f"has no label{remedy}", is_allowed=is_allowed)

    def to_json(self) -> dict[str, Any]:
        """Return the label as JSON types."""
        return asdict(self)
