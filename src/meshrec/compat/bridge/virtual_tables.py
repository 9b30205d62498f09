"""TorchRec's virtual tables and their eviction policies, as tables with hashed keys.

TorchRec looks for rows below a threshold when a rank has ``training_id_eviction_trigger_count`` of them, and
keeps an unbounded number otherwise. A table with hashed keys has that number as its budget, on all ranks
together: when it is full, the rows with the least scores go. So thresholds have no effect, and a log line
says so.
"""

import logging
import math
from dataclasses import dataclass

from meshrec.tables import LFU, TTL, Hashed, LowestNorm
from meshrec.tables.hashed_keys import Eviction

_log = logging.getLogger("meshrec")
_MOST_ROWS = (1 << 31) - 1


@dataclass
class VirtualTableEvictionPolicy:
    """A policy that chooses which rows of a virtual table to evict."""

    @property
    def eviction(self) -> Eviction | None:
        """The policy of the table with hashed keys; None: rows are never evicted."""
        return None

    @property
    def left_out(self) -> str:
        """The options that have no effect."""
        return ""


@dataclass
class NoEvictionPolicy(VirtualTableEvictionPolicy):
    """A policy that keeps all rows: a full table is an error."""


@dataclass
class CountBasedEvictionPolicy(VirtualTableEvictionPolicy):
    """A policy that evicts the rows that were read the least.

    Attributes:
        training_id_eviction_trigger_count: the greatest number of rows.
        eviction_threshold: 0: rows are never evicted; otherwise without effect.
        decay_rate: what is left of the counts after an update. (TorchRec: after an eviction.)
        inference_eviction_threshold: without effect.
    """

    training_id_eviction_trigger_count: int = 0
    eviction_threshold: int = 15
    decay_rate: float = 0.99
    inference_eviction_threshold: int | None = None

    @property
    def eviction(self) -> Eviction | None:
        """An ``LFU`` policy whose half-life matches ``decay_rate``."""
        if not self.eviction_threshold:
            return None
        if not 0 < self.decay_rate <= 1:
            raise ValueError(f"decay_rate must lie in (0, 1], got {self.decay_rate}.")
        if self.decay_rate == 1:
            return LFU()
        return LFU(half_life=max(1, round(math.log(0.5) / math.log(self.decay_rate))))

    @property
    def left_out(self) -> str:
        """The threshold: the table evicts when it reaches ``max_rows`` instead."""
        return f"eviction_threshold={self.eviction_threshold}"


@dataclass
class TimestampBasedEvictionPolicy(VirtualTableEvictionPolicy):
    """A policy that evicts the rows that were not updated for a time.

    ``meshrec.tables.set_event_time`` sets the clock.

    Attributes:
        training_id_eviction_trigger_count: the greatest number of rows.
        eviction_ttl_mins: the time in minutes of event time; 0: rows are never evicted.
        inference_eviction_ttl_mins: without effect.
        max_inference_id_num_per_rank: without effect.
    """

    training_id_eviction_trigger_count: int = 0
    eviction_ttl_mins: int = 24 * 60
    inference_eviction_ttl_mins: int | None = None
    max_inference_id_num_per_rank: int = 0

    @property
    def eviction(self) -> Eviction | None:
        """A ``TTL`` policy with the same time."""
        return TTL(seconds=60 * self.eviction_ttl_mins) if self.eviction_ttl_mins else None


@dataclass
class FeatureL2NormBasedEvictionPolicy(VirtualTableEvictionPolicy):
    """A policy that evicts the rows with the smallest norm.

    Attributes:
        training_id_eviction_trigger_count: the greatest number of rows.
        eviction_threshold: 0: rows are never evicted; otherwise without effect.
        inference_eviction_threshold: without effect.
    """

    training_id_eviction_trigger_count: int = 0
    eviction_threshold: float = 0.0
    inference_eviction_threshold: float | None = None

    @property
    def eviction(self) -> Eviction | None:
        """A ``LowestNorm`` policy; None without a threshold."""
        return LowestNorm() if self.eviction_threshold else None

    @property
    def left_out(self) -> str:
        """The threshold: the table evicts when it reaches ``max_rows`` instead."""
        return f"eviction_threshold={self.eviction_threshold}"


def keys_of(policy: object, num_embeddings: int, name: str) -> Hashed:
    """Return the keys that a virtual table becomes.

    Args:
        policy: its eviction policy; None: no row goes.
        num_embeddings: the size of its virtual space.
        name: its name, for messages.

    Raises:
        ValueError: the policy is of another kind, or nothing bounds the number of rows.
    """
    if policy is not None and not isinstance(policy, VirtualTableEvictionPolicy):
        raise ValueError(
            f"table {name!r}: virtual_table_eviction_policy {type(policy).__name__} has no counterpart. Give "
            "the table keys=meshrec.Hashed(evict=meshrec.tables.Score(...)), a score of your own."
        )
    most = getattr(policy, "training_id_eviction_trigger_count", 0) or num_embeddings
    if most > _MOST_ROWS:
        raise ValueError(
            f"table {name!r}: a virtual table of {most:,} rows needs a budget. Set "
            f"training_id_eviction_trigger_count of its policy, at most {_MOST_ROWS:,}."
        )
    evict = None if policy is None else policy.eviction
    if policy is not None and evict is not None and policy.left_out:
        _log.warning(
            "table %r: rows go when it has more than %s, those with the least score first; %s has no effect",
            name,
            f"{most:,}",
            policy.left_out,
        )
    return Hashed(max_rows=most, evict=evict)
