"""Models of a server: load and warm them up, replace them without losing requests, and apply deltas."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from meshrec.export import PackageError, Predictor, check_package
from meshrec.export.next_items import Recommended
from meshrec.serve.batching import Batcher, Limits, VersionedScores
from meshrec.serve.fresh import Deltas, Freshness, Quantization, apply_deltas
from meshrec.serve.history_cache import CachedQueryEncoder
from meshrec.serve.metrics import Metrics
from meshrec.serve.recommending import ItemOptions, ItemVectors
from meshrec.serve.requests import Floats, Request, RequestError
from meshrec.serve.trial import PackageTrial, WarmUp, compute_scores, signature_of

_log = logging.getLogger(__name__)
# Reason shown for a model which a client unloaded; such a model is not a problem of the server.
_UNLOADED = "unloaded"
# Seconds before each retry of a failed load, about a minute in total.
_RETRY_PAUSES = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
# Seconds between looks for a new delta, and between checks of the weights file.
_DELTA_POLL_SECONDS = 0.2
_WEIGHTS_POLL_SECONDS = 0.5
_MAX_DELTA_POLL_SECONDS = 5.0  # while a delta is unusable: a retry may read all of it


class ModelChange(NamedTuple):
    """Last load or unload of a model by a client. A worker which starts later repeats it.

    Attributes:
        action: ``load`` or ``unload``.
        delta: number of the last delta to apply when loading; None: all.
    """

    action: str
    delta: int | None


class FailedLoad(NamedTuple):
    """Failed load of a model, to be retried later.

    Attributes:
        name: model name.
        until: number of the last delta to apply; None: all.
        reason: why the load failed, as shown in the index. If the index shows another reason later, the model
            has been changed meanwhile.
    """

    name: str
    until: int | None
    reason: str


class OpenOptions(NamedTuple):
    """Options for opening packages.

    Attributes:
        verify, public_key: see `check_package`.
        copy_weights: see `Predictor`.
        warm_up: samples to score before a model answers requests.
        keep_histories: see `ServerOptions`.
    """

    verify: bool
    public_key: Path | None
    copy_weights: bool
    warm_up: WarmUp
    keep_histories: int = 0


class ServedModel:
    """A loaded version of a model: predictor, request queue, and the deltas which change the weights.

    Args:
        deltas: reader of the delta folder; None: the weights stay as exported.

    Attributes:
        signature: the model's inputs and outputs.
        about: information about the weights from the export, such as run and step.
        is_compiled: whether the predictor uses the compiled program.
        batcher: request queue.
    """

    def __init__(
        self,
        name: str,
        predictor: Predictor,
        limits: Limits,
        metrics: Metrics,
        deltas: Deltas | None,
        *,
        keep_histories: int = 0,
    ) -> None:
        # Name, package and metrics stay the same for this version.
        self.name, self._package, self._metrics = name, predictor.version, metrics
        # Fixed for this version; large bodies are parsed by it in another process.
        self.signature = signature_of(predictor)
        self.about = predictor.about
        self.is_compiled = predictor.is_compiled
        self._predictor, self._deltas = predictor, deltas
        # Vectors are computed at the first request, and again after a delta.
        self._items = ItemVectors(predictor)
        self._incremental = _make_query_encoder(name, predictor, keep_histories)
        # Set after the warm-up: only requests from then on count in the metrics.
        self._reports_cache = False
        self.batcher = Batcher(self.score, limits, lambda batch: metrics.record_batch(name, batch))

    @property
    def version(self) -> str:
        """Version shown to clients: the package digest, then ``+`` and the last applied delta's number."""
        delta = self.freshness.delta
        return self._package if delta is None else f"{self._package}+{delta}"

    @property
    def freshness(self) -> Freshness:
        """Last applied delta, and the reason if the next delta cannot be applied.

        Without a delta folder to follow, both fields are empty.
        """
        return Freshness(None, None, "") if self._deltas is None else self._deltas.freshness

    @torch.no_grad()
    def _apply(self, portion: Callable[[], None]) -> None:
        """Apply a portion of a delta, and clear the history cache, which depends on the weights."""
        portion()
        self.clear_history_cache()

    def clear_history_cache(self) -> None:
        """Clear the history cache. Call in the batcher's thread."""
        if self._incremental is not None:
            self._incremental.clear()

    def enable_cache_metrics(self) -> None:
        """Record cache hits and misses from now on. Called after the warm-up, which would distort them."""
        self._reports_cache = True

    def apply_available_deltas(self) -> None:
        """Apply all deltas which are available now. Call before the model answers requests."""
        if self._deltas is not None:
            apply_deltas(self._deltas)

    async def follow_deltas(self) -> None:
        """Apply new deltas in portions between batches, until cancelled."""
        if self._deltas is None:
            return
        pause = _DELTA_POLL_SECONDS
        while True:
            # Reading and checking take long for a large delta, so the event loop and the scoring thread stay
            # free.
            next_delta = await asyncio.to_thread(self._deltas.next)
            if next_delta is not None:
                try:
                    for portion in self._deltas.portions(*next_delta):
                        await self.batcher.run_in_thread(partial(self._apply, portion))
                except Exception as error:
                    self._deltas.record_failure(error)
                else:
                    _log.info("model %r: version %s", self.name, self.version)
                    if (event_time := self.freshness.event_time) is not None:
                        self._metrics.record_freshness(self.name, event_time)
                    pause = _DELTA_POLL_SECONDS
                    continue
            await asyncio.sleep(pause)
            has_failed = self.freshness.reason != ""
            pause = min(2 * pause, _MAX_DELTA_POLL_SECONDS) if has_failed else _DELTA_POLL_SECONDS

    async def wait_for_damage(self) -> PackageError:
        """Check the weights file regularly. Return the error once the file is damaged."""
        while True:
            await asyncio.sleep(_WEIGHTS_POLL_SECONDS)
            try:
                await asyncio.to_thread(self._predictor.check_weights)
            except PackageError as error:
                return error

    @property
    def recommends(self) -> bool:
        """Whether the package lists items to recommend."""
        return self._items.is_available

    def recommend(self, queries: Floats, request: Request, options: ItemOptions) -> Recommended:
        """Return the best items for query vectors that `score` has computed.

        Args:
            queries: query vectors, float32 [B, V].
            options: number of items, and whether seen items may be recommended.
        """
        return self._items.best(queries, request, options, self.version)

    def score(self, request: Request) -> VersionedScores:
        """Compute the scores [B] or vectors [B, V] of a request in this thread. Called by the batcher.

        Raises:
            RequestError: status 503 if the weights file was truncated; 400 if a history is too long, or the
                times do not match the items.
        """
        try:
            if self._incremental is None:
                return VersionedScores(compute_scores(self._predictor, request), self.version)
            try:
                queries, counts = self._incremental(request)
            except ValueError as error:
                raise RequestError(str(error)) from error
            if self._reports_cache:
                self._metrics.record_cache(self.name, counts)
            return VersionedScores(queries, self.version)
        except PackageError as error:  # `wait_for_damage` will unload the model
            raise RequestError(f"model {self.name!r} is not ready: {error}", 503) from error


