"""Labels: the columns that a model learns to predict."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from meshrec.data.encoding import Place
from meshrec.data.faults import Faults
from meshrec.data.features.values import Kind, numbers_of, whole
from meshrec.data.samples import Bools, Floats


@dataclass(frozen=True, kw_only=True)
class Label:
    """A column that a model learns to predict.

    Args:
        column: numbers or booleans.
        kind: ``binary``: whether it is 1, with a probability; ``number``: its value.
        positive_from: of a binary label: 1 where the column is at least this; None: the column is in [0, 1].
    """

    column: str
    kind: Literal["binary", "number"] = "binary"
    positive_from: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in ("binary", "number"):
            raise ValueError(f"label {self.column!r}: kind is 'binary' or 'number', got {self.kind!r}.")
        if self.kind == "number" and self.positive_from is not None:
            raise ValueError(
                f"label {self.column!r}: positive_from makes 0 and 1 of a column, and kind='number' takes it "
                "as it is. Leave one of them out."
            )

    def wrong(self, kinds: Mapping[str, Kind]) -> str | None:
        """Return what is wrong with its column, if anything is."""
        if kinds[self.column] in ("integer", "number"):
            return None
        return f"column {self.column!r} holds {kinds[self.column]}, and a label holds numbers or booleans"

    def encode(self, chunks: Any, place: Place, kept: Bools, faults: Faults) -> Floats:
        """Return [n] float32; null, NaN, and binary labels outside [0, 1] are damage."""
        values = numbers_of(whole(chunks), None, "s")
        where = f"{place.name}, column {self.column!r}"
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

    def to_json(self) -> dict[str, Any]:
        """Return the label as plain JSON types."""
        return asdict(self)
