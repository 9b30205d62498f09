"""Batches in flight: copied to the device, with lookups which start before the model calls the modules."""

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
    """Mover of batches to a device. CUDA copies run on a separate stream, and overlap with computation.

    Args:
        device: device to copy to; None: batches are returned unchanged.
    """

    def __init__(self, device: torch.device | None) -> None:
        self._device = device
        # None unless batches are copied to a CUDA device.
        self._stream = torch.cuda.Stream(device) if device is not None and device.type == "cuda" else None

    def move_batch(self, batch: Any) -> Any:
        """Return a copy of the batch on the device. Call ``wait`` before using it, because it may be
        incomplete.

        Objects with a ``to`` method are copied, also if they are inside tuples, lists and mappings.
        """
        if self._device is None:
            return batch
        with torch.cuda.stream(self._stream):  # no stream on a CPU
            return _copy_to(batch, self._device)

    def wait(self, batch: Any) -> None:
        """Let the current CUDA stream wait until the batch has been copied."""
        if self._stream is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_stream(self._stream)
            # The allocator ties the copy's memory to the side stream, and could reuse it too early otherwise.
            _record_stream(batch, current)


class PathStep(NamedTuple):
    """A step from an object to one of its attributes (``.name``) or items (``[name]``)."""

    name: Any
    """Attribute name, mapping key, or sequence index."""
    is_item: bool
    """Whether ``name`` is a mapping key or a sequence index."""

    def __str__(self) -> str:
        return f"[{self.name!r}]" if self.is_item else f".{self.name}"


# How to reach an object inside a batch, such as ``batch.sparse['user']``.
Path = tuple[PathStep, ...]


def find_tensors(batch: Any) -> list[tuple[Path, Tensor | Jagged]]:
    """Return all tensors and jagged tensors in a batch, with the path to each.

    Objects which occur several times are listed once. The search covers mappings, sequences, dataclass
    fields, and attributes of other objects.
    """
    leaves: list[tuple[Path, Tensor | Jagged]] = []
    seen: set[int] = set()
    # A stack instead of recursion: every batch is walked, and calls took most of the time.
    stack: list[tuple[Path, Any]] = [((), batch)]
    while stack:
        path, part = stack.pop()
        # Objects are compared by identity, because equal tensors may be different inputs.
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


# Cached, because batches consist of the same few types, and the search for slots walks all base classes.
@functools.lru_cache
def _parts_of(kind: type) -> Callable[[Any], list[tuple[PathStep, Any]]]:
    """Return a function which lists the parts (attributes or items) of an instance of the type ``kind``.

    The function returns a list of pairs: the `PathStep` that leads to the part, and the part itself.
    """
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
    """Return the path to the object ``features`` in a batch; None if the batch does not contain it."""
    return next((path for path, part in find_tensors(batch) if part is features), None)


def object_at(batch: Any, path: Path) -> Any:
    """Return the object at ``path`` in a batch. None if the batch has no object there."""
    # Batches may differ in structure, so a missing part is not an error.
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
    """A call of a sharded module which the forward pass makes in every batch."""

    name: str
    """Name of the module in the model."""
    module: Collection
    path: Path | None
    """Where the batch contains the input of the call. None if the forward pass creates the input."""


