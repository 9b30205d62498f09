"""The models of a server: they are loaded, warmed up, and replaced without losing a request."""

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
from meshrec.serve.fresh import Codes, Deltas, Freshness, place
from meshrec.serve.kept_histories import IncrementalScores
from meshrec.serve.metrics import Metrics
from meshrec.serve.recommending import ItemsWanted, ItemVectors
from meshrec.serve.requests import Floats, Request, RequestError
from meshrec.serve.trial import PackageTrial, WarmUp, scores_of, signature_of

_log = logging.getLogger(__name__)
_UNLOADED = "unloaded"
_SECONDS_BETWEEN_TRIES = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
_SECONDS_BETWEEN_LOOKS = 0.2
_SECONDS_BETWEEN_LOOKS_AT_FILES = 0.5
_MOST_SECONDS_BETWEEN_LOOKS = 5.0  # while a delta cannot be used: each look may read all of it


class Wish(NamedTuple):
    """The last change that was requested of a model: ``load`` (up to ``delta``, or all) or ``unload``."""

    action: str
    delta: int | None


class FailedLoad(NamedTuple):
    """A load that failed: the model, the last delta to apply (None: all), and the reason that is shown."""

    name: str
    until: int | None
    reason: str


class Opening(NamedTuple):
    """The options with which packages are opened.

    Attributes:
        verify, public_key: see `check_package`.
        copy_weights: see `Predictor`.
        warm_up: what models score before they answer.
        keep_histories: see `ServerOptions`.
    """

    verify: bool
    public_key: Path | None
    copy_weights: bool
    warm_up: WarmUp
    keep_histories: int = 0


class Served:
    """One version of a model, ready to score.

    Args:
        name: the name of the model.
        predictor: the predictor of its package.
        limits, metrics: those of the server.
        deltas: the deltas to apply to the weights; None for a package as it is.
        keep_histories: see `ServerOptions`.
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
        self.name, self._package, self._metrics = name, predictor.version, metrics
        self.signature = signature_of(predictor)
        self.about = predictor.about
        self.is_compiled = predictor.is_compiled
        self._predictor, self._deltas = predictor, deltas
        self._items = ItemVectors(predictor)
        self._incremental = _incremental(name, predictor, keep_histories)
        self._is_warm = False
        self.batcher = Batcher(self.score, limits, lambda batch: metrics.batched(name, batch))

    @property
    def version(self) -> str:
        """The version: a digest of the package, and the number of the last delta in the weights."""
        delta = self.freshness.delta
        return self._package if delta is None else f"{self._package}+{delta}"

    @property
    def freshness(self) -> Freshness:
        """The last delta in the weights."""
        return Freshness(None, None, "") if self._deltas is None else self._deltas.freshness

    @torch.no_grad()
    def _apply(self, portion: Callable[[], None]) -> None:
        """Change some weights, and forget what was computed with the old ones."""
        portion()
        self.forget_histories()

    def forget_histories(self) -> None:
        """Remove what is kept of histories. Call it in the batcher's thread."""
        if self._incremental is not None:
            self._incremental.clear()

    def count_histories(self) -> None:
        """Count histories in the metrics from now on, as requests come after the warm-up."""
        self._is_warm = True

    def catch_up(self) -> None:
        """Apply all deltas that exist, before the model answers."""
        if self._deltas is not None:
            place(self._deltas)

    async def follow(self) -> None:
        """Apply deltas as they appear, in portions between batches, until this is cancelled."""
        if self._deltas is None:
            return
        pause = _SECONDS_BETWEEN_LOOKS
        while True:
            found = await asyncio.to_thread(self._deltas.next)
            if found is not None:
                try:
                    for portion in self._deltas.portions(*found):
                        await self.batcher.in_thread(partial(self._apply, portion))
                except Exception as error:
                    self._deltas.failed(error)
                else:
                    _log.info("model %r: version %s", self.name, self.version)
                    pause = _SECONDS_BETWEEN_LOOKS
                    continue
            await asyncio.sleep(pause)
            has_failed = self.freshness.reason != ""
            pause = min(2 * pause, _MOST_SECONDS_BETWEEN_LOOKS) if has_failed else _SECONDS_BETWEEN_LOOKS

    async def watch(self) -> PackageError:
        """Wait until the package's file of weights is damaged under the model; return the error."""
        while True:
            await asyncio.sleep(_SECONDS_BETWEEN_LOOKS_AT_FILES)
            try:
                await asyncio.to_thread(self._predictor.check_weights)
            except PackageError as error:
                return error

    @property
    def recommends(self) -> bool:
        """Whether the model's package lists items to recommend."""
        return self._items.are_known

    def recommend(self, queries: Floats, request: Request, wanted: ItemsWanted) -> Recommended:
        """Return the best items for the vectors that were computed for a request."""
        return self._items.best(queries, request, wanted, self.version)

    def score(self, request: Request) -> VersionedScores:
        """Compute scores [B], or vectors [B, V], in this thread.

        Raises:
            RequestError: with status 503, where the package's file of weights was cut short; with 400, where
                a history is too long or its times do not fit.
        """
        try:
            if self._incremental is None:
                return VersionedScores(scores_of(self._predictor, request), self.version)
            try:
                queries, found = self._incremental(request)
            except ValueError as error:
                raise RequestError(str(error)) from error
            if self._is_warm:
                self._metrics.kept(self.name, found)
            return VersionedScores(queries, self.version)
        except PackageError as error:  # `watch` takes the model away
            raise RequestError(f"model {self.name!r} is not ready: {error}", 503) from error


