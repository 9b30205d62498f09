"""TorchRec's managed collisions: map raw IDs to rows of a fixed-size table, with TorchRec's results.

This module exists for existing programs. New programs use tables with hashed keys (``meshrec.Hashed``), where
rows do not depend on the number of ranks.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from meshrec.compat.bridge.eviction import MCHEvictionPolicy
from meshrec.compat.bridge.sparse import JaggedTensor, KeyedJaggedTensor
from meshrec.modules import BaseEmbeddingConfig, EmbeddingBagCollection, EmbeddingCollection

# Recorded as single calls, and compiled by TorchScript: they read keys, which a proxy does not know.
torch.fx.wrap("bags_by_table")
torch.fx.wrap("joined_tables")
torch.fx.wrap("rows_of_ids")

_logger = logging.getLogger(__name__)
# TorchRec's fixed buffer size: checkpoints contain it, padded with -1.
_MAX_SEGMENTS = 1025
# Marks a free slot. The maximum keeps the ID array sorted, with free slots at the end.
_EMPTY = torch.iinfo(torch.int64).max
Hash = Callable[[Tensor, int], Tensor]
Jagged = dict[str, JaggedTensor]


class ManagedCollisionModule(nn.Module, ABC):
    """Base class of modules which map raw IDs to rows in ``[0, output_size())``.

    In training, the module changes the map: it admits new IDs to rows, and evicts other IDs.

    Args:
        device: device for the state.
        output_segments: row indices at which the rows may be split when a checkpoint is loaded.
        skip_state_validation: whether to omit ``output_segments`` from the state, so that they are not
            checked when a checkpoint is loaded.
        read_only_suffix: suffix of read-only feature names; only some subclasses use it.
        enable_per_feature_lookups: must be False.
    """

    _output_segments_tensor: Tensor
    _current_iter_tensor: Tensor

    def __init__(
        self,
        device: torch.device,
        output_segments: list[int],
        skip_state_validation: bool = False,
        read_only_suffix: str = "_readonly",
        enable_per_feature_lookups: bool = False,
    ) -> None:
        super().__init__()
        if enable_per_feature_lookups:
            raise ValueError(
                "a lookup for each feature gives the same rows. Leave enable_per_feature_lookups out."
            )
        self._read_only_suffix = read_only_suffix
        if skip_state_validation:
            self._device = device
            return
        if len(output_segments) > _MAX_SEGMENTS:
            raise ValueError(f"{len(output_segments)} output segments; at most {_MAX_SEGMENTS} are allowed.")
        self._device = device
        # A buffer of fixed size, so that modules with other segments can load it.
        padded = output_segments + [-1] * (_MAX_SEGMENTS - len(output_segments))
        self.register_buffer("_output_segments_tensor", torch.tensor(padded, device=device))
        self.register_buffer("_current_iter_tensor", torch.zeros(1, dtype=torch.int64, device=device))
        self.register_load_state_dict_post_hook(_validate)  # type: ignore[no-untyped-call]

    @property
    def device(self) -> torch.device:
        """Device of the module's buffers."""
        return self._device

    @property
    def read_only_suffix(self) -> str:
        """Suffix for read-only features."""
        return self._read_only_suffix

    @abstractmethod
    def preprocess(self, features: Jagged) -> Jagged:
        """Return the features to remap."""

    @abstractmethod
    def profile(self, features: Jagged) -> Jagged:
        """Record the features in training, admit and evict IDs when due, and return the features."""

    @abstractmethod
    def remap(self, features: Jagged, mutate_miss_lengths: bool = True) -> Jagged:
        """Return the features with IDs replaced by row indices.

        Args:
            features: bags of IDs by feature.
            mutate_miss_lengths: whether bags get shorter if the module drops IDs without a row.
        """

    def retained_mask(self, features: Jagged) -> Tensor | None:
        """Return whether `remap` keeps each ID, bool [n], over all features. None: it keeps all IDs.

        A module whose `remap` drops IDs must override this method. It is called after `remap`.
        """
        return None

    @abstractmethod
    def evict(self) -> Tensor | None:
        """Return the rows evicted since the last call; None if there are none."""

    @abstractmethod
    def output_size(self) -> int:
        """Return the number of rows."""

    @abstractmethod
    def input_size(self) -> int:
        """Return the exclusive upper limit for raw IDs."""

    @abstractmethod
    def buckets(self) -> int:
        """Return the number of equal row ranges."""

    @abstractmethod
    def validate_state(self) -> None:
        """Check the loaded state."""

    @abstractmethod
    def open_slots(self) -> Tensor:
        """Return the number of free rows, int64 [1]."""

    def forward(self, features: Jagged, mutate_miss_lengths: bool = True) -> Jagged:
        """Record the features, and replace IDs by rows."""
        return self.remap(self.profile(self.preprocess(features)), mutate_miss_lengths)


