"""Batches in flight: the copy to the device, and lookups started before the model calls the modules."""

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
# Types whose attributes and items are not searched for tensors.
_LEAVES = (str, bytes, int, float, complex, type(None), type, nn.Module)


class Mover:
    """Copies batches to ``device``, on CUDA in a separate stream.

    If ``device`` is None, batches are unchanged.
    """

    def __init__(self, device: torch.device | None) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device is not None and device.type == "cuda" else None

    def move_batch(self, batch: Any) -> Any:
        """Return a copy of the batch on the device. The copy may still be in flight, see ``wait``.

        Copies objects with a ``to`` method, also inside tuples, lists and mappings.
        """
        if self._device is None:
            return batch
        with torch.cuda.stream(self._stream):  # no stream on a CPU
            return _copy_to(batch, self._device)

    def wait(self, batch: Any) -> None:
        """Make the current CUDA stream wait until the batch has been copied."""
        if self._stream is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_stream(self._stream)
            # The allocator ties the copy's memory to the side stream, and could reuse it too early otherwise.
            _record_stream(batch, current)


class PathStep(NamedTuple):
    """A step from an object to a part: ``.name`` (attribute), or ``[name]`` (item)."""

    name: Any
    is_item: bool
    """Whether ``name`` is a mapping key or sequence index; otherwise it is an attribute."""

    def __str__(self) -> str:
        return f"[{self.name!r}]" if self.is_item else f".{self.name}"


Path = tuple[PathStep, ...]


def find_tensors(batch: Any) -> list[tuple[Path, Tensor | Jagged]]:
    """Return all tensors and jagged tensors in ``batch``, in order, with the paths.

    An object occurs once.
    """
    leaves: list[tuple[Path, Tensor | Jagged]] = []
    seen: set[int] = set()
    # A stack instead of recursion: every batch is walked, and calls took most of the time.
    stack: list[tuple[Path, Any]] = [((), batch)]
    while stack:
        path, part = stack.pop()
        if isinstance(part, _LEAVES) or id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(part, Tensor | Jagged):
            leaves.append((path, part))
            continue
        parts_of = _parts_of(type(part))  # type: ignore[arg-type]  # the type's hash differs from the instances'
        # Reversed, so leaves are listed in batch order.
        stack += [((*path, step), child) for step, child in reversed(parts_of(part))]
    return leaves


@functools.lru_cache
def _parts_of(kind: type) -> Callable[[Any], list[tuple[PathStep, Any]]]:
    """Return the function listing a ``kind`` instance's attributes or items, with the steps."""
    if issubclass(kind, Mapping):
        return lambda mapping: [(PathStep(name, True), part) for name, part in mapping.items()]
    if issubclass(kind, Sequence):
        return lambda sequence: [(PathStep(number, True), part) for number, part in enumerate(sequence)]
    if is_dataclass(kind) and "__dataclass_fields__" in vars(kind):  # not only a base class
        steps = [PathStep(field.name, False) for field in fields(kind)]
        return lambda batch: [(step, getattr(batch, step.name, None)) for step in steps]
    # Other types do not list attributes, so read them from every instance.
    slots = [base.__dict__.get("__slots__", ()) for base in kind.__mro__]
    names = [name for names in slots for name in ((names,) if isinstance(names, str) else names)]
    names = [name for name in names if name not in ("__weakref__", "__dict__")]
    return lambda thing: [
        (PathStep(name, False), getattr(thing, name, None))
        for name in (*getattr(thing, "__dict__", ()), *names)
    ]


def path_to(batch: Any, features: KeyedJaggedTensor) -> Path | None:
    """Return the path to ``features``, compared by identity, in the batch; None if absent."""
    return next((path for path, part in find_tensors(batch) if part is features), None)


def object_at(batch: Any, path: Path) -> Any:
    """Return the object at ``path`` in ``batch``; None if the batch has no object there."""
    for name, is_item in path:
        try:
            batch = batch[name] if is_item else getattr(batch, name)
        except (AttributeError, IndexError, KeyError, TypeError):
            return None
    return batch