class Repository:
    """Models by name, each in one version at a time.

    Args:
        folders: the packages, by the model's name.
        limits: limits of each model's batches and queue.
        metrics: the server's metrics.
        opening: the options with which packages are opened.
        trial: loads each package before this process does.
        deltas: folders of deltas that models follow, by name.
        wishes: the first change of a model, if not to load it with all deltas.
    """

    def __init__(
        self,
        folders: Mapping[str, Path],
        limits: Limits,
        metrics: Metrics,
        *,
        opening: Opening,
        trial: PackageTrial,
        deltas: Mapping[str, Path] | None = None,
        wishes: Mapping[str, Wish] | None = None,
    ) -> None:
        self.folders, self._opening, self._trial = dict(folders), opening, trial
        self._limits, self._metrics = limits, metrics
        self._served: dict[str, Served] = {}
        self._deltas, self._wishes = dict(deltas or {}), dict(wishes or {})
        unloaded = {name for name, wish in self._wishes.items() if wish.action == "unload"}
        self._reasons = {n: _UNLOADED if n in unloaded else "it is being loaded" for n in folders}
        self._tasks: dict[str, list[asyncio.Task[None]]] = {}
        self._changing = asyncio.Lock()
        self._leaving: set[asyncio.Task[None]] = set()

    @property
    def is_ready(self) -> bool:
        """Whether every model that was not unloaded answers, in its newest version or an older one."""
        return all(name in self._served or why == _UNLOADED for name, why in self._reasons.items())

    @property
    def problems(self) -> dict[str, str]:
        """The reasons why models are not loaded, serve an older version, or miss deltas, by name."""
        found = {each["name"]: each["reason"] for each in self.index()}
        return {name: reason for name, reason in found.items() if reason not in ("", _UNLOADED)}

    @property
    def refusal(self) -> str | None:
        """The reason why a request for scores would be refused now; None if it would be answered."""
        for name in sorted(self.folders):
            served, reason = self._served.get(name), self._reasons[name]
            if served is None and reason != _UNLOADED:
                return f"model {name!r} is not ready: {reason}"
            if served is not None and served.batcher.is_full:
                return f"the queue of model {name!r} is full"
        return None

    def get(self, name: str, version: str | None = None) -> Served:
        """Return a model that is ready to score.

        Raises:
            RequestError: there is no such model or version (status 404), or it is not ready (503).
        """
        if name not in self.folders:
            raise RequestError(f"there is no model {name!r}; there are {sorted(self.folders)}.", 404)
        served = self._served.get(name)
        if served is None:
            if self._reasons[name] == _UNLOADED:
                raise RequestError(f"model {name!r} was unloaded. Load it first.", 404)
            reason = self._reasons[name].rstrip(".")
            message = f"model {name!r} is not ready: {reason}. Try again later."
            raise RequestError(message, 503, {"Retry-After": "1"})
        if version is not None and version != served.version:
            raise RequestError(
                f"model {name!r} has no version {version!r}; its version is {served.version!r}.", 404
            )
        return served

    def only(self) -> Served:
        """Return the only model.

        Raises:
            RequestError: there are several models (status 404), or the only one is not ready (503).
        """
        if len(self.folders) != 1:
            raise RequestError(f"there are several models: {sorted(self.folders)}. Use /predict/NAME.", 404)
        return self.get(next(iter(self.folders)))

    def index(self) -> list[dict[str, str]]:
        """Return name, version, state and reason of each model, in the form of the repository API."""
        found = []
        for name in sorted(self.folders):
            served = self._served.get(name)
            reason = self._reasons[name] or (served.freshness.reason if served else "")
            state = "READY" if served else "UNAVAILABLE"
            found.append(
                {
                    "name": name,
                    "version": served.version if served else "",
                    "state": state,
                    "reason": reason,
                }
            )
        return found

    async def load(self, name: str, until: int | None = None) -> None:
        """Load a model from its folder. The old version serves until the new one is ready, and if that fails.

        Args:
            name: the name of the model.
            until: the last delta to apply; None applies all, also those that appear later.

        Raises:
            RequestError: the package cannot be served, or there is no such model.
        """
        if name not in self.folders:
            raise RequestError(f"there is no model {name!r}; there are {sorted(self.folders)}.", 404)
        async with self._changing:
            try:
                predictor = await self._open(name)
                deltas = self._deltas_of(name, predictor, until)
                served = Served(
                    name,
                    predictor,
                    self._limits,
                    self._metrics,
                    deltas,
                    keep_histories=self._opening.keep_histories,
                )
                await asyncio.to_thread(served.catch_up)
                if until is not None and served.freshness.delta != until:
                    raise _unreached(until, served)
                await served.batcher.in_thread(lambda: self._warm(served))
            except Exception as error:
                if not isinstance(error, PackageError | ValueError | RuntimeError | OSError):
                    error = RuntimeError(f"{type(error).__name__}: {error}")
                self._reasons[name] = str(error)
                _log.error("model %r was not loaded: %s", name, error)
                raise RequestError(f"model {name!r} was not loaded: {error}") from error
            self._replace(name, served)
            self._tasks[name] = [asyncio.create_task(self._watch(name, served))]
            if until is None:
                self._tasks[name].append(asyncio.create_task(served.follow()))
            _log.info("model %r: version %s is ready", name, served.version)

    async def unload(self, name: str) -> None:
        """Remove a model. Requests that were admitted are still answered.

        Raises:
            RequestError: there is no such model.
        """
        if name not in self.folders:
            raise RequestError(f"there is no model {name!r}; there are {sorted(self.folders)}.", 404)
        async with self._changing:
            self._replace(name, None)

    async def load_all(self) -> list[FailedLoad]:
        """Load every model that was not unloaded. Failures are logged and shown in the index.

        Returns:
            The failures, to pass to `try_again`.
        """
        names = [name for name, reason in self._reasons.items() if reason != _UNLOADED]
        wishes = {name: self._wishes.pop(name, None) for name in names}
        return await self._load_each({name: wish and wish.delta for name, wish in wishes.items()})

    async def try_again(self, failed: Sequence[FailedLoad], stop: asyncio.Event) -> None:
        """Repeat loads that failed, up to seven times in a minute.

        No client waits for these loads, so none would repeat them after a failure that passes: a trial that
        was killed, a full disk, a folder that is still being copied. A model that was loaded or unloaded
        meanwhile is left as it is.

        Args:
            failed: what `load_all` returned.
            stop: ends this before the next try.
        """
        for pause in _SECONDS_BETWEEN_TRIES:
            if not failed:
                return
            _log.warning("loading %s again in %g s", ", ".join(repr(each.name) for each in failed), pause)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(stop.wait(), pause)
                return
            failed = await self._load_each(
                {name: until for name, until, reason in failed if self._reasons[name] == reason}
            )

    def close(self) -> None:
        """Stop following deltas and watching files."""
        for name in list(self._tasks):
            self._cancel(name)

    async def _load_each(self, models: Mapping[str, int | None]) -> list[FailedLoad]:
        """Load models up to a delta each; return the failures, which `load` has logged."""
        failed = []
        for name, until in models.items():
            try:
                await self.load(name, until)
            except RequestError:
                failed.append(FailedLoad(name, until, self._reasons[name]))
        return failed

    async def _open(self, name: str) -> Predictor:
        """Open a package, after its files are verified and another process has loaded it."""
        verify, public_key, copy_weights, warm_up, _ = self._opening
        package = await asyncio.to_thread(
            check_package, self.folders[name], verify=verify, public_key=public_key
        )
        await self._trial(package, warm_up)
        return await asyncio.to_thread(Predictor, package, copy_weights=copy_weights)

    async def _watch(self, name: str, served: Served) -> None:
        """Take a model away when its file of weights is damaged, since its scores would be wrong."""
        error = await served.watch()
        async with self._changing:
            if self._served.get(name) is served:
                _log.error("model %r is taken away: %s", name, error)
                del self._tasks[name][0]  # this task
                self._replace(name, None, str(error))

    def _cancel(self, name: str) -> None:
        for task in self._tasks.pop(name, []):
            task.cancel()

    def _deltas_of(self, name: str, predictor: Predictor, until: int | None) -> Deltas | None:
        if name not in self._deltas:
            if until is not None:
                raise ValueError(f"model {name!r} follows no deltas. Start the server with --deltas.")
            return None
        if "run" not in predictor.about or "step" not in predictor.about:
            raise ValueError(f"the package of {name!r} does not say its run. Export it from a run.")
        codes, hashed = Codes(predictor.quantised, predictor.rounding), predictor.hashed
        folder, weights = self._deltas[name], predictor.weights
        return Deltas(folder, predictor.about, weights, until, codes=codes, hashed=hashed)

    def _replace(self, name: str, served: Served | None, reason: str = _UNLOADED) -> None:
        """Replace a model by another version, or by none for the given reason."""
        self._cancel(name)
        old = self._served.pop(name, None)
        if served is not None:
            self._served[name] = served
        self._reasons[name] = reason if served is None else ""
        if old is not None:
            leaving = asyncio.create_task(old.batcher.drain())
            self._leaving.add(leaving)
            leaving.add_done_callback(self._leaving.discard)

    def _warm(self, served: Served) -> None:
        for request in self._opening.warm_up.requests(served.signature):
            served.score(request)
        served.forget_histories()
        served.count_histories()


def _incremental(name: str, predictor: Predictor, max_bytes: int) -> IncrementalScores | None:
    """Return what computes queries from kept histories; None if nothing is to be kept, or can be."""
    if not max_bytes or predictor.items is None:
        return None
    if predictor.incremental is None:
        _log.warning(
            "model %r keeps no histories, and encodes the whole history for each request: its package "
            "describes no model that continues from kept keys and values, as HSTU with float32 rows does",
            name,
        )
        return None
    return IncrementalScores(predictor, max_bytes)


def _unreached(until: int, served: Served) -> ValueError:
    delta, _, reason = served.freshness
    if delta is not None:
        can = f"the last that can is {delta}"
    else:
        can = f"no delta up to it comes after the package, which is of step {served.about['step']}"
    return ValueError(f"delta {until} cannot be reached; {can}.{reason and f' {reason}'}")
