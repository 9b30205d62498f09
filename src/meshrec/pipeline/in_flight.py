"""A batch in flight to the model: the copy to the device, the tensors, and the lookup states."""

import functools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from meshrec.distributed.awaitable import LazyAwaitable
from meshrec.distributed.embedding_modules import ShardedEmbeddingBagCollection, ShardedEmbeddingCollection
from meshrec.distributed.lookup_batch import Stage
from meshrec.sparse import KeyedJaggedTensor
from meshrec.sparse.jagged_tensor import Jagged

Collection = ShardedEmbeddingBagCollection | ShardedEmbeddingCollection
_LEAVES = (str, bytes, int, float, complex, type(None), type, nn.Module)


class Mover:
    """Copies batches to ``device``, on CUDA in a separate stream. None leaves batches where they are."""

    def __init__(self, device: torch.device | None) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device is not None and device.type == "cuda" else None

    def moved(self, batch: Any) -> Any:
        """Return the batch on the device. The copy may still be in flight, see ``wait``.

        Objects with a ``to`` method are moved, alone or in tuples, lists and mappings.
        """
        if self._device is None:
            return batch
        with torch.cuda.stream(self._stream):  # no stream on a CPU
            return _moved(batch, self._device)

    def wait(self, batch: Any) -> None:
        """Make computation from now on wait for the copy."""
        if self._stream is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_stream(self._stream)
            # The copy's memory belongs to the side stream; without this, it could be reused too early.
            _record(batch, current)


class PathStep(NamedTuple):
    """A step from an object to a part: an attribute, or an item in a mapping or sequence."""

    name: Any
    is_item: bool

    def __str__(self) -> str:
        return f"[{self.name!r}]" if self.is_item else f".{self.name}"


Path = tuple[PathStep, ...]


def walk(batch: Any) -> list[tuple[Path, Tensor | Jagged]]:
    """List (path, tensor or jagged tensor) pairs in ``batch``. An object appears once."""
    leaves: list[tuple[Path, Tensor | Jagged]] = []
    seen: set[int] = set()
    # A stack instead of recursion: every batch is walked, and most time was spent in calls.
    stack: list[tuple[Path, Any]] = [((), batch)]
    while stack:
        path, part = stack.pop()
        if isinstance(part, _LEAVES) or id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(part, Tensor | Jagged):
            leaves.append((path, part))
            continue
        parts_of = _parts_of(type(part))  # type: ignore[arg-type]  # the type's hash is not that of its instances
        # Reversed, so leaves are listed in batch order.
        stack += [((*path, step), child) for step, child in reversed(parts_of(part))]
    return leaves


@functools.lru_cache
def _parts_of(kind: type) -> Callable[[Any], list[tuple[PathStep, Any]]]:
    """Return the function that lists the parts of a type's instances."""
    if issubclass(kind, Mapping):
        return lambda mapping: [(PathStep(name, True), part) for name, part in mapping.items()]
    if issubclass(kind, Sequence):
        return lambda sequence: [(PathStep(number, True), part) for number, part in enumerate(sequence)]
    if is_dataclass(kind) and "__dataclass_fields__" in vars(kind):  # not only a base class
        steps = [PathStep(field.name, False) for field in fields(kind)]
        return lambda batch: [(step, getattr(batch, step.name, None)) for step in steps]
    # Other types declare no list of their attributes.
    slots = [base.__dict__.get("__slots__", ()) for base in kind.__mro__]
    names = [name for names in slots for name in ((names,) if isinstance(names, str) else names)]
    names = [name for name in names if name not in ("__weakref__", "__dict__")]
    return lambda thing: [
        (PathStep(name, False), getattr(thing, name, None))
        for name in (*getattr(thing, "__dict__", ()), *names)
    ]


def find(batch: Any, features: KeyedJaggedTensor) -> Path | None:
    """Return the path to this very object in the batch; None if the batch does not contain it."""
    return next((path for path, part in walk(batch) if part is features), None)


def follow(batch: Any, path: Path) -> Any:
    """Return the object at ``path``; None if there is none."""
    for name, is_item in path:
        try:
            batch = batch[name] if is_item else getattr(batch, name)
        except (AttributeError, IndexError, KeyError, TypeError):
            return None
    return batch


def text_of(path: Path) -> str:
    """Return the path as Python code, such as ``batch.sparse['user']``."""
    return "batch" + "".join(map(str, path))


class Call(NamedTuple):
    """A sharded-module call in the forward pass.

    ``path`` is the input's position in the batch; None if the forward pass creates the input.
    """

    name: str
    module: Collection
    path: Path | None


class LookupInFlight:
    """Lookup for a module call, started ahead of the call.

    It holds the result: in the LookupBatch, the result would be in a cycle that nothing frees.
    """

    def __init__(self, module: Collection, features: KeyedJaggedTensor) -> None:
        self.module, self.features = module, features
        # Both are fixed now: a reshard or a changed mode makes this lookup unusable.
        self._before, self._tables = _mode(module), module.tables
        self._batch = self._tables.route(features)
        self._result: LazyAwaitable[Any] | None = None
        # ``num_changes`` at the last lookup, and whether later updates are ignored (semi-synchronous).
        self._num_changes, self._stays = -1, False

    @property
    def is_of_now(self) -> bool:
        """Whether an exchange started now would give the same result."""
        return self._before == _mode(self.module)

    def advance(self, stage: Stage) -> None:
        """Run the stages up to ``stage``, except completed stages.

        Raises:
            ValueError: some rank's input was invalid; raised on every rank.
        """
        if self._batch.stage < stage:
            self._tables.advance(self._batch, stage)

    def send_embeddings(self, *, stays: bool = False) -> LazyAwaitable[Any]:
        """Start sending the current embeddings back. If tables changed since an earlier call, send them
        again.

        With ``stays``, keep these embeddings whatever changes later.
        """
        num_changes = self._tables.num_changes
        self._stays |= stays
        if self._result is None or not (self._stays or self._num_changes == num_changes):
            self._result = self.module.awaited(self._batch, self._tables.look_up(self._batch))
            self._num_changes = num_changes
        return self._result


