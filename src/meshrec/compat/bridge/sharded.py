"""Sharded collections with TorchRec's attributes: a combined optimizer, and callable stages."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.fx import Proxy

from meshrec.compat.bridge.awaitables import Awaitable
from meshrec.compat.bridge.keyed import CombinedOptimizer
from meshrec.compat.bridge.quant_tables import QuantTableGroup, table_groups
from meshrec.compat.bridge.sharded_traces import record_bags, record_sequences
from meshrec.compat.bridge.sparse import KeyedJaggedTensor
from meshrec.compat.bridge.streamable import Multistreamable
from meshrec.distributed import embedding_modules as core
from meshrec.distributed.awaitable import LazyAwaitable
from meshrec.distributed.build import ModuleParts
from meshrec.distributed.lookup_batch import LookupBatch, Stage
from meshrec.distributed.sharded_tables import ShardedTables
from meshrec.tables import FusedOptimizer


class _Later(Awaitable[Any]):
    """Awaitable whose value is the result of a function, which ``wait`` calls."""

    def __init__(self, finish: Callable[[], Any]) -> None:
        super().__init__()
        self._finish = finish

    def _wait_impl(self) -> Any:
        return self._finish()


class ShardedContext(Multistreamable):
    """Context that TorchRec's stages pass along. Empty, because MeshRec's batches hold all state."""

    def record_stream(self, stream: Any) -> None:
        """Do nothing."""


class _Stages:
    """Stages of a batch in a sharded module, with the method names from TorchRec's tutorials."""

    built: ModuleParts
    tables: ShardedTables
    awaited: Callable[[LookupBatch, Tensor], LazyAwaitable[Any]]
    _configs: Any

    def __init__(self, module: nn.Module, built: ModuleParts) -> None:
        super().__init__(module, built)  # type: ignore[call-arg]  # the sharded collection's constructor
        # Empty if no table is fused.
        optimizer: FusedOptimizer = self.fused_optimizer
        self.fused_optimizer: Any = CombinedOptimizer([("", optimizer)] if optimizer.params else [])
        self._need_indices = bool(getattr(module, "_need_indices", False))

    def create_context(self) -> ShardedContext:
        """Return an empty context."""
        return ShardedContext()

    def input_dist(self, ctx: object, features: KeyedJaggedTensor) -> Awaitable[Awaitable[LookupBatch]]:
        """Send the IDs to the ranks that hold their rows. Collective.

        Returns:
            Awaitable in an awaitable. The first ``wait`` ends when the ranks have exchanged the number of IDs
            to send, the second when the IDs have arrived.
        """
        tables = self.tables
        batch = tables.route(features)

        def wait_for_sizes() -> _Later:
            # The inner call runs now and exchanges the sizes. The outer one waits until the IDs have arrived.
            return _Later(partial(tables.advance, tables.advance(batch, Stage.EXCHANGED), Stage.ARRIVED))

        return _Later(wait_for_sizes)

    def compute(self, ctx: object, dist_input: LookupBatch) -> tuple[LookupBatch, Tensor]:
        """Look up the IDs in this rank's shards, and start to send the rows back. Collective.

        Returns:
            The batch and the rows, for `output_dist`.
        """
        return dist_input, self.tables.look_up(dist_input)

    def output_dist(self, ctx: object, output: tuple[LookupBatch, Tensor]) -> LazyAwaitable[Any]:
        """Return an awaitable for the embeddings of the batch. ``output`` is the result of `compute`."""
        return self.awaited(*output)

    def compute_and_output_dist(self, ctx: object, input: LookupBatch) -> LazyAwaitable[Any]:
        return self.output_dist(ctx, self.compute(ctx, input))

    @property
    def tbes(self) -> list[QuantTableGroup]:
        """Table groups by pooling type, with this rank's rows."""
        # AttributeError, so that ``getattr(module, "tbes", [])`` skips trained collections.
        if any(config.data_type.bits == 0 for config in self._configs):
            raise AttributeError("only quantised collections have tbes. Read the state_dict of this one.")
        return table_groups(self)


class ShardedEmbeddingBagCollection(_Stages, core.ShardedEmbeddingBagCollection):
    """MeshRec's sharded collection with TorchRec's attribute names."""

    def forward(self, features: KeyedJaggedTensor) -> Any:  # type: ignore[override]
        """Look up and pool. torch.fx records a lookup per feature; see ``sharded_traces``."""
        if isinstance(features, Proxy):
            configs = self.embedding_bag_configs()
            return record_bags(self.built, configs, features, weighted=self.is_weighted())
        return super().forward(features)


class ShardedEmbeddingCollection(_Stages, core.ShardedEmbeddingCollection):
    """MeshRec's sharded collection with TorchRec's attribute names."""

    def forward(self, features: KeyedJaggedTensor) -> Any:  # type: ignore[override]
        """Look up. torch.fx records a lookup per feature; see ``sharded_traces``."""
        if isinstance(features, Proxy):
            configs = self.embedding_configs()
            return record_sequences(self.built, configs, features, need_indices=self._need_indices)
        return super().forward(features)


def combined_optimizer(modules: Mapping[str, nn.Module]) -> CombinedOptimizer:
    """Combine the optimizers of sharded modules, keyed by path."""
    return CombinedOptimizer([(path, module.fused_optimizer) for path, module in modules.items()])  # type: ignore[misc]