class LookupInFlight:
    """The lookup of a sharded module for an input, started before the forward pass calls the module.

    Creating the object routes the IDs and starts the size exchange, which is collective. See [Note: the
    stages of a batch] in ``distributed/sharded_tables.py``.

    Args:
        module: sharded module.
        features: input with which the forward pass will call the module.
    """

    def __init__(self, module: Collection, features: KeyedJaggedTensor) -> None:
        self.module, self.features = module, features
        # The state on which the lookup depends. After a reshard or a mode change, the lookup is not used
        # (see is_current).
        self._before, self._tables = _module_mode(module), module.tables
        # State between the stages of the lookup.
        self._batch = self._tables.route(features)
        # The module's result, set by send_embeddings. It is stored here, because in the LookupBatch it would
        # be part of a reference cycle.
        self._result: LazyAwaitable[Any] | None = None
        # The tables' ``num_changes`` when ``_result`` was looked up, and whether it is kept after later
        # updates (semi-synchronous training).
        self._num_changes, self._keeps_result = -1, False

    @property
    def is_current(self) -> bool:
        """Whether the tables, grad mode and trainable parameters are the same as when the lookup started."""
        return self._before == _module_mode(self.module)

    def advance(self, stage: Stage) -> None:
        """Run the lookup up to and including ``stage``, except stages already run. Collective.

        Raises:
            ValueError: the input on some rank is invalid. All ranks raise it.
        """
        if self._batch.stage < stage:
            self._tables.advance(self._batch, stage)

    def send_embeddings(self, *, keep_result: bool = False) -> LazyAwaitable[Any]:
        """Look up the rows, start to send them, and return the module's result. Collective.

        A second call returns the same result, or looks up the rows again if the tables have changed since.

        Args:
            keep_result: return this result also in later calls, even if the tables have changed.
        """
        num_changes = self._tables.num_changes
        self._keeps_result |= keep_result
        if self._result is None or not (self._keeps_result or self._num_changes == num_changes):
            self._result = self.module.awaited(self._batch, self._tables.look_up(self._batch))
            self._num_changes = num_changes
        return self._result


@dataclass
class BatchInFlight:
    """A batch which the loader has returned, with lookups for it, until the forward pass uses them."""

    batch: Any
    """The batch, already copied to the device."""
    lookups: list[LookupInFlight] = field(default_factory=list)
    """Lookups which have started, and whose results the forward pass has not taken yet."""
    error: Exception | None = None
    """Error from a lookup. `Lookahead.next` raises it when the training step for this batch starts."""

    def __post_init__(self) -> None:
        self._leaves = find_tensors(self.batch)
        # torch's write counters when the batch was read or last checked.
        self._versions = _tensor_versions(self._leaves)

    def describe_new_write(self) -> str | None:
        """Return a message if a tensor in the batch was changed in place since the last call, else None.

        The first call compares with the time at which the batch was read.
        """
        before, self._versions = self._versions, _tensor_versions(self._leaves)
        return _describe_write(before, self._versions)

    def route(self, module: Collection, features: KeyedJaggedTensor) -> None:
        """Start a lookup of ``module`` for ``features``, which are in the batch. Collective.

        An error is stored in ``error``.
        """
        # After an error, no further lookup may start: other ranks also stop here.
        if self.error is None:
            try:
                self.lookups.append(LookupInFlight(module, features))
            except Exception as error:
                self._fail(error)

    def send_ids(self) -> None:
        """Start the ID exchange for all lookups. Collective. If an input is invalid, store the error."""
        try:
            for lookup in self.lookups:
                lookup.advance(Stage.EXCHANGED)
        except Exception as error:
            self._fail(error)

    def start_reads(self) -> None:
        """Start to read rows of tables stored in files, so that they arrive while the previous batch
        computes.

        Collective. Waits for the ID exchange of these tables.
        """
        try:
            for lookup in self.lookups:
                if lookup.module.tables.rows_arrive:
                    lookup.advance(Stage.RESOLVED)
        except Exception as error:
            self._fail(error)

    def send_embeddings(self, is_ready: Callable[[Collection], bool], *, keep_result: bool = False) -> None:
        """Look up rows for the modules which are ready, and start to send them. Collective.

        For modules which are not ready, only replaces keys by slots (positions of rows in memory).

        Args:
            is_ready: returns whether a module's tables are up to date, so its rows can be looked up now.
            keep_result: see `LookupInFlight.send_embeddings`.
        """
        try:
            for lookup in self.lookups:
                if lookup.module.tables.needs_resolve:
                    lookup.advance(Stage.RESOLVED)
                if is_ready(lookup.module):
                    lookup.send_embeddings(keep_result=keep_result)
        except Exception as error:
            # Without tables in files, the error is not a failed read.
            if not any(lookup.module.tables.rows_arrive for lookup in self.lookups):
                raise
            # A failed read changes no table and fails on every rank, so it can be raised later.
            self._fail(error)

    def take(self, module: Collection, features: KeyedJaggedTensor) -> LazyAwaitable[Any] | None:
        """Return the result of the lookup for this module and input, and forget the lookup.

        Args:
            module: module which the forward pass calls.
            features: input of the call. It must be the object for which the lookup was started.

        Returns:
            The lazy result, or None if no lookup was started for this call, or if it is outdated.

        Raises:
            ValueError: the IDs were changed in place after the lookup started, for example by the forward
                pass.
        """
        for lookup in self.lookups:
            if lookup.module is module and lookup.features is features and lookup.is_current:
                versions = _tensor_versions([((), features)])
                if (change := _describe_write(self._versions, versions)) is not None:
                    raise ValueError(f"{change}. Give every batch tensors of its own.")
                # Taken once: a second call with the same input runs the plain lookup.
                self.lookups.remove(lookup)
                return lookup.send_embeddings()
        return None

    def take_error(self) -> Exception:
        """Return the stored error, and clear it."""
        error, self.error = self.error, None
        assert error is not None
        return error

    def _fail(self, error: Exception) -> None:
        """Store the error for the training step of this batch, and drop all lookups."""
        self.error = error
        # All ranks fail together, so no rank waits for these lookups.
        self.lookups.clear()