class FixedRows:
    """Mixin with the sizes of a managed collision module with ``zch_size`` rows."""

    _zch_size: int
    _input_hash_size: int
    _buckets: int

    def output_size(self) -> int:
        """Return the number of rows."""
        return self._zch_size

    def input_size(self) -> int:
        """Return the exclusive upper limit for raw IDs."""
        return self._input_hash_size

    def buckets(self) -> int:
        """Return the number of equal row ranges."""
        return self._buckets


class MCHManagedCollisionModule(FixedRows, ManagedCollisionModule):
    """Managed collisions with a dedicated row for the highest-scoring IDs. All other IDs share the last row.

    The mapping changes every ``eviction_interval`` training iterations. As in TorchRec, a row keeps its
    weights when its ID changes. The history has room for 1.25 times the first batch per iteration in the
    interval. IDs beyond that are not counted, and a warning says so.

    Args:
        zch_size: number of rows.
        device: device for the state.
        eviction_policy: policy that scores IDs.
        eviction_interval: iterations between mapping updates.
        input_hash_size: exclusive upper limit for raw IDs, and second argument to ``input_hash_func``.
        input_hash_func: hash for raw IDs; None: identity.
        mch_size: ignored, as in TorchRec.
        mch_hash_func: ignored, as in TorchRec.
        name: module name.
        output_global_offset: first row.
        output_segments: see `ManagedCollisionModule`.
        buckets: number of equal row ranges.
    """

    _mch_sorted_raw_ids: Tensor
    _mch_remapped_ids_mapping: Tensor

    def __init__(
        self,
        zch_size: int,
        device: torch.device,
        eviction_policy: MCHEvictionPolicy,
        eviction_interval: int,
        input_hash_size: int = (2**63) - 1,
        input_hash_func: Hash | None = None,
        mch_size: int | None = None,
        mch_hash_func: Hash | None = None,
        name: str | None = None,
        output_global_offset: int = 0,
        output_segments: list[int] | None = None,
        buckets: int = 1,
    ) -> None:
        if zch_size < 1 or eviction_interval < 1:
            raise ValueError(
                f"zch_size and eviction_interval must be at least 1, got {zch_size} and {eviction_interval}."
            )
        end = output_global_offset + zch_size
        super().__init__(device, output_segments or [output_global_offset, end])
        if mch_size is not None or mch_hash_func is not None:
            _logger.warning("mch_size and mch_hash_func are ignored, as TorchRec ignores them")
        self._name, self._zch_size, self._offset = name, zch_size, output_global_offset
        self._input_hash_size, self._input_hash_func = input_hash_size, input_hash_func
        self._eviction_policy, self._eviction_interval = eviction_policy, eviction_interval
        self._buckets = buckets
        # This module's own boundaries. Loading overwrites the buffer with the saved ones; validate_state
        # restores it.
        self._segments = self._output_segments_tensor.clone()
        self.register_buffer("_mch_sorted_raw_ids", torch.full((zch_size,), _EMPTY, device=device))
        self.register_buffer(
            "_mch_remapped_ids_mapping", torch.arange(output_global_offset, end, device=device)
        )
        for info in eviction_policy.metadata_info:
            if info.is_mch_metadata:
                zeros = torch.zeros(zch_size, dtype=torch.int64, device=device)
                self.register_buffer(f"_mch_{info.metadata_name}", zeros)
        # Not saved: a resumed run starts a new interval.
        self._history = _History(eviction_policy)
        # -1 until the first training batch, which reads the possibly loaded iteration from the buffer.
        self._current_iter = self._last_eviction_iter = -1
        # Evicted rows since the last evict(), which takes and clears them.
        self._evicted: Tensor | None = None

    @property
    def _metadata(self) -> dict[str, Tensor]:
        """Eviction policy's statistics by name. A statistic has an entry per row."""
        names = [info.metadata_name for info in self._eviction_policy.metadata_info if info.is_mch_metadata]
        return {name: self.get_buffer(f"_mch_{name}") for name in names}

    def preprocess(self, features: Jagged) -> Jagged:
        if self._input_hash_func is None:
            return features
        return {
            name: with_values(bags, self._input_hash_func(bags.values(), self._input_hash_size))
            for name, bags in features.items()
        }

    @torch.no_grad()
    def profile(self, features: Jagged) -> Jagged:
        if not self.training:
            return features
        if self._current_iter == -1:
            self._current_iter = self._last_eviction_iter = int(self._current_iter_tensor)
        self._current_iter += 1
        self._current_iter_tensor += 1
        # All features of a table share its rows, so they share the history.
        values = torch.cat([bags.values() for bags in features.values()])
        self._history.record(values, self._current_iter, self._eviction_interval)
        if self._current_iter - self._last_eviction_iter == self._eviction_interval:
            self._update()
            self._last_eviction_iter = self._current_iter
        return features

    def _update(self) -> None:
        """Admit and evict IDs as the eviction policy decides, and clear the history."""
        policy = self._eviction_policy
        ids, counts, metadata = self._history.take(self._current_iter)
        # Policies expect the history in descending count order.
        order = torch.argsort(counts, descending=True, stable=True)
        ids, counts = ids[order], counts[order]
        slots, is_present = self._search(ids)
        evicted, admitted = policy.update_metadata_and_generate_eviction_scores(
            self._current_iter,
            self._zch_size,
            order,
            counts,
            is_present,
            slots[is_present],
            self._metadata,
            metadata,
        )
        self._mch_sorted_raw_ids[evicted] = ids[~is_present][admitted]
        # Read before `_sort`, which moves rows to other slots. The new ID takes over the row of the evicted
        # ID.
        rows = self._mch_remapped_ids_mapping[evicted]
        self._evicted = rows if self._evicted is None else torch.cat([self._evicted, rows]).unique()
        self._sort()

    # The lookup is a binary search, so IDs must be ascending after every change.
    def _sort(self) -> None:
        """Sort the IDs, their rows and their statistics by ID."""
        order = torch.argsort(self._mch_sorted_raw_ids, stable=True)
        for values in (self._mch_sorted_raw_ids, self._mch_remapped_ids_mapping, *self._metadata.values()):
            values.copy_(values[order])

    def _search(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Search for IDs [n] among the IDs with a row.

        Returns:
            For every ID, the position in ``_mch_sorted_raw_ids``, int64 [n], and whether the ID is there,
            bool [n]. For an absent ID, the position is the one at which it would be inserted.
        """
        # Without the last slot, so that the index of an absent ID stays in range. That slot is the shared
        # row.
        slots = torch.searchsorted(self._mch_sorted_raw_ids[:-1], ids)
        return slots, self._mch_sorted_raw_ids[slots] == ids

    def remap(self, features: Jagged, mutate_miss_lengths: bool = True) -> Jagged:
        last = self._offset + self._zch_size - 1
        return rows_of_ids(features, self._mch_sorted_raw_ids, self._mch_remapped_ids_mapping, last)

    def evict(self) -> Tensor | None:
        evicted, self._evicted = self._evicted, None
        return evicted

    def open_slots(self) -> Tensor:
        return self._zch_size - 1 - torch.searchsorted(self._mch_sorted_raw_ids, torch.tensor([_EMPTY]))

    def validate_state(self) -> None:
        """Check the loaded state, and sort it by ID.

        Raises:
            ValueError: the row range of this module does not start and end at boundaries of the saved
                segments.
        """
        start, end = self._offset, self._offset + self._zch_size
        saved = self._output_segments_tensor
        if start not in saved or end not in saved:
            raise ValueError(
                f"rows [{start}, {end}) cannot be cut out of the segments {saved[saved >= 0].tolist()} that "
                "were saved. Load them into a module of the same zch_size."
            )
        # The checkpoint may come from another number of shards, so the segments of this module replace its
        # own.
        self._output_segments_tensor.copy_(self._segments)
        self._sort()


class _History:
    """IDs that were read since the last eviction, up to a fixed capacity."""

    def __init__(self, policy: MCHEvictionPolicy) -> None:
        self._policy = policy
        self._names = [info.metadata_name for info in policy.metadata_info if info.is_history_metadata]
        # Capacity in IDs, set by the first batch (-1 before it), and whether the warning about dropped IDs
        # has been logged.
        self._size, self._is_cut = -1, False
        # Both lists grow by an entry per batch, until take() empties them at the next eviction.
        self._ids: list[Tensor] = []
        self._metadata: list[dict[str, Tensor]] = []

    def record(self, ids: Tensor, current_iter: int, interval: int) -> None:
        """Append the IDs of a batch.

        Args:
            ids: IDs, int64 [n].
        """
        if self._size < 0:
            # TorchRec's factor.
            self._size = int(ids.numel() * interval * 1.25)
        free = self._size - sum(map(len, self._ids))
        if len(ids) > free and not self._is_cut:
            self._is_cut = True
            _logger.warning(
                "%d of a batch's %d IDs are not counted: the history has room for 1.25 times the first "
                "batch, as in TorchRec. Begin with a large batch, or take meshrec.Hashed, which counts all",
                len(ids) - free,
                len(ids),
            )
        # A copy: the caller may reuse the batch.
        ids = ids[:free].clone()
        metadata = {name: torch.zeros_like(ids) for name in self._names}
        self._policy.record_history_metadata(current_iter, ids, metadata)
        self._ids.append(ids)
        self._metadata.append(metadata)

    def take(self, current_iter: int) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Summarize the history per ID, and clear it.

        Returns:
            Distinct IDs [n], their occurrences [n], and the policy's statistics [n] by name. IDs that the
            policy's admission filter rejects are left out.
        """
        policy = self._policy
        ids, inverse, counts = torch.unique(torch.cat(self._ids), return_inverse=True, return_counts=True)
        history = {name: torch.cat([metadata[name] for metadata in self._metadata]) for name in self._names}
        func = policy._threshold_filtering_func
        mask = None if func is None else func(counts)[0]
        latest = policy.coalesce_history_metadata(current_iter, history, counts, inverse, threshold_mask=mask)
        self._ids, self._metadata = [], []
        return (ids, counts, latest) if mask is None else (ids[mask], counts[mask], latest)


class ManagedCollisionCollection(nn.Module):
    """Managed collision modules for all tables in a collection.

    Args:
        managed_collision_modules: module per table name.
        embedding_configs: table configs.
        need_preprocess: ignored; the modules always preprocess.
    """

    def __init__(
        self,
        managed_collision_modules: dict[str, ManagedCollisionModule],
        embedding_configs: Sequence[BaseEmbeddingConfig],
        need_preprocess: bool = True,
    ) -> None:
        super().__init__()
        self._managed_collision_modules = nn.ModuleDict(managed_collision_modules)
        self._embedding_configs = embedding_configs
        self.need_preprocess = need_preprocess
        for config in embedding_configs:
            if config.name not in managed_collision_modules:
                raise ValueError(
                    f"Table {config.name} is not present in managed_collision_modules. Give each table one."
                )
            size = managed_collision_modules[config.name].output_size()
            if size != config.num_embeddings:
                raise ValueError(
                    f"table {config.name!r} has {config.num_embeddings} rows, and its managed collision "
                    f"module gives {size}. Give them the same number."
                )
        self._feature_names = [name for config in embedding_configs for name in config.feature_names]

    def embedding_configs(self) -> Sequence[BaseEmbeddingConfig]:
        """Return the table configs."""
        return self._embedding_configs

    def table_to_number_buckets(self) -> dict[str, int]:
        """Return the bucket count by table."""
        return {name: module.buckets() for name, module in self._modules_by_table()}

    def _modules_by_table(self) -> list[tuple[str, ManagedCollisionModule]]:
        return list(self._managed_collision_modules.items())  # type: ignore[arg-type]

    def forward(self, features: KeyedJaggedTensor, mutate_miss_lengths: bool = True) -> KeyedJaggedTensor:
        """Return the features in table order, with IDs replaced by rows."""
        tables = [config.name for config in self._embedding_configs]
        counts = [len(config.feature_names) for config in self._embedding_configs]
        bags = bags_by_table(features, self._feature_names, counts, tables)
        remapped = [
            self._managed_collision_modules[table](bags[index], mutate_miss_lengths)
            for index, table in enumerate(tables)
        ]
        joined = joined_tables(features, self._feature_names, remapped)
        modules = dict(self._modules_by_table())
        masks = [modules[table].retained_mask(bags[index]) for index, table in enumerate(tables)]
        if all(mask is None for mask in masks) or joined.weights_or_none() is None:
            return joined
        # The modules do not see the weights of IDs, so those of dropped IDs are removed here.
        is_retained = [
            torch.ones(len(bags[index][table].values()), dtype=torch.bool) if mask is None else mask
            for index, (table, mask) in enumerate(zip(tables, masks, strict=True))
        ]
        return KeyedJaggedTensor(
            keys=joined.keys(),
            values=joined.values(),
            lengths=joined.lengths(),
            weights=joined.weights()[torch.cat(is_retained)],
        )

    def evict(self) -> dict[str, Tensor | None]:
        """Return the rows evicted since the last call, by table."""
        return {name: module.evict() for name, module in self._modules_by_table()}

    def open_slots(self) -> dict[str, Tensor]:
        """Return the number of free rows by table."""
        return {name: module.open_slots() for name, module in self._modules_by_table()}


# The next three functions are torch.fx leaves. They stay within the subset that TorchScript compiles.
def rows_of_ids(
    features: dict[str, JaggedTensor], sorted_ids: Tensor, rows: Tensor, last_row: int
) -> dict[str, JaggedTensor]:
    """Return bags by feature, in which row indices replace the IDs.

    Args:
        sorted_ids: IDs with a dedicated row, ascending [Z].
        rows: row per sorted ID [Z].
    """
    remapped: dict[str, JaggedTensor] = {}
    for name, bag in features.items():
        ids = bag.values()
        positions = torch.searchsorted(sorted_ids[:-1], ids)
        values = torch.where(sorted_ids[positions] == ids, rows[positions], last_row)
        remapped[name] = with_values(bag, values)
    return remapped


def bags_by_table(
    features: KeyedJaggedTensor, feature_names: list[str], counts: list[int], tables: list[str]
) -> list[dict[str, JaggedTensor]]:
    """Concatenate the features of every table, and return a dict per table.

    A dict has the table name as its only key. The JaggedTensor has the bags of all features of the table. Its
    weights are not per value: they hold the number of IDs per feature, which TorchRec's per-feature policies
    read.

    Args:
        features: bags in any feature order.
        feature_names: features in table order.
        counts: features per table.
        tables: table names.
    """
    bags: list[dict[str, JaggedTensor]] = []
    for table, part in zip(tables, in_order(features, feature_names).split(counts)):  # noqa: B905
        ids_per_feature = torch.tensor(part.length_per_key())
        bags.append(
            {table: JaggedTensor(values=part.values(), lengths=part.lengths(), weights=ids_per_feature)}
        )
    return bags


def joined_tables(
    features: KeyedJaggedTensor, feature_names: list[str], remapped: list[dict[str, JaggedTensor]]
) -> KeyedJaggedTensor:
    """Combine the remapped bags of all tables into a KeyedJaggedTensor.

    Args:
        features: original bags. The result has their weights.
        feature_names: features in table order.
        remapped: for every table, the result of ``remap``.
    """
    values: list[Tensor] = []
    lengths: list[Tensor] = []
    for of_table in remapped:
        for bag in of_table.values():
            values.append(bag.values())
            lengths.append(bag.lengths())
    return KeyedJaggedTensor(
        keys=feature_names,
        values=torch.cat(values),
        lengths=torch.cat(lengths),
        # Remapping replaces only IDs, so the weights are those of the input, in table order.
        weights=in_order(features, feature_names).weights_or_none(),
    )


def in_order(features: KeyedJaggedTensor, feature_names: list[str]) -> KeyedJaggedTensor:
    """Reorder the features to match ``feature_names``."""
    keys = features.keys()
    if keys == feature_names:
        return features
    return features.permute([keys.index(name) for name in feature_names])


def _validate(module: ManagedCollisionModule, keys: object) -> None:
    """Check the loaded state (hook after a state dict was loaded)."""
    module.validate_state()


def with_values(bags: JaggedTensor, values: Tensor) -> JaggedTensor:
    """Return the bags with other values."""
    return JaggedTensor(values=values, lengths=bags.lengths(), weights=bags.weights_or_none())


Collection = EmbeddingBagCollection | EmbeddingCollection


def return_remapped_lengths_as_mask(features: KeyedJaggedTensor) -> torch.Tensor:
    """Return a mask of non-empty bags, bool [B]."""
    return features.lengths().bool()


def return_custom_metadata(runtime_meta: torch.Tensor) -> torch.Tensor:
    """Return the argument. Graphs from TorchRec call this function by name."""
    return runtime_meta


class BaseManagedCollisionEmbeddingCollection(nn.Module):
    """Embedding collection with an ID remapping step before the lookup.

    The collection runs on a single rank, because ranks would assign different rows to the same ID. To shard,
    use tables with hashed keys (``meshrec.Hashed``).

    Args:
        embedding_module: embedding collection.
        managed_collision_collection: managed collisions for the same tables.
        return_remapped_features: whether `forward` also returns the remapped features.
        allow_in_place_embed_weight_update: ignored.
    """

    def __init__(
        self,
        embedding_module: Collection,
        managed_collision_collection: ManagedCollisionCollection,
        return_remapped_features: bool = False,
        allow_in_place_embed_weight_update: bool = False,
    ) -> None:
        super().__init__()
        configs: Sequence[BaseEmbeddingConfig]
        if isinstance(embedding_module, EmbeddingBagCollection):
            configs = embedding_module.embedding_bag_configs()
        else:
            configs = embedding_module.embedding_configs()
        if list(configs) != list(managed_collision_collection.embedding_configs()):
            raise ValueError(
                "the collection and the managed collisions must have the same tables, got "
                f"{[config.name for config in configs]} and "
                f"{[config.name for config in managed_collision_collection.embedding_configs()]}."
            )
        self._managed_collision_collection = managed_collision_collection
        self._embedding_module = embedding_module
        self._return_remapped_features = return_remapped_features

    def forward(
        self, features: KeyedJaggedTensor, mutate_miss_lengths: bool = True
    ) -> tuple[Any, KeyedJaggedTensor | None]:
        """Return the embeddings, and the remapped features or None."""
        # DistributedModelParallel has replaced the collection by a sharded one.
        if not isinstance(self._embedding_module, Collection):
            raise ValueError(
                "managed collisions are not sharded: each rank would give other rows to the same IDs. Take "
                "tables with hashed keys, EmbeddingBagConfig(keys=meshrec.Hashed(max_rows=...))."
            )
        features = self._managed_collision_collection(features, mutate_miss_lengths=mutate_miss_lengths)
        embeddings = self._embedding_module(features)
        # Discards the evicted rows, which otherwise accumulate. Rows keep their weights, as in TorchRec.
        self._managed_collision_collection.evict()
        return embeddings, features if self._return_remapped_features else None

    def lookup_remapped_lengths_mask(self, features: KeyedJaggedTensor) -> torch.Tensor:
        """Return a mask of non-empty remapped bags, bool."""
        remapped: KeyedJaggedTensor = self._managed_collision_collection(features)
        return remapped.lengths().to(torch.bool)


class ManagedCollisionEmbeddingCollection(BaseManagedCollisionEmbeddingCollection):
    """`EmbeddingCollection` with managed collisions; see `BaseManagedCollisionEmbeddingCollection`."""

    def __init__(
        self,
        embedding_collection: EmbeddingCollection,
        managed_collision_collection: ManagedCollisionCollection,
        return_remapped_features: bool = False,
        allow_in_place_embed_weight_update: bool = False,
    ) -> None:
        super().__init__(embedding_collection, managed_collision_collection, return_remapped_features)

    @property
    def _embedding_collection(self) -> nn.Module:
        return self._embedding_module


class ManagedCollisionEmbeddingBagCollection(BaseManagedCollisionEmbeddingCollection):
    """`EmbeddingBagCollection` with managed collisions; see `BaseManagedCollisionEmbeddingCollection`."""

    def __init__(
        self,
        embedding_bag_collection: EmbeddingBagCollection,
        managed_collision_collection: ManagedCollisionCollection,
        return_remapped_features: bool = False,
        allow_in_place_embed_weight_update: bool = False,
    ) -> None:
        super().__init__(embedding_bag_collection, managed_collision_collection, return_remapped_features)

    @property
    def _embedding_bag_collection(self) -> nn.Module:
        return self._embedding_module