def path_text(path: Path) -> str:
    """Return the path as Python code, such as ``batch.sparse['user']``."""
    return "batch" + "".join(map(str, path))


class Call(NamedTuple):
    """A sharded module call in the forward pass."""

    name: str
    """Module name in the model."""
    module: Collection
    path: Path | None
    """Call input position in the batch; None if the forward pass creates the input."""


class LookupInFlight:
    """Module lookup for known input, started before the forward pass calls the module.

    Args:
        module: sharded module.
        features: the call's input.
    """

    def __init__(self, module: Collection, features: KeyedJaggedTensor) -> None:
        self.module, self.features = module, features
        # Fixed at the start: after a reshard or mode change, this lookup is not used (see is_current).
        self._before, self._tables = _module_mode(module), module.tables
        self._batch = self._tables.route(features)
        # From send_embeddings on. Held here, because in the LookupBatch it would be part of a reference
        # cycle.
        self._result: LazyAwaitable[Any] | None = None
        # The tables' ``num_changes`` when ``_result`` was looked up, and whether it is kept after later
        # updates (semi-synchronous training).
        self._num_changes, self._keeps_result = -1, False

    @property
    def is_current(self) -> bool:
        """Whether the module's tables, grad mode and trainable parameters are unchanged since the start."""
        return self._before == _module_mode(self.module)

    def advance(self, stage: Stage) -> None:
        """Run all remaining stages up to ``stage``.

        Raises:
            ValueError: some rank's input was invalid; raised on every rank.
        """
        if self._batch.stage < stage:
            self._tables.advance(self._batch, stage)

    def send_embeddings(self, *, keep_result: bool = False) -> LazyAwaitable[Any]:
        """Look up the rows, start to send them to the requesting ranks, and return the module's result.

        A second call returns the same result, or looks up again if the tables have changed since.

        Args:
            keep_result: return this result in later calls as well, even if the tables change.
        """
        num_changes = self._tables.num_changes
        self._keeps_result |= keep_result
        if self._result is None or not (self._keeps_result or self._num_changes == num_changes):
            self._result = self.module.awaited(self._batch, self._tables.look_up(self._batch))
            self._num_changes = num_changes
        return self._result


@dataclass
class BatchInFlight:
    """A batch from the loader until the backward pass."""

    batch: Any
    lookups: list[LookupInFlight] = field(default_factory=list)
    """Started lookups not yet taken by the forward pass."""
    error: Exception | None = None
    """Lookup error; raised when the batch's training step starts."""

    def __post_init__(self) -> None:
        self._leaves = find_tensors(self.batch)
        self._versions = _tensor_versions(self._leaves)

    def describe_new_write(self) -> str | None:
        """Return a message if the batch was written to since the last call (or since it was read)."""
        before, self._versions = self._versions, _tensor_versions(self._leaves)
        return _describe_write(before, self._versions)

    def route(self, module: Collection, features: KeyedJaggedTensor) -> None:
        """Start a module's lookup for these features. Collective."""
        if self.error is None:
            try:
                self.lookups.append(LookupInFlight(module, features))
            except Exception as error:
                self._fail(error)

    def send_ids(self) -> None:
        """Start the ID exchange for all lookups.

        Collective. Stores the error for invalid input in ``error``.
        """
        try:
            for lookup in self.lookups:
                lookup.advance(Stage.EXCHANGED)
        except Exception as error:
            self._fail(error)

    def start_reads(self) -> None:
        """Start to read rows for tables stored in files, while the previous batch computes.

        Collective. Waits for these tables' ID exchange.
        """
        try:
            for lookup in self.lookups:
                if lookup.module.tables.rows_arrive:
                    lookup.advance(Stage.RESOLVED)
        except Exception as error:
            self._fail(error)

    def send_embeddings(self, is_ready: Callable[[Collection], bool], *, keep_result: bool = False) -> None:
        """Look up rows for modules which are ready, and start to send them to the requesting ranks.

        Resolves keys to slots for all modules, also if they are not ready.

        Args:
            is_ready: selects the modules whose rows are looked up now.
            keep_result: see `LookupInFlight.send_embeddings`.
        """
        try:
            for lookup in self.lookups:
                if lookup.module.tables.needs_resolve:
                    lookup.advance(Stage.RESOLVED)
                if is_ready(lookup.module):
                    lookup.send_embeddings(keep_result=keep_result)
        except Exception as error:
            if not any(lookup.module.tables.rows_arrive for lookup in self.lookups):
                raise
            # A failed read changes no table and fails on every rank, so it can be raised later.
            self._fail(error)

    def take(self, module: Collection, features: KeyedJaggedTensor) -> LazyAwaitable[Any] | None:
        """Return the result for this module and input from the lookup in flight, and forget the lookup.

        Returns None if no lookup matches.

        Raises:
            ValueError: the IDs were written to after the lookup started, for example by the forward pass.
        """
        for lookup in self.lookups:
            if lookup.module is module and lookup.features is features and lookup.is_current:
                versions = _tensor_versions([((), features)])
                if (change := _describe_write(self._versions, versions)) is not None:
                    raise ValueError(f"{change}. Give every batch tensors of its own.")
                self.lookups.remove(lookup)
                return lookup.send_embeddings()
        return None

    def take_error(self) -> Exception:
        """Return the stored error, and clear it."""
        error, self.error = self.error, None
        assert error is not None
        return error

    def _fail(self, error: Exception) -> None:
        """Store the error, and drop all lookups."""
        self.error = error
        # All ranks fail together, so no rank waits for these lookups.
        self.lookups.clear()