def _tensor_versions(leaves: Iterable[tuple[Path, Tensor | Jagged]]) -> dict[int, tuple[Path, Tensor, int]]:
    """Return (path, tensor, version) for all tensors in ``leaves``, by ``id(tensor)``.

    The version is the number of in-place writes, which torch counts.
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
    """Return a message about the first tensor which has changed between two `_tensor_versions`, or None."""
    for key, (path, _, version) in before.items():
        if key in now and now[key][2] != version:
            return (
                f"{path_text(path)} was written to after the loader had returned it, while its "
                "IDs were under way"
            )
    return None


def _module_mode(module: Collection) -> tuple[Any, ...]:
    """Return the settings of a module on which a lookup depends, in addition to IDs and weights.

    The settings are the identity of the object ``module.tables``, whether gradients are enabled, and
    ``requires_grad`` for every parameter. Settings change on all ranks or on none, so all ranks agree on
    whether a lookup started earlier is still valid.
    """
    trained = list(map(operator.attrgetter("requires_grad"), module.parameters()))
    return id(module.tables), torch.is_grad_enabled(), trained


def _copy_to(thing: Any, device: torch.device) -> Any:
    """Return a copy of ``thing`` on a device. Mappings, tuples and lists are copied item by item."""
    if hasattr(thing, "to"):
        # Asynchronous only from pinned memory. CUDA copies from other memory block this thread.
        return thing.to(device, non_blocking=True)
    if isinstance(thing, Mapping):
        return {name: _copy_to(part, device) for name, part in thing.items()}
    # Named tuples take their items as separate arguments.
    if isinstance(thing, tuple) and hasattr(thing, "_fields"):
        return type(thing)(*(_copy_to(part, device) for part in thing))
    if isinstance(thing, list | tuple):
        return type(thing)(_copy_to(part, device) for part in thing)
    return thing


def _record_stream(thing: Any, stream: Any) -> None:
    """Tell the CUDA allocator not to reuse the memory of ``thing`` before ``stream`` has used it."""
    if hasattr(thing, "record_stream"):
        thing.record_stream(stream)
    elif isinstance(thing, Mapping):
        for part in thing.values():
            _record_stream(part, stream)
    elif isinstance(thing, list | tuple):
        for part in thing:
            _record_stream(part, stream)
