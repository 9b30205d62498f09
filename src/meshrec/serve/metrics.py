"""Metrics for Prometheus: requests by outcome, and how long they took."""

import functools
import os
from pathlib import Path

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)
from prometheus_client.multiprocess import MultiProcessCollector

from meshrec.serve.batching import Batched
from meshrec.serve.kept_histories import KeptCounts

_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
_SAMPLES = tuple(2.0**power for power in range(13))
SHARED = "PROMETHEUS_MULTIPROC_DIR"
"""Environment variable with the folder in which workers share their metrics."""
_KINDS = ("counter", "gauge_livesum", "histogram")
_BYTES_PER_MODEL = 1 << 16
"""Room for the metrics of a model: about 60 values, whose names take up to 600 bytes each."""


class Metrics:
    """The metrics of a server, by model.

    Args:
        num_models: the number of models.

    Raises:
        OSError: there is no room for the metrics that workers share.
    """

    def __init__(self, num_models: int = 1) -> None:
        if SHARED in os.environ:
            _reserve(Path(os.environ[SHARED]), (1 + num_models) * _BYTES_PER_MODEL)
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "meshrec_requests", "Requests by outcome.", ["model", "outcome"], registry=self._registry
        )
        self._latency = Histogram(
            "meshrec_request_seconds",
            "From the first byte to the answer, of requests that got scores.",
            ["model"],
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._queue = Histogram(
            "meshrec_queue_seconds",
            "How long requests waited for their batch.",
            ["model"],
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._batches = Histogram(
            "meshrec_batch_samples",
            "Samples in a batch.",
            ["model"],
            buckets=_SAMPLES,
            registry=self._registry,
        )
        self._refused = Counter(
            "meshrec_refused_connections",
            "Connections that were closed before their request was whole, by the status they were told.",
            ["status"],
            registry=self._registry,
        )
        self._histories = Counter(
            "meshrec_histories",
            "Histories that were encoded, by whether a beginning of theirs was kept (hit or miss).",
            ["model", "outcome"],
            registry=self._registry,
        )
        self._kept_bytes = Gauge(
            "meshrec_kept_history_bytes",
            "Bytes of keys and values of histories that are kept for later requests.",
            ["model"],
            registry=self._registry,
            multiprocess_mode="livesum",
        )
        # prometheus_client looks children up under a lock, and converts labels to text each time.
        self._count = functools.cache(self._requests.labels)
        self._latency_of = functools.cache(self._latency.labels)
        self._queue_of = functools.cache(self._queue.labels)
        self._batches_of = functools.cache(self._batches.labels)

    def finished(self, model: str, outcome: str, seconds: float) -> None:
        """Count a request by its outcome, and record how long it took if it got scores."""
        self._count(model, outcome).inc()
        if outcome == "ok":
            self._latency_of(model).observe(seconds)

    def refused(self, status: int) -> None:
        """Count a connection that was refused."""
        self._refused.labels(status).inc()

    def batched(self, model: str, batch: Batched) -> None:
        """Record a batch that was computed."""
        self._batches_of(model).observe(batch.num_samples)
        queue = self._queue_of(model)
        for wait in batch.waits:
            queue.observe(wait)

    def kept(self, model: str, found: KeptCounts) -> None:
        """Count the histories of a batch, and record the bytes that are kept."""
        self._histories.labels(model, "hit").inc(found.hits)
        self._histories.labels(model, "miss").inc(found.misses)
        self._kept_bytes.labels(model).set(found.num_bytes)

    def page(self) -> tuple[bytes, str]:
        """Return the metrics of all workers as text, and the media type of that text."""
        registry = self._registry
        if SHARED in os.environ:
            registry = CollectorRegistry()
            MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        return generate_latest(registry), CONTENT_TYPE_LATEST


def _reserve(folder: Path, num_bytes: int) -> None:
    """Reserve this process's files of metrics on the disk, before prometheus_client opens them.

    It would make files with holes and map them. On a full disk, the first write to a hole ends the process by
    SIGBUS.
    """
    for kind in _KINDS:
        path = folder / f"{kind}_{os.getpid()}.db"
        try:
            with path.open("ab") as file:
                os.posix_fallocate(file.fileno(), 0, num_bytes)
        except OSError as error:
            path.unlink(missing_ok=True)
            raise OSError(
                f"there is no room for {num_bytes} bytes of metrics in {folder} ({error.strerror}). Make "
                "room there, or set TMPDIR to a folder on another disk."
            ) from error
