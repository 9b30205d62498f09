"""Counters for multi-probe ZCH (hash-based managed collisions): hits, inserts, collisions and evictions."""

import logging
import time
from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn
from typing_extensions import override

from meshrec.compat.bridge.hash_managed_collisions import HashZchEvictionConfig

# Seconds per hour: TorchRec counts the age of IDs in hours.
_HOUR = 3600


class ScalarLoggerBackend(ABC):
    """Receiver of periodic reports. Subclasses implement ``report``."""

    @abstractmethod
    def report(
        self, log_message: str, name: str, run_type: str, step: int, rate_metrics: dict[str, float]
    ) -> None:
        """Receive a report.

        Args:
            log_message: all counts and rates as text.
            name: table name.
            run_type: such as ``"train"``.
            step: training step.
            rate_metrics: ``hit_rate``, ``insert_rate``, ``collision_rate``, ``eviction_rate``,
                ``opt_in_rate``, ``avg_eviction_age`` in hours, and ``table_usage_ratio``.
        """


class ConsoleScalarLoggerBackend(ScalarLoggerBackend):
    """Receiver that writes reports to the log, and to ``log_file_path`` unless it is empty."""

    def __init__(self, log_file_path: str = "") -> None:
        self._logger = logging.getLogger("meshrec.managed_collisions")
        if log_file_path:
            self._logger.addHandler(logging.FileHandler(log_file_path, mode="w"))

    @override
    def report(
        self, log_message: str, name: str, run_type: str, step: int, rate_metrics: dict[str, float]
    ) -> None:
        """Log the message."""
        self._logger.info(log_message)