@dataclass
class BatchInFlight:
    """A batch between the loader and the backward pass.

    ``error`` is raised at the batch's turn. ``lookups`` holds the lookups not yet taken by a module call.
    """

    batch: Any
    lookups: list[LookupInFlight] = field(default_factory=list)
    error: Exception | None = None

    def __post_init__(self) -> None:
        self._leaves = walk(self.batch)
        self._versions = _versions(self._leaves)

    def take_change(self) -> str | None:
        """Describe a write to the batch since the loader returned it, once; None if there was none."""
        before, self._versions = self._versions, _versions(self._leaves)
        return _change(before, self._versions)

    def route(self, module: Collection, features: KeyedJaggedTensor) -> None:
        """Start a call's lookup. Collective."""
        if self.error is None:
            try:
                self.lookups.append(LookupInFlight(module, features))
            except Exception as error:
                self._fail(error)

    def send_ids(self) -> None:
        """Start the ID exchange for all lookups. Collective. Invalid input becomes the batch's error."""
        try:
            for lookup in self.lookups:
                lookup.advance(Stage.EXCHANGED)
        except Exception as error:
            self._fail(error)

    def start_reads(self) -> None:
        """Start reading rows outside memory, while the previous batch computes. Collective.

        This waits for the ID exchange, and only tables with rows outside memory need it.
        """
        try:
            for lookup in self.lookups:
                if lookup.module.tables.rows_arrive:
                    lookup.advance(Stage.RESOLVED)
        except Exception as error:
            self._fail(error)

    def send_embeddings(self, is_ready: Callable[[Collection], bool], *, stays: bool = False) -> None:
        """Start sending embeddings back for the ready modules.

        Slots are resolved for all modules now, whoever updates the tables: at most a batch ahead.

        Args:
            is_ready: selects the modules.
            stays: see `LookupInFlight.send_embeddings`.
        """
        try:
            for lookup in self.lookups:
                if lookup.module.tables.needs_resolve:
                    lookup.advance(Stage.RESOLVED)
                if is_ready(lookup.module):
                    lookup.send_embeddings(stays=stays)
        except Exception as error:
            if not any(lookup.module.tables.rows_arrive for lookup in self.lookups):
                raise
            self._fail(error)  # on every rank alike, and nothing has changed: raised at the batch's turn

    def take(self, module: Collection, features: KeyedJaggedTensor) -> LazyAwaitable[Any] | None:
        """Return the result for this module call, once; None if no lookup is in flight.

        Raises:
            ValueError: the IDs were written to meanwhile, for example by the forward pass.
        """
        for lookup in self.lookups:
            if lookup.module is module and lookup.features is features and lookup.is_of_now:
                if (change := _change(self._versions, _versions([((), features)]))) is not None:
                    raise ValueError(f"{change}. Give every batch tensors of its own.")
                self.lookups.remove(lookup)
                return lookup.send_embeddings()
        return None

    def take_error(self) -> Exception:
        """Return the error and forget it."""
        error, self.error = self.error, None
        assert error is not None
        return error

    def _fail(self, error: Exception) -> None:
        self.error = error
        # All ranks fail together, so no rank waits for these lookups.
        self.lookups.clear()


def _versions(leaves: Iterable[tuple[Path, Tensor | Jagged]]) -> dict[int, tuple[Path, Tensor, int]]:
    """Return (path, tensor, write count) for all tensors in a batch's leaves, by the tensor's ``id``."""
    versions: dict[int, tuple[Path, Tensor, int]] = {}
    for path, part in leaves:
        for tensor in part._tensors() if isinstance(part, Jagged) else (part,):
            # Inference tensors have no version counter. Holding the tensor keeps its ``id`` unique.
            if not tensor.is_inference():
                versions.setdefault(id(tensor), (path, tensor, tensor._version))
    return versions


def _change(
    before: Mapping[int, tuple[Path, Tensor, int]], now: Mapping[int, tuple[Path, Tensor, int]]
) -> str | None:
    """Describe the first write to a tensor in both; None if there was none."""
    for key, (path, _, version) in before.items():
        if key in now and now[key][2] != version:
            return (
                f"{text_of(path)} was written to after the loader had returned it, while its "
                "IDs were under way"
            )
    return None


def _mode(module: Collection) -> tuple[Any, ...]:
    """Return a lookup's dependencies other than IDs and weights. It changes on all ranks or on none."""
    trained = list(map(operator.attrgetter("requires_grad"), module.parameters()))
    return id(module.tables), torch.is_grad_enabled(), trained


def _moved(thing: Any, device: torch.device) -> Any:
    if hasattr(thing, "to"):
        return thing.to(device, non_blocking=True)
    if isinstance(thing, Mapping):
        return {name: _moved(part, device) for name, part in thing.items()}
    if isinstance(thing, tuple) and hasattr(thing, "_fields"):
        return type(thing)(*(_moved(part, device) for part in thing))
    if isinstance(thing, list | tuple):
        return type(thing)(_moved(part, device) for part in thing)
    return thing


def _record(thing: Any, stream: Any) -> None:
    """Keep the copy's memory until ``stream`` has used it."""
    if hasattr(thing, "record_stream"):
        thing.record_stream(stream)
    elif isinstance(thing, Mapping):
        for part in thing.values():
            _record(part, stream)
    elif isinstance(thing, list | tuple):
        for part in thing:
            _record(part, stream)
