"""A batch on its way into the model, and the state of its lookups."""

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
from meshrec.tables.row_file import RowFileError

Collection = ShardedEmbeddingBagCollection | ShardedEmbeddingCollection


class Call(NamedTuple):
    """A call of a sharded module in the forward pass.

    ``path`` is the place of its input in the batch; None if the forward pass makes the input.
    """

    name: str
    module: Collection
    path: Path | None


class LookupInFlight:
    """The lookup for one call of a module, in its stages: exchange of sizes, then of IDs, then of
    embeddings.
    """

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
        """Whether an exchange that starts now would give the same result."""
        return self._before == _mode(self.module)

    def send_ids(self) -> IdsInFlight:
        """Start to exchange IDs, unless they are under way already.

        Raises:
            ValueError: the input of a rank was invalid; raised on every rank.
        """
        if self._sent is None:
            self._sent = self._tables.exchange(self._sizes)
        return self._sent

    def receive_ids(self) -> ArrivedBatch:
        """Wait for the IDs and find the slots of their keys. A repeated lookup reuses both."""
        if self._batch is None:
            self._batch = self._tables.arrive(self.send_ids())
            if self._tables.needs_resolve:
                self._tables.resolve(self._batch)
        return self._batch

    def send_embeddings(self, *, stays: bool = False) -> LazyAwaitable[Any]:
        """Start to send embeddings back, as they are now. If tables have changed since an earlier call, send
        them again.

        With ``stays``, keep these embeddings whatever changes later.
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

    ``error`` is raised when it is the batch's turn. ``lookups`` are those that no call of a module has taken
    yet.
    """

    batch: Any
    lookups: list[LookupInFlight] = field(default_factory=list)
    error: Exception | None = None

    def __post_init__(self) -> None:
        self._versions = _versions(self.batch)

    def take_change(self) -> str | None:
        """Describe a write to the batch since the loader returned it, once; None if there was none."""
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
        """Start to exchange the IDs of all lookups. Collective. Invalid input becomes the batch's error."""
        try:
            for lookup in self.lookups:
                lookup.send_ids()
        except ValueError as error:
            self._fail(error)

    def begin_rows(self) -> None:
        """Start to read rows that are not in memory, while the previous batch computes. Collective.

        It waits for the exchange of IDs, and only tables with rows outside of memory need it.
        """
        try:
            for lookup in self.lookups:
                if lookup.module.tables.rows_arrive:
                    lookup.receive_ids()
        except ValueError as error:
            self._fail(error)

    def send_embeddings(self, is_ready: Callable[[Collection], bool], *, stays: bool = False) -> None:
        """Start to send back the embeddings of the modules that are ready. For ``stays``, see
        `LookupInFlight`.

        The slots of keys are found for all modules now, whoever updates the tables: at most one batch ahead.
        """
        try:
            for lookup in self.lookups:
                if lookup.module.tables.needs_resolve:
                    lookup.receive_ids()
                if is_ready(lookup.module):
                    lookup.send_embeddings(stays=stays)
        except (ValueError, RowFileError) as error:
            if not any(lookup.module.tables.rows_arrive for lookup in self.lookups):
                raise
            self._fail(
                error
            )  # on every rank alike, and nothing has changed: it is raised at the batch's turn

    def take(self, module: Collection, features: KeyedJaggedTensor) -> LazyAwaitable[Any] | None:
        """Return the result for this call of a module, once; None if its lookup is not under way.

        Raises:
            ValueError: the IDs were written to meanwhile, for example by the forward pass.
        """
        for lookup in self.lookups:
            if lookup.module is module and lookup.features is features and lookup.is_of_now:
                if (change := self._change(features)) is not None:
                    raise ValueError(f"{change}. Give every batch tensors of its own.")
                self.lookups.remove(lookup)
                return lookup.send_embeddings()
        return None

    def take_error(self) -> Exception:
        """Return the error and forget it."""
        error, self.error = self.error, None
        assert error is not None
        return error

    def _change(self, within: Any) -> str | None:
        own = {id(tensor) for _, tensor in tensors_of(within)}
        for path, tensor, version in self._versions:
            if tensor._version != version and id(tensor) in own:
                return (
                    f"{text_of(path)} was written to after the loader had returned it, while its "
                    "IDs were under way"
                )
        return None

    def _fail(self, error: Exception) -> None:
        self.error = error
        self.lookups.clear()


def _versions(batch: Any) -> list[tuple[Path, Tensor, int]]:
    found = [(path, tensor) for path, tensor in tensors_of(batch) if not tensor.is_inference()]
    return [(path, tensor, tensor._version) for path, tensor in found]


def _mode(module: Collection) -> tuple[Any, ...]:
    """Return the state, besides IDs and weights, that a lookup depends on. It changes on all ranks or on
    none.
    """
    trained = [parameter.requires_grad for parameter in module.parameters()]
    return id(module.tables), torch.is_grad_enabled(), trained