class ScalarLogger(nn.Module):
    """Counter of how the IDs of a table were remapped to rows, which reports rates every ``frequency`` steps.

    An ID is a hit if it already has a row, an insert if it gets a free row, and otherwise a collision.

    Args:
        name: table name.
        zch_size: number of rows.
        frequency: steps between reports.
        start_bucket: first bucket on this rank. Only the rank with bucket 0 reports.
        num_buckets_per_rank: number of buckets; must divide ``zch_size``.
        num_reserved_slots_per_bucket: rows at the end of every bucket which are reserved for IDs without
            opt-in.
        device: device of the IDs.
        disable_fallback: whether IDs without a row are dropped.
        log_file_path: file for the default backend; empty: log only.
        backend: report sink (default: ``ConsoleScalarLoggerBackend``).

    Raises:
        ValueError: ``num_buckets_per_rank`` does not divide ``zch_size``.
    """

    _scalar_logger_steps: Tensor

    def __init__(
        self,
        name: str,
        zch_size: int,
        frequency: int,
        start_bucket: int,
        num_buckets_per_rank: int,
        num_reserved_slots_per_bucket: int,
        device: torch.device,
        disable_fallback: bool,
        log_file_path: str = "",
        backend: ScalarLoggerBackend | None = None,
    ) -> None:
        super().__init__()
        if zch_size % num_buckets_per_rank:
            raise ValueError(
                f"zch_size must be a multiple of num_buckets_per_rank, got {zch_size} and "
                f"{num_buckets_per_rank}."
            )
        # A buffer, so that it moves with the module; not persistent, so that checkpoints do not depend on
        # logging.
        self.register_buffer("_scalar_logger_steps", torch.tensor(1), persistent=False)
        self._name, self._zch_size, self._frequency = name, zch_size, frequency
        self._start_bucket, self._buckets = start_bucket, num_buckets_per_rank
        self._disable_fallback = disable_fallback
        share = zch_size // num_buckets_per_rank
        ends = torch.arange(share, zch_size + 1, share, device=device)
        # Every bucket ends with reserved rows. A row below this bound was assigned by opt-in.
        self._opt_in_ends = ends - max(0, num_reserved_slots_per_bucket)
        self._backend = ConsoleScalarLoggerBackend(log_file_path) if backend is None else backend
        self._reset()

    def _reset(self) -> None:
        """Set all counters to 0."""
        # Counters since the last report. forward() clears them after reporting.
        self._total_cnt = self._hit_cnt = self._insert_cnt = self._collision_cnt = 0
        self._eviction_cnt = self._opt_in_cnt = 0
        self._sum_eviction_age = 0.0

    def should_report(self) -> bool:
        """Return whether a report is due: on the rank with bucket 0, in every ``frequency``-th step, if IDs
        were counted.
        """
        is_due = int(self._scalar_logger_steps) % self._frequency == 0
        return self._start_bucket == 0 and self._total_cnt > 0 and is_due

    def update(
        self,
        identities_0: Tensor,
        identities_1: Tensor,
        values: Tensor,
        remapped_ids: Tensor,
        hit_indices: Tensor,
        evicted_emb_indices: Tensor | None,
        metadata: Tensor | None,
        eviction_config: HashZchEvictionConfig | None = None,
    ) -> None:
        """Count the IDs of a batch.

        Args:
            identities_0: ID per row before the batch, [rows, 1]; -1: free.
            identities_1: ID per row after the batch, [rows, 1].
            values: IDs of the batch.
            remapped_ids: row index of every ID. With ``disable_fallback``, IDs without a row are left out.
            hit_indices: for every entry of ``remapped_ids``, the position of the ID in ``values``. Only read
                with ``disable_fallback``.
            evicted_emb_indices: row indices from which IDs were evicted; None: none.
            metadata: for every row, the hour (counted from the epoch) at which the ID expires, [rows, 1].
            eviction_config: policy options.

        Raises:
            ValueError: ID dtypes differ, or ``metadata`` is missing for evicted rows.
        """
        if identities_0.dtype != values.dtype:
            raise ValueError(
                f"IDs of rows are {identities_0.dtype}, those of the batch {values.dtype}. Convert one to "
                "the type of the other."
            )
        before, after = identities_0[remapped_ids, 0], identities_1[remapped_ids, 0]
        inserted = int((before == -1).sum()) - int((after == -1).sum())
        is_hit = torch.isin(before, values) if self._disable_fallback else before == values
        hits = int(is_hit.sum())
        # With the fallback, every ID has a row; without it, remapped_ids covers the hits only.
        placed = values[hit_indices] if self._disable_fallback else values
        self._total_cnt += values.numel()
        self._insert_cnt += inserted
        self._hit_cnt += hits
        self._collision_cnt += values.numel() - hits - inserted
        self._opt_in_cnt += int((remapped_ids < self._opt_in_ends[placed % self._buckets]).sum())
        if evicted_emb_indices is None or not evicted_emb_indices.numel():
            return
        if metadata is None:
            raise ValueError("there are evicted rows, but no metadata. Pass the hours of the rows.")
        evicted = evicted_emb_indices.unique()
        self._eviction_cnt += evicted.numel()
        if eviction_config is not None and eviction_config.single_ttl is not None:
            # Metadata holds the expiry hour, last read + TTL, so this is the time since the last read.
            age = int(time.time()) / _HOUR + eviction_config.single_ttl - metadata[evicted, 0]
            self._sum_eviction_age += int(age.sum())

    def forward(self, run_type: str, identities: Tensor) -> None:
        """Count a step. If a report is due, send the report and reset the counters.

        Args:
            run_type: name for the report, such as ``"train"``.
            identities: ID per row, [rows, 1]; -1: free.
        """
        if self.should_report():
            counts = {
                "hit_rate": self._hit_cnt,
                "insert_rate": self._insert_cnt,
                "collision_rate": self._collision_cnt,
                "eviction_rate": self._eviction_cnt,
                "opt_in_rate": self._opt_in_cnt,
            }
            rates = {name: round(count / self._total_cnt, 3) for name, count in counts.items()}
            rates["avg_eviction_age"] = round(self._sum_eviction_age / max(1, self._eviction_cnt), 3)
            # -1 marks a row without an ID.
            unused = int((identities[:, 0] == -1).sum())
            rates["table_usage_ratio"] = round((self._zch_size - unused) / self._zch_size, 3)
            message = f"table {self._name!r}, {run_type}, {self._total_cnt} IDs: {rates}"
            step = int(self._scalar_logger_steps)
            self._backend.report(
                log_message=message, name=self._name, run_type=run_type, step=step, rate_metrics=rates
            )
            self._reset()
        self._scalar_logger_steps += 1