class Repository:
    """All models of a server process by name, each served in a single version.

    Args:
        changes: by model name, the last change which clients made before this worker started. `load_all`
            repeats it. Models without a change are loaded with all deltas.
    """

    def __init__(
        self,
        folders: Mapping[str, Path],
        limits: Limits,
        metrics: Metrics,
        *,
        opening: OpenOptions,
        trial: PackageTrial,
        deltas: Mapping[str, Path] | None = None,
        changes: Mapping[str, ModelChange] | None = None,
    ) -> None:
        # The names never change while the server runs.
        self.folders, self._opening, self._trial = dict(folders), opening, trial
        self._limits, self._metrics = limits, metrics
        # Models that answer requests now.
        self._served: dict[str, ServedModel] = {}
        # `_changes` is consumed by the first `load_all`.
        self._deltas, self._changes = dict(deltas or {}), dict(changes or {})
        unloaded = {name for name, change in self._changes.items() if change.action == "unload"}
        # Why a model is not ready, or the last load failed; empty after success.
        self._reasons = {n: _UNLOADED if n in unloaded else "it is being loaded" for n in folders}
        # Background tasks per model: first the watch on the weights file, then the following of deltas, if
        # any. They run until the version is replaced.
        self._tasks: dict[str, list[asyncio.Task[None]]] = {}
        # Held by loads and unloads, so that they take effect in order.
        self._changing = asyncio.Lock()
        # Replaced versions which still answer; the set keeps their tasks alive.
        self._leaving: set[asyncio.Task[None]] = set()

    @property
    def is_ready(self) -> bool:
        """Whether all models, except unloaded ones, can answer requests, perhaps in an older version."""
        return all(name in self._served or why == _UNLOADED for name, why in self._reasons.items())

    @property
    def problems(self) -> dict[str, str]:
        """Reason why a model is unavailable, has an old version or lacks deltas, by model name.

        Models without such a problem are left out.
        """
        reasons = {entry["name"]: entry["reason"] for entry in self.index()}
        return {name: reason for name, reason in reasons.items() if reason not in ("", _UNLOADED)}

    @property
    def refusal(self) -> str | None:
        """Reason for refusing a scoring request now; None if the request would be answered."""
        for name in sorted(self.folders):
            served, reason = self._served.get(name), self._reasons[name]
            if served is None and reason != _UNLOADED:
                return f"model {name!r} is not ready: {reason}"
            if served is not None and served.batcher.is_full:
                return f"the queue of model {name!r} is full"
        return None

    def get(self, name: str, version: str | None = None) -> ServedModel:
        """Return a model which can answer requests.

        Args:
            version: version that a client requires; None: any.

        Raises:
            RequestError: the model or version is unknown (status 404), or the model is not ready (503).
        """
        self._check_known(name)
        served = self._served.get(name)
        if served is None:
            if self._reasons[name] == _UNLOADED:
                raise RequestError(f"model {name!r} was unloaded. Load it first.", 404)
            reason = self._reasons[name].rstrip(".")
            message = f"model {name!r} is not ready: {reason}. Try again later."
            raise RequestError(message, 503, {"Retry-After": "1"})
        # A request that names a version wants exactly its weights, so no other version may answer.
        if version is not None and version != served.version:
            raise RequestError(
                f"model {name!r} has no version {version!r}; its version is {served.version!r}.", 404
            )
        return served

    def get_only(self) -> ServedModel:
        """Return the model of a server with a single model.

        Raises:
            RequestError: there are several models (status 404), or the model is not ready (503).
        """
        if len(self.folders) != 1:
            raise RequestError(f"there are several models: {sorted(self.folders)}. Use /predict/NAME.", 404)
        return self.get(next(iter(self.folders)))

    def index(self) -> list[dict[str, str]]:
        """Return name, version, state and reason per model, as in the repository API."""
        entries = []
        for name in sorted(self.folders):
            served = self._served.get(name)
            reason = self._reasons[name] or (served.freshness.reason if served else "")
            state = "READY" if served else "UNAVAILABLE"
            entries.append(
                {"name": name, "version": served.version if served else "", "state": state, "reason": reason}
            )
        return entries

    async def load(self, name: str, until: int | None = None) -> None:
        """Load a model from its package folder, and replace the served version.

        The old version answers requests until the new version is ready. If the load fails, it stays.

        Args:
            until: number of the last delta to apply; None: all, including future ones.

        Raises:
            RequestError: the model is unknown, or the package cannot be served.
        """
        self._check_known(name)
        async with self._changing:
            try:
                # All steps that can fail come before `_replace`, so that the old version keeps serving.
                predictor = await self._open(name)
                deltas = self._open_deltas(name, predictor, until)
                served = ServedModel(
                    name,
                    predictor,
                    self._limits,
                    self._metrics,
                    deltas,
                    keep_histories=self._opening.keep_histories,
                )
                await asyncio.to_thread(served.apply_available_deltas)
                if until is not None and served.freshness.delta != until:
                    raise _unreached_error(until, served)
                # In the thread that scores requests later, so that it is warm.
                await served.batcher.run_in_thread(lambda: self._warm_up(served))
            except Exception as error:
                # Unexpected errors, such as in a damaged program, also become a reason in the index.
                if not isinstance(error, PackageError | ValueError | RuntimeError | OSError):
                    error = RuntimeError(f"{type(error).__name__}: {error}")
                # A failed rollback does not affect the served version or an unloaded model.
                if until is None or (name not in self._served and self._reasons[name] != _UNLOADED):
                    self._reasons[name] = str(error)
                _log.error("model %r was not loaded: %s", name, error)
                raise RequestError(f"model {name!r} was not loaded: {error}") from error
            # From here on the load cannot fail, and new requests go to this version.
            self._replace(name, served)
            self._tasks[name] = [asyncio.create_task(self._unload_on_damage(name, served))]
            # A rolled back model stays at its delta until a client loads or unloads it.
            if until is None:
                self._tasks[name].append(asyncio.create_task(served.follow_deltas()))
            _log.info("model %r: version %s is ready", name, served.version)

    async def unload(self, name: str) -> None:
        """Unload a model. Admitted requests are still answered.

        Raises:
            RequestError: unknown model.
        """
        self._check_known(name)
        async with self._changing:
            self._replace(name, None)

    async def load_all(self) -> list[FailedLoad]:
        """Load all models, except those that a client unloaded. Failures are logged and shown in the index.

        Returns:
            The failures, for `retry_loads`.
        """
        # Ready models are loaded again, too.
        names = [name for name, reason in self._reasons.items() if reason != _UNLOADED]
        changes = {name: self._changes.pop(name, None) for name in names}
        return await self._load_models({name: change and change.delta for name, change in changes.items()})

    async def retry_loads(self, failed: Sequence[FailedLoad], stop: asyncio.Event) -> None:
        """Retry failed loads, up to seven times within about a minute.

        No client waits for these loads, so no client would retry them. Transient failures are a full disk, a
        folder that is still being copied, or a killed child process (`PackageTrial` loads every package in a
        child process first). Models that a client loads or unloads meanwhile are skipped.
        """
        for pause in _RETRY_PAUSES:
            if not failed:
                return
            _log.warning(
                "loading %s again in %g s", ", ".join(repr(failure.name) for failure in failed), pause
            )
            with contextlib.suppress(asyncio.TimeoutError):
                # Times out if the server does not stop during the pause. Otherwise, no retry follows.
                await asyncio.wait_for(stop.wait(), pause)
                return
            failed = await self._load_models(
                {name: until for name, until, reason in failed if self._reasons[name] == reason}
            )

    def close(self) -> None:
        """Stop following deltas and watching files."""
        for name in list(self._tasks):
            self._cancel(name)

    async def _load_models(self, models: Mapping[str, int | None]) -> list[FailedLoad]:
        """Load models, with the last delta to apply by model name. Return the failures, which are logged."""
        failed = []
        for name, until in models.items():
            try:
                await self.load(name, until)
            except RequestError:
                failed.append(FailedLoad(name, until, self._reasons[name]))
        return failed

    async def _open(self, name: str) -> Predictor:
        """Open a model's package, after verifying the files and loading it in a child process."""
        verify, public_key, copy_weights, warm_up, _ = self._opening
        # Reading a large package takes minutes.
        package = await asyncio.to_thread(
            check_package, self.folders[name], verify=verify, public_key=public_key
        )
        await self._trial(package, warm_up)
        return await asyncio.to_thread(Predictor, package, copy_weights=copy_weights)

    async def _unload_on_damage(self, name: str, served: ServedModel) -> None:
        """Wait for damage to a model's weights file, then unload the model: scores would be wrong."""
        error = await served.wait_for_damage()
        async with self._changing:
            if self._served.get(name) is served:
                # Otherwise another version has replaced the damaged one meanwhile.
                _log.error("model %r is unloaded: %s", name, error)
                del self._tasks[name][0]  # this task, which `_replace` would cancel
                self._replace(name, None, str(error))

    def _check_known(self, name: str) -> None:
        """Raise RequestError (status 404) if the server has no model with this name."""
        if name not in self.folders:
            raise RequestError(f"there is no model {name!r}; models: {sorted(self.folders)}.", 404)

    def _cancel(self, name: str) -> None:
        """Stop watching the weights file and following the deltas of a model."""
        for task in self._tasks.pop(name, []):
            task.cancel()

    def _open_deltas(self, name: str, predictor: Predictor, until: int | None) -> Deltas | None:
        """Return the reader of a model's delta folder; None if the model has no such folder."""
        if name not in self._deltas:
            if until is not None:
                raise ValueError(f"model {name!r} does not follow deltas. Start the server with --deltas.")
            return None
        # The run and the step tell which delta comes next.
        if "run" not in predictor.about or "step" not in predictor.about:
            raise ValueError(f"the package of {name!r} has no run in its manifest. Export it from a run.")
        codes, hashed = Quantization(predictor.quantised, predictor.rounding), predictor.hashed
        folder, weights = self._deltas[name], predictor.weights
        return Deltas(folder, predictor.about, weights, until, codes=codes, hashed=hashed)

    def _replace(self, name: str, served: ServedModel | None, reason: str = _UNLOADED) -> None:
        """Replace a model by another version, or unload it for the given reason."""
        self._cancel(name)
        # Between this line and the next, no request is handled, because nothing is awaited.
        old = self._served.pop(name, None)
        if served is not None:
            self._served[name] = served
        self._reasons[name] = reason if served is None else ""
        if old is not None:
            # In the background: requests which the old version has admitted are still answered.
            leaving = asyncio.create_task(old.batcher.drain())
            self._leaving.add(leaving)
            leaving.add_done_callback(self._leaving.discard)

    def _warm_up(self, served: ServedModel) -> None:
        """Score the warm-up samples, so that first requests do not wait for compilation or page faults."""
        for request in self._opening.warm_up.requests(served.signature):
            served.score(request)
        # Warm-up histories must not occupy the cache.
        served.clear_history_cache()
        served.enable_cache_metrics()


def _make_query_encoder(name: str, predictor: Predictor, max_bytes: int) -> CachedQueryEncoder | None:
    """Return an object that computes query vectors with a KV cache for histories.

    Returns None if ``max_bytes`` is 0, or if the package has no items to recommend. Also returns None, and
    logs a warning, if the model does not support a KV cache.
    """
    if not max_bytes or predictor.items is None:
        return None
    if predictor.incremental is None:
        _log.warning(
            "model %r has no history cache and encodes the whole history per request: the package "
            "has no model which can continue from cached keys and values, such as HSTU with float32 rows",
            name,
        )
        return None
    return CachedQueryEncoder(predictor, max_bytes)


def _unreached_error(until: int, served: ServedModel) -> ValueError:
    """Return the error for a rollback to a delta which cannot be reached."""
    delta, reason = served.freshness.delta, served.freshness.reason
    if delta is not None:
        can = f"the last reachable delta is {delta}"
    else:
        can = f"the package already has step {served.about['step']}"
    return ValueError(f"delta {until} cannot be reached; {can}.{reason and f' {reason}'}")
