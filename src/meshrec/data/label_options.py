"""Options of labels that come later, which are command-line options."""

from dataclasses import dataclass, fields
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class LabelOptions:
    """Options of the join of impressions with later actions."""

    key: str | None = None
    """Column of impressions and actions, with the integers or strings by which they are joined."""
    window_seconds: float | None = None
    """Time after an impression in which an action counts."""
    allowed_lateness_seconds: float = 0.0
    """How far an impression or action may be behind the latest one before it. Later ones are left out."""
    negatives: Literal["at_window_end", "at_once"] = "at_window_end"
    """When an impression becomes a row with label 0. If at once, an action adds a second row with label 1,
    and the loss needs fake_negative_weighting.
    """
    idle_seconds: float | None = None
    """Time by which impressions or actions without new records hold back the others; none: without limit."""
    clock_lag_seconds: float | None = None
    """While no new records come, take all that are older than this to have arrived; none: wait for them."""
    max_rows: int = 10_000_000
    """Impressions and actions that may wait in memory."""
    on_full: Literal["raise", "decide"] = "raise"
    """With more impressions and actions in memory: end with an error, or decide about the oldest early."""

    def given(self) -> list[str]:
        """Return the names of options that differ from their defaults."""
        return [field.name for field in fields(LabelOptions) if getattr(self, field.name) != field.default]
