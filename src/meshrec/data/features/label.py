"""Labels: the columns that a model learns to predict."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

import numpy as np

from meshrec.data.encoding import Place
from meshrec.data.faults import Faults
from meshrec.data.features.values import Kind, array_of, hashes_of, is_missing, numbers_of, whole
from meshrec.data.samples import Bools, Floats

LabelKind = Literal["binary", "number", "class", "query"]
_QUERY_BITS = 24
"""Bits of a query's hash that float32 holds: of Q queries, each is taken for another with chance Q / 2^24."""


@dataclass(frozen=True, kw_only=True)
class Label:
    """A column that a model learns to predict.

    Args:
        column: numbers or booleans.
        kind: ``binary``: whether it is 1, with a probability; ``number``: its value; ``class``: which of
            ``classes`` it is; ``query``: the query, user or session within which samples are ranked, of any
            type.
        classes: of a label of classes: its values, two or more.
        positive_from: of a binary label: 1 where the column is at least this; None: the column is in [0, 1].
    """

    column: str
    kind: LabelKind = "binary"
    positive_from: float | None = None
    classes: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "classes", tuple(self.classes))
        if self.kind not in get_args(LabelKind):
            raise ValueError(
                f"label {self.column!r:.100}: kind is one of {list(get_args(LabelKind))}, got "
                f"{self.kind!r:.100}."
            )
        if self.kind != "binary" and self.positive_from is not None:
            raise ValueError(
                f"label {self.column!r:.100}: positive_from makes 0 and 1 of a column, and "
                f"kind={self.kind!r} takes it as it is. Leave one of them out."
            )
        if (self.kind == "class") != (len(set(self.classes)) > 1):
            raise ValueError(
                f"label {self.column!r:.100} of kind={self.kind!r} has classes {list(self.classes)!r:.100}: "
                "give a label of kind='class' two or more, and others none."
            )

    def wrong(self, kinds: Mapping[str, Kind]) -> str | None:
        """Return what is wrong with its column, if anything is."""
        kind = kinds[self.column]
        if kind in ("integer", "number") or (self.kind in ("class", "query") and kind in ("text", "time")):
            return None
        return f"column {self.column!r} holds {kinds[self.column]}, and a label holds numbers or booleans"

    def encode(self, chunks: Any, place: Place, kept: Bools, faults: Faults) -> Floats:
        """Return [n] float32; null, NaN, and binary labels outside [0, 1] are damage."""
        where = f"{place.name}, column {self.column!r}"
        if self.kind in ("class", "query"):
            return self._named(whole(chunks), where, place, kept, faults)
        values = numbers_of(whole(chunks), None, "s")
        finite = np.isfinite(values)
        if not finite.all():
            faults.check(kept, finite, f"{where}: row {{row}} has no label", place.first_row, place.file)
        if self.positive_from is not None:
            return (values >= self.positive_from).astype(np.float32)
        labels = values.astype(np.float32)
        if self.kind == "binary":
            good = (labels >= 0) & (labels <= 1)
            bad = kept & ~good
            if bad.any():
                message = (
                    f"{where}: row {{row}} has the label {labels[bad.argmax()]:g}, outside [0, 1], which the "
                    "loss takes. Make labels of this range, set positive_from, or kind='number'"
                )
                faults.check(kept, good, message, place.first_row, place.file)
        return labels

    def _named(self, array: Any, where: str, place: Place, kept: Bools, faults: Faults) -> Floats:
        """Return the numbers of classes, or hashes of queries, which float32 holds exactly."""
        missing = is_missing(array)
        known = np.ones(len(array), np.bool_) if missing is None else ~missing
        wrong = "no label"
        if self.kind == "query":
            found = (hashes_of(array) >> np.uint64(64 - _QUERY_BITS)).astype(np.float32)
        else:
            names = [hashes_of(array_of([each]))[0] for each in self.classes]
            hit = hashes_of(array)[:, None] == np.array(names, np.uint64)
            found = hit.argmax(1).astype(np.float32)
            known &= hit.any(1)
            wrong = (
                f"a label that is none of {list(self.classes)}. Name it among the classes, or leave it out"
            )
        if not known.all():
            faults.check(kept, known, f"{where}: row {{row}} has {wrong}", place.first_row, place.file)
        return found

    def to_json(self) -> dict[str, Any]:
        """Return the label as plain JSON types."""
        return asdict(self)
