"""One batch on its way into the model, and its lookups, each as far as it has come."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshrec.distributed.awaitable import LazyAwaitable
from meshrec.distributed.embedding_modules import ShardedEmbeddingBagCollection, ShardedEmbeddingCollection
from meshrec.distributed.input_dist import IdsInFlight
from meshrec.distributed.sharded_tables import ArrivedBatch
from meshrec.pipeline.batch_paths import Path, tensors_of, text_of
from meshrec.sparse import KeyedJaggedTensor

Collection = ShardedEmbeddingBagCollection | ShardedEmbeddingCollection


class Call(NamedTuple):
    """A call of a sharded module in the forward pass. ``path``: where its input lies in the batch; None
    where the forward pass makes it.
    """

    name: str
    module: Collection
    path: Path | None


class LookupInFlight:
    """The lookup for one call of a module: sizes, then IDs, then embeddings are under way."""

    def __init__(self, module: Collection, features: KeyedJaggedTensor) -> None:
        self.module, self.features = module, features
        self._before, self._tables = _mode(module), module.tables
        self._sizes = self._tables.route(features)
        self._sent: IdsInFlight | None = None
        self._batch: ArrivedBatch | None = None
        self._result: LazyAwaitable[Any] | None = None
        self._num_changes, self._stays = -1, False

    @property
    def is_of_now(self) -> bool:
        """Whether an exchange that starts now would do the same."""
        return self._before == _mode(self.module)

    def send_ids(self) -> IdsInFlight:
        """Start to exchange IDs, once. Raises ValueError on every rank when the input of any was bad."""
        if self._sent is None:
            self._sent = self._tables.exchange(self._sizes)
        return self._sent

    def receive_ids(self) -> ArrivedBatch:
        """Wait for the IDs and find the slots of their keys, once; a repeated lookup finds them here."""
        if self._batch is None:
            self._batch = self._tables.arrive(self.send_ids())
            if self._tables.needs_resolve:
                self._tables.resolve(self._batch)
        return self._batch

    def send_embeddings(self, *, stays: bool = False) -> LazyAwaitable[Any]:
        """Start to send embeddings back: those of now, if need be once more.

        ``stays``: keep these embeddings, whatever changes later.
        """
        batch, num_changes = self.receive_ids(), self._tables.num_changes
        self._stays |= stays
        if self._result is None or not (self._stays or self._num_changes == num_changes):
            self._result = self.module.awaited(self._tables.look_up(batch))
            self._num_changes = num_changes
        return self._result


@dataclass
class BatchInFlight:
    """A batch between the loader and its backward pass.

    ``error``: what to raise in its turn. ``lookups``: those that no call of a module has taken yet.
    """

    batch: Any
    lookups: list[LookupInFlight] = field(default_factory=list)
    error: Exception | None = None

    def __post_init__(self) -> None:
        self._versions = _versions(self.batch)

    def take_change(self) -> str | None:
        """What was written to since the loader gave the batch, once; None where nothing was."""
        change = self._change(self.batch)
        self._versions = _versions(self.batch)
        return change

    def route(self, module: Collection, features: KeyedJaggedTensor) -> None:
        """Start the lookup of one call. Collective."""
        if self.error is None:
            try:
                self.lookups.append(LookupInFlight(module, features))
            except ValueError as error:
                self._fail(error)

    def send_ids(self) -> None:
        """Start to exchange the IDs of all lookups. Collective; bad input becomes the batch's error."""
        try:
            for lookup in self.lookups:
                lookup.send_ids()
        except ValueError as error:
            self._fail(error)

    def send_embeddings(self, is_ready: Callable[[Collection], bool], *, stays: bool = False) -> None:
        """Start to send embeddings back, of the modules that are ready; ``stays``: see `LookupInFlight`.

        Slots are found for all modules: one batch ahead, whoever updates the tables afterwards.
        """
        for lookup in self.lookups:
            if lookup.module.tables.needs_resolve:
                lookup.receive_ids()
            if is_ready(lookup.module):
                lookup.send_embeddings(stays=stays)

    def take(self, module: Collection, features: KeyedJaggedTensor) -> LazyAwaitable[Any] | None:
        """The result for this call of a module, once; None where it is not under way.

        Raises:
            ValueError: when the ids were written to meanwhile, by the forward pass itself, say.
        """
        for lookup in self.lookups:
            if lookup.module is module and lookup.features is features and lookup.is_of_now:
                if (change := self._change(features)) is not None:
                    raise ValueError(f"{change}. Give every batch tensors of its own.")
                self.lookups.remove(lookup)
                return lookup.send_embeddings()
        return None

    def take_error(self) -> Exception:
        """The error, which is the caller's from now on."""
        error, self.error = self.error, None
        assert error is not None
        return error

    def _change(self, within: Any) -> str | None:
        own = {id(tensor) for _, tensor in tensors_of(within)}
        for path, tensor, version in self._versions:
            if tensor._version != version and id(tensor) in own:
                return (
                    f"{text_of(path)} was written to after the loader had handed it over, and while its "
                    "ids were under way"
                )
        return None

    def _fail(self, error: Exception) -> None:
        self.error = error
        self.lookups.clear()


def _versions(batch: Any) -> list[tuple[Path, Tensor, int]]:
    found = [(path, tensor) for path, tensor in tensors_of(batch) if not tensor.is_inference()]
    return [(path, tensor, tensor._version) for path, tensor in found]


def _mode(module: Collection) -> tuple[Any, ...]:
    """What a lookup depends on besides ids and weights; it changes on all ranks or on none."""
    trained = [parameter.requires_grad for parameter in module.parameters()]
    return id(module.tables), torch.is_grad_enabled(), trained
