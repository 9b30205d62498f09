"""Prometheus metrics: requests by outcome, and durations."""

import contextlib
import functools
import os
import time
from pathlib import Path
from typing import Any

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)
from prometheus_client.multiprocess import MultiProcessCollector

from meshrec.durable import CreatedPath
from meshrec.serve.batching import BatchMetrics
from meshrec.serve.history_cache import CacheCounts

# Upper bounds of the histogram buckets: for the durations of requests and from event to weights, in seconds,
# and for samples per batch.
_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
_FRESHNESS_SECONDS = (0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 300.0, 3600.0, 86400.0)
_SAMPLES = tuple(2.0**power for power in range(13))
SHARED = "PROMETHEUS_MULTIPROC_DIR"
"""Environment variable for the folder in which workers share metrics."""
# File name prefixes which prometheus_client uses for these metric types.
_KINDS = ("counter", "gauge_livesum", "gauge_livemin", "histogram")
# Space for a model's metrics: about 60 values with names of up to 600 bytes.
_BYTES_PER_MODEL = 1 << 16


class Metrics:
    """Prometheus metrics of a server, by model. With several workers, every worker has its own object.

    Args:
        num_models: number of models, which determines the disk space for metrics shared by workers.

    Raises:
        OSError: the disk is too full for shared metrics.
    """

    def __init__(self, num_models: int = 1) -> None:
        if SHARED in os.environ:
            _reserve(Path(os.environ[SHARED]), (1 + num_models) * _BYTES_PER_MODEL)
        # Not prometheus_client's global registry, which rejects duplicate names.
        self._registry = CollectorRegistry()
        model: dict[str, Any] = {"labelnames": ["model"], "registry": self._registry}
        outcome: dict[str, Any] = {"labelnames": ["model", "outcome"], "registry": self._registry}
        self._requests = Counter("meshrec_requests", "Requests by outcome.", **outcome)
        scored = "Time from first byte to answer, for scored requests."
        self._latency = Histogram("meshrec_request_seconds", scored, buckets=_SECONDS, **model)
        waited = "Time requests waited for their batch."
        self._queue = Histogram("meshrec_queue_seconds", waited, buckets=_SECONDS, **model)
        self._batches = Histogram("meshrec_batch_samples", "Samples in a batch.", buckets=_SAMPLES, **model)
        self._refused = Counter(
            "meshrec_refused_connections",
            "Connections closed before their request was complete, by status.",
            ["status"],
            registry=self._registry,
        )
        cached = "Encoded histories, by whether a prefix was cached (hit or miss)."
        self._histories = Counter("meshrec_histories", cached, **outcome)
        size = "Size of the history cache in bytes."
        self._cache_bytes = Gauge("meshrec_kept_history_bytes", size, multiprocess_mode="livesum", **model)
        served = "Time from the latest event in a delta to the moment its weights answer requests."
        self._freshness = Histogram(
            "meshrec_event_to_served_seconds", served, buckets=_FRESHNESS_SECONDS, **model
        )
        event = "Unix time of the latest event in the weights."
        self._event_time = Gauge("meshrec_event_time_seconds", event, multiprocess_mode="livemin", **model)
        # Cached because prometheus_client looks up labels under a lock and formats them every time.
        self._count = functools.cache(self._requests.labels)
        self._latency_of = functools.cache(self._latency.labels)
        self._queue_of = functools.cache(self._queue.labels)
        self._batches_of = functools.cache(self._batches.labels)

    def record_request(self, model: str, outcome: str, seconds: float) -> None:
        """Count a finished request. If it was scored, also record the duration.

        Args:
            model: model name; empty if the request names no known model.
        """
        self._count(model, outcome).inc()
        if outcome == "ok":
            self._latency_of(model).observe(seconds)

    def count_refusal(self, status: int) -> None:
        """Count a connection which was refused with an HTTP status."""
        self._refused.labels(status).inc()

    def record_batch(self, model: str, batch: BatchMetrics) -> None:
        """Record the size and the waits of a computed batch."""
        self._batches_of(model).observe(batch.num_samples)
        queue = self._queue_of(model)
        for wait in batch.waits:
            queue.observe(wait)

    def record_cache(self, model: str, counts: CacheCounts) -> None:
        """Record cache hits, misses and size after a batch."""
        self._histories.labels(model, "hit").inc(counts.hits)
        self._histories.labels(model, "miss").inc(counts.misses)
        self._cache_bytes.labels(model).set(counts.num_bytes)

    def record_freshness(self, model: str, event_time: float) -> None:
        """Record that a model now has weights of a delta.

        Args:
            event_time: Unix time of the latest event in the weights, in seconds.
        """
        self._freshness.labels(model).observe(time.time() - event_time)
        self._event_time.labels(model).set(event_time)

    def page(self) -> tuple[bytes, str]:
        """Return the metrics of all workers as text, and the media type."""
        registry = self._registry
        if SHARED in os.environ:
            # A new registry, which reads the files of all workers.
            registry = CollectorRegistry()
            MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        return generate_latest(registry), CONTENT_TYPE_LATEST


def _reserve(folder: Path, num_bytes: int) -> None:
    """Preallocate this process's metrics files before prometheus_client opens them.

    prometheus_client would map sparse files: on a full disk, the first write to a hole ends the process by
    SIGBUS.
    """
    for kind in _KINDS:
        path = folder / f"{kind}_{os.getpid()}.db"
        created = None
        try:
            with contextlib.suppress(FileExistsError):  # from an earlier process with the same ID
                descriptor, created = CreatedPath.create_file(path)
                os.close(descriptor)
            with path.open("ab") as file:
                os.posix_fallocate(file.fileno(), 0, num_bytes)
        except OSError as error:
            if created is not None:
                created.remove()
            raise OSError(
                f"there is no room for {num_bytes} bytes of metrics in {folder} ({error.strerror}). Make "
                "room there, or set TMPDIR to a folder on another disk."
            ) from error