def _tensor_versions(leaves: Iterable[tuple[Path, Tensor | Jagged]]) -> dict[int, tuple[Path, Tensor, int]]:
    """Return (path, tensor, version) for all tensors in ``leaves``, by ``id(tensor)``.

    The version is torch's in-place write count.

    Args:
        leaves: tensors and jagged tensors in a batch, from `find_tensors`.
    """
    versions: dict[int, tuple[Path, Tensor, int]] = {}
    for path, part in leaves:
        for tensor in part._tensors() if isinstance(part, Jagged) else (part,):
            # Inference tensors have no version counter. Holding the tensor keeps the ``id`` unique.
            if not tensor.is_inference():
                versions.setdefault(id(tensor), (path, tensor, tensor._version))
    return versions


def _describe_write(
    before: Mapping[int, tuple[Path, Tensor, int]], now: Mapping[int, tuple[Path, Tensor, int]]
) -> str | None:
    """Compare two `_tensor_versions`, and return a message about the first changed tensor, or None."""
    for key, (path, _, version) in before.items():
        if key in now and now[key][2] != version:
            return (
                f"{path_text(path)} was written to after the loader had returned it, while its "
                "IDs were under way"
            )
    return None


def _module_mode(module: Collection) -> tuple[Any, ...]:
    """Return a lookup's dependencies besides IDs and weights: tables, grad mode, ``requires_grad``.

    They change on all ranks or on none, so ranks agree on whether a lookup is used.
    """
    trained = list(map(operator.attrgetter("requires_grad"), module.parameters()))
    return id(module.tables), torch.is_grad_enabled(), trained


def _copy_to(thing: Any, device: torch.device) -> Any:
    """Copy objects with a ``to`` method, also inside mappings, tuples and lists, to a device."""
    if hasattr(thing, "to"):
        return thing.to(device, non_blocking=True)
    if isinstance(thing, Mapping):
        return {name: _copy_to(part, device) for name, part in thing.items()}
    if isinstance(thing, tuple) and hasattr(thing, "_fields"):
        return type(thing)(*(_copy_to(part, device) for part in thing))
    if isinstance(thing, list | tuple):
        return type(thing)(_copy_to(part, device) for part in thing)
    return thing


def _record_stream(thing: Any, stream: Any) -> None:
    """Tell the CUDA allocator not to reuse the batch's memory before ``stream`` has used it."""
    if hasattr(thing, "record_stream"):
        thing.record_stream(stream)
    elif isinstance(thing, Mapping):
        for part in thing.values():
            _record_stream(part, stream)
    elif isinstance(thing, list | tuple):
        for part in thing:
            _record_stream(part, stream)
