"""TorchRec's virtual tables and eviction policies, mapped to tables with hashed keys.

TorchRec evicts rows below a threshold once a rank has ``training_id_eviction_trigger_count`` rows, and
otherwise keeps all rows. A table with hashed keys uses that count as its row budget across all ranks. When
full, it evicts the rows with the lowest scores. So thresholds have no effect, which a log line says.
"""

import logging
import math
from dataclasses import dataclass

from meshrec.tables import LFU, TTL, Hashed, LowestNorm
from meshrec.tables.hashed.keys import Eviction

_log = logging.getLogger("meshrec")
_MOST_ROWS = (1 << 31) - 1


@dataclass
class VirtualTableEvictionPolicy:
    """Eviction policy for a virtual table, which becomes a table with hashed keys (`meshrec.Hashed`)."""

    @property
    def eviction(self) -> Eviction | None:
        """MeshRec's eviction policy for hashed keys; None: rows are never evicted."""
        return None

    @property
    def left_out(self) -> str:
        """Options of the policy which have no effect, as text for the log; empty if there are none."""
        return ""


@dataclass
class NoEvictionPolicy(VirtualTableEvictionPolicy):
    """Policy without eviction: a full table is an error."""


@dataclass
class CountBasedEvictionPolicy(VirtualTableEvictionPolicy):
    """Eviction policy that evicts the least read rows.

    Attributes:
        training_id_eviction_trigger_count: maximum number of rows; 0: ``num_embeddings``.
        eviction_threshold: whether rows are evicted. With 0, rows are never evicted. All other values have
            the same effect.
        decay_rate: factor by which every update multiplies the counts. (In TorchRec, every eviction.)
        inference_eviction_threshold: ignored.
    """

    training_id_eviction_trigger_count: int = 0
    eviction_threshold: int = 15
    decay_rate: float = 0.99
    inference_eviction_threshold: int | None = None

    @property
    def eviction(self) -> Eviction | None:
        """``LFU`` policy with a half-life that matches ``decay_rate``; None if the threshold is 0."""
        if not self.eviction_threshold:
            return None
        if not 0 < self.decay_rate <= 1:
            raise ValueError(f"decay_rate must lie in (0, 1], got {self.decay_rate}.")
        if self.decay_rate == 1:
            return LFU()
        # Updates until decay_rate ** n = 1/2.
        return LFU(half_life=max(1, round(math.log(0.5) / math.log(self.decay_rate))))

    @property
    def left_out(self) -> str:
        """The threshold as text for the log. It has no effect: the table evicts at ``max_rows``."""
        return f"eviction_threshold={self.eviction_threshold}"


@dataclass
class TimestampBasedEvictionPolicy(VirtualTableEvictionPolicy):
    """Eviction policy that evicts rows without a recent update.

    Time means event time, which the program sets with ``meshrec.tables.set_event_time``.

    Attributes:
        training_id_eviction_trigger_count: maximum number of rows; 0: ``num_embeddings``.
        eviction_ttl_mins: time to live (TTL), that is, minutes of event time without an update after which a
            row may be evicted. With 0, rows are never evicted.
        inference_eviction_ttl_mins: ignored.
        max_inference_id_num_per_rank: ignored.
    """

    training_id_eviction_trigger_count: int = 0
    eviction_ttl_mins: int = 24 * 60
    inference_eviction_ttl_mins: int | None = None
    max_inference_id_num_per_rank: int = 0

    @property
    def eviction(self) -> Eviction | None:
        """``TTL`` policy with a time to live of ``eviction_ttl_mins`` minutes; None if the setting is 0."""
        return TTL(seconds=60 * self.eviction_ttl_mins) if self.eviction_ttl_mins else None


@dataclass
class FeatureL2NormBasedEvictionPolicy(VirtualTableEvictionPolicy):
    """Eviction policy that evicts the rows with the smallest L2 norm.

    Attributes:
        training_id_eviction_trigger_count: maximum number of rows; 0: ``num_embeddings``.
        eviction_threshold: whether rows are evicted. With 0, rows are never evicted. All other values have
            the same effect.
        inference_eviction_threshold: ignored.
    """

    training_id_eviction_trigger_count: int = 0
    eviction_threshold: float = 0.0
    inference_eviction_threshold: float | None = None

    @property
    def eviction(self) -> Eviction | None:
        """``LowestNorm`` policy; None if the threshold is 0."""
        return LowestNorm() if self.eviction_threshold else None

    @property
    def left_out(self) -> str:
        """The threshold as text for the log. It has no effect: the table evicts at ``max_rows``."""
        return f"eviction_threshold={self.eviction_threshold}"


def hashed_config(policy: object, num_embeddings: int, name: str) -> Hashed:
    """Return the `Hashed` configuration for a virtual table with an eviction policy.

    Args:
        policy: eviction policy; None: rows are never evicted.

    Returns:
        Configuration whose ``max_rows`` is the policy's ``training_id_eviction_trigger_count``, or
        ``num_embeddings`` if the count is 0 or ``policy`` is None.

    Raises:
        ValueError: the policy is not supported, or the maximum number of rows is too large.
    """
    if policy is not None and not isinstance(policy, VirtualTableEvictionPolicy):
        raise ValueError(
            f"table {name!r}: virtual_table_eviction_policy {type(policy).__name__} has no counterpart. Give "
            "the table keys=meshrec.Hashed(evict=meshrec.tables.Score(...)), a score of your own."
        )
    # 0 means that the policy sets no limit.
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
