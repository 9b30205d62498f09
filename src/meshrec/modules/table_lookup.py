"""The lookup shared by both collections, which reads all tables in a single kernel call."""

import functools
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor, nn

from meshrec.modules.embedding_configs import (
    BaseEmbeddingConfig,
    BoundsCheckMode,
    DataType,
    PoolingType,
)
from meshrec.modules.input_checks import (
    check_device,
    check_integers,
    key_bounds,
    positions_of,
    sample_weights,
    with_copied_keys,
)
from meshrec.modules.served_table import key_index
from meshrec.ops import keyed, operators, tbe
from meshrec.sparse import KeyedJaggedTensor
from meshrec.tables.cached.rows import FileBackedRows
from meshrec.tables.dense.rows import DenseRows, row_format
from meshrec.tables.fused import WholeTables
from meshrec.tables.hashed.table import HashedRows, HashedTable
from meshrec.tables.index import FeatureRows, Index, pin, pins_of, replace_ids_by_slots
from meshrec.tables.module import TableModule
from meshrec.tables.storage import RowStorage, lookup_function

# Shape legend: F features in table order, B samples, N IDs, D width.

_BLOCK_ELEMENTS = 1 << 20  # 4 MiB of fp32: bounds the memory of quantized initialization

# As in ops/tbe/layout.py, and in the kernels.
_POOLING_CODES = {PoolingType.SUM: 0, PoolingType.MEAN: 1, PoolingType.NONE: 2}


class TableLookup:
    """Lookup of a KeyedJaggedTensor in several tables.

    A *lookup* is a (table, feature) pair: the feature's IDs are looked up in the table. Lookups are in table
    order.

    Args:
        tables: Table configs with unique names.
        pooling: Pooling type for every table.
        is_weighted: Whether to multiply rows by the input's weights.
        bounds_check: How to handle IDs outside the table.
        output_dtype: Output dtype. None: the widest dtype among the tables, or fp32 if some table is
            quantized.

    Raises:
        ValueError: The list is empty, a name is repeated, or output_dtype is quantized.
    """

    def __init__(
        self,
        tables: Sequence[BaseEmbeddingConfig],
        pooling: Sequence[PoolingType],
        *,
        is_weighted: bool,
        bounds_check: BoundsCheckMode,
        output_dtype: DataType | None = None,
    ) -> None:
        if output_dtype is not None and output_dtype.bits:
            raise ValueError(f"output_dtype must be FP32, FP16 or BF16, got {output_dtype}.")
        if not tables:
            raise ValueError("tables is empty. Give at least one table.")
        repeated = [name for name, count in Counter(table.name for table in tables).items() if count > 1]
        if repeated:
            raise ValueError(f"the names {repeated} are given to several tables. Names must be unique.")
        pairs = [(index, feature) for index, table in enumerate(tables) for feature in table.feature_names]
        # These lists have an entry per lookup, in table order.
        self.features = [feature for _, feature in pairs]
        self.tables = [index for index, _ in pairs]
        self.pooling = [_POOLING_CODES[pooling[index]] for index in self.tables]
        self.dims = [tables[index].embedding_dim for index in self.tables]
        self.is_weighted = is_weighted
        self.output_dtype = output_dtype
        storages = [storage_of(table) for table in tables]
        self._quantised = any(not storage.is_trainable for storage in storages)
        self._bits = [storage.bits for storage in storages]
        # The op for the storage formats of these tables.
        self._look_up = lookup_function(storages)
        indexes = [
            storage.index(0, table.num_embeddings) for storage, table in zip(storages, tables, strict=True)
        ]
        # Indexes from keys to slots, for storages which have one.
        self._indexes = {table_index: index for table_index, index in enumerate(indexes) if index is not None}
        self.hashed = {n: table for n, table in enumerate(tables) if table.keys is not None}
        """Configs of hashed tables by table index."""
        self.served: dict[int, tuple[TableModule, HashedRows]] = {}
        """Read-only form and options of hashed tables by table index, in exported programs."""
        self.bounds_check = bounds_check
        # Every lookup asks for the mode, so the comparisons are made once.
        self._clamps_ids = bounds_check is BoundsCheckMode.WARN
        self._checks_ids = bounds_check is BoundsCheckMode.ERROR
        self._num_clamped = torch.zeros((), dtype=torch.int64)  # total of all batches so far
        self._table_names = [table.name for table in tables]
        self._num_rows = [table.num_embeddings for table in tables]
        readers = Counter(self.features)
        # Lookups that need their own copy of a key: the table replaces IDs, and another table reads them too.
        self._split_keys = [
            use
            for use, (index, feature) in enumerate(pairs)
            if (index in self._indexes or index in self.hashed) and readers[feature] > 1
        ]
        self.embedding_names = [
            f"{feature}@{self._table_names[index]}" if readers[feature] > 1 else feature
            for index, feature in pairs
        ]
        # Kernels name the table and feature in errors. A tensor, because operators take no string lists.
        lines = "".join(f"{self._table_names[index]}\t{feature}\n" for index, feature in pairs)
        self._names = torch.frombuffer(bytearray(lines.encode()), dtype=torch.uint8)
        self._last_keys: list[str] = []  # keys of the last batch, for which _key_indices holds
        self._key_indices: list[int] = []

    @property
    def num_clamped_ids(self) -> int:
        """Number of invalid IDs which ``BoundsCheckMode.WARN`` has replaced so far."""
        return int(self._num_clamped)

    def positions(self, features: KeyedJaggedTensor) -> list[int]:
        """Return, for every lookup, the position of the feature among the input's keys.

        Raises:
            ValueError: A feature is missing.
        """
        # Most batches have the same keys, so the positions of the last batch are kept.
        keys = features.keys()
        if keys != self._last_keys:
            readers = [self._table_names[table] for table in self.tables]
            self._key_indices = positions_of(keys, self.features, readers)
            # Copied: the caller may change the list in place.
            self._last_keys = list(keys)
        return self._key_indices

    def lookups(
        self,
        features: KeyedJaggedTensor,
        weights: Sequence[Tensor],
        *,
        flat: bool,
        hashed: Mapping[int, HashedTable] | None = None,
    ) -> tbe.Lookups:
        """Return the kernel arguments for a batch.

        Args:
            features: IDs and optional weights.
            weights: Weight parameter for every table.
            flat: Whether the output is flat, lookup after lookup, instead of a matrix [B, sum of D].
            hashed: Hashed tables by table index.

        Raises:
            ValueError: A feature or weights are missing, or the input is on another device.
        """
        check_device(features.values(), self._table_names[0], weights[0].device)
        keys = self.positions(features)
        # Slots are per table: a key that two tables read needs separate copies of the IDs.
        if self._split_keys:
            features, keys = with_copied_keys(features, keys, self._split_keys)
        lookups = tbe.Lookups(
            values=features.values(),
            offsets=features.offsets(),
            per_sample_weights=sample_weights(features, is_weighted=self.is_weighted),
            segments=features.segments_or_none(),
            num_keys=len(features.keys()),
            keys=keys,
            tables=self.tables,
            pooling=self.pooling,
            flat=flat,
            dims=self.dims,
        )
        # First, because invalid IDs are found by row counts, and slots below are not IDs.
        lookups = self._clamp(lookups) if self._clamps_ids else lookups
        if hashed:
            check_integers(lookups.values)
            # Hash indexes take int64 IDs.
            lookups = lookups._replace(values=lookups.values.long())
            # Training needs slots up front, because the update writes to the same slots after the backward
            # pass.
            if not self._can_probe_in_kernel(hashed):
                lookups = self._resolve_hashed(lookups, hashed)
        return self._resolve_slots(lookups, self._indexes) if self._indexes else lookups

    def run(
        self,
        weights: Sequence[Tensor],
        lookups: tbe.Lookups,
        out_size: int,
        updater: WholeTables | None,
        hashed: Mapping[int, HashedTable] | None = None,
    ) -> Tensor:
        """Look up and pool a batch.

        Args:
            weights: Tensor from which kernels read rows, for every table.
            lookups: Kernel arguments for the batch, from the method ``lookups``.
            out_size: Batch size B, or the number of output elements if the output is flat.
            updater: Gets the gradients in the backward pass; None: parameters get ordinary gradients.
            hashed: Hashed tables by table index.

        Returns:
            Output [B, sum of D], or flat [out_size].
        """
        dtype = torch.float32 if self.output_dtype is None else self.output_dtype.dtype
        # Quantized rows are uint8 in memory and decode to fp32.
        if self.output_dtype is None and not self._quantised:
            dtype = functools.reduce(torch.promote_types, {weight.dtype for weight in weights})
        options = tbe.LookupOptions(out_size, dtype, self._checks_ids, self._names)
        # Without grad mode there is nothing to update, and the plain kernels skip the bookkeeping.
        if updater is not None and torch.is_grad_enabled():
            autograd_tables = [table for table in updater.plain_tables if weights[table].requires_grad]
            result: Tensor = tbe.fused_forward(weights, lookups, updater, autograd_tables, options)
            return result
        if hashed and self._can_probe_in_kernel(hashed):
            indexes = {t: (table.key_index, table.storage.keys.seed) for t, table in hashed.items()}
            output = keyed.hashed_forward(self._bits, indexes, weights, lookups, options)
            # None: some ID has no slot, or an index is not a compiled one.
            if output is not None:
                return output
            lookups = self._resolve_hashed(lookups, hashed)  # initializes rows for unknown IDs
            weights = [hashed[t].rows if t in hashed else weight for t, weight in enumerate(weights)]
        if self.served:
            key_indexes = {index: key_index(*table) for index, table in self.served.items()}
            return keyed.forward(self._bits, key_indexes, weights, lookups, options)
        return self._look_up(weights, lookups, options)

    def _can_probe_in_kernel(self, tables: Mapping[int, HashedTable]) -> bool:
        """Return whether the lookup kernel itself can find the slots (row positions) in hashed tables.

        It can if gradients are disabled, all rows are in memory, and no other table has an index.
        """
        if torch.is_grad_enabled() or self._indexes:
            return False
        return all(table.store.file is None for table in tables.values())

    def _resolve_hashed(self, lookups: tbe.Lookups, tables: Mapping[int, HashedTable]) -> tbe.Lookups:
        """Replace IDs for hashed tables by slots, which are positions of rows in memory.

        With gradients enabled, the tables do not reuse these slots for other rows while the result exists.
        Otherwise they may, because the lookup follows at once.
        """
        return self._resolve_slots(
            lookups, tables, {t: table.storage.keys.seed for t, table in tables.items()}
        )

    def _resolve_slots(
        self,
        lookups: tbe.Lookups,
        indexes: Mapping[int, Index],
        seeds: Mapping[int, int] = MappingProxyType({}),
    ) -> tbe.Lookups:
        """Replace IDs for tables with an index by slots, which are positions of rows in memory.

        Args:
            seeds: Seed of the hash from IDs to keys, by table index. Without a seed, IDs are keys already.
        """
        num_keys = lookups.num_keys
        # A key has a single reader: lookups that share a feature read copies of the key, see _split_keys.
        rows_by_feature = {
            key: FeatureRows([indexes[table]], 0, seeds.get(table))
            for key, table in zip(lookups.keys, lookups.tables, strict=True)
            if table in indexes
        }
        bounds = key_bounds(lookups.offsets, lookups.segments, num_keys)
        train = torch.is_grad_enabled()
        values, pins = replace_ids_by_slots(
            lookups.values,
            bounds,
            rows_by_feature,
            num_keys=num_keys,
            train=train,
            used_immediately=not train,
        )
        # Pins live as long as the values tensor. Eviction must not reuse a slot that a backward still needs.
        pin(values, [*pins_of(lookups.values), *pins])
        return lookups._replace(values=values)

    def _clamp(self, lookups: tbe.Lookups) -> tbe.Lookups:
        """Replace IDs outside the table by 0, and count them. Hashed tables accept all IDs."""
        bounded = [i for i, table in enumerate(lookups.tables) if table not in self.hashed]
        values, counts = operators.clamp_ids(
            lookups.values,
            lookups.offsets,
            lookups.segments,
            lookups.num_keys,
            [lookups.keys[i] for i in bounded],
            [lookups.tables[i] for i in bounded],
            self._num_rows,
        )
        if self.hashed:
            # Back to an entry per lookup, with 0 for hashed tables.
            counts = counts.new_zeros(len(lookups.tables)).index_copy_(0, torch.tensor(bounded), counts)
        torch.ops.meshrec_host.report_clamped(self._num_clamped, counts, self._names)
        return lookups._replace(values=values)


def make_weight(config: BaseEmbeddingConfig, device: torch.device | None) -> nn.Parameter:
    """Create the weight parameter of a table, initialized unless it is on the ``meta`` device.

    Returns:
        Parameter [num_embeddings, embedding_dim], or packed quantized rows.

    Raises:
        ValueError: The table has a file storage, and the device is not ``meta``.
    """
    storage = storage_of(config)
    if config.storage is not None and (device is None or device.type != "meta"):
        raise ValueError(storage_error(config, device))
    weight = storage.allocate(config.num_embeddings, storage.columns(config.embedding_dim), device)
    if not weight.is_meta:
        init_weight(config, weight)
    return nn.Parameter(weight, requires_grad=storage.is_trainable)


def storage_error(config: BaseEmbeddingConfig, device: torch.device | None) -> str:
    """Return the error message for a table with file storage that is created outside the device ``meta``."""
    return (
        f"table {config.name!r} has storage=FileRows(...), and the module was given the device "
        f"{device or 'cpu'}: an unsharded module would hold the whole table in memory. Build it with "
        "device='meta' and shard it, in one process too: DistributedModelParallel(model, "
        "ShardingEnv.single_process(), ...)."
    )


def init_weight(config: BaseEmbeddingConfig, weight: Tensor) -> None:
    """Initialize a table's weight in place as its config says.

    Quantized weights are initialized block by block, to save memory.
    """
    storage = storage_of(config)
    if storage.is_trainable:
        return config.init_weight(weight)
    # The fp32 values of a large quantized table would not fit in memory at once.
    for rows in weight.detach().split(max(1, _BLOCK_ELEMENTS // config.embedding_dim)):
        values = torch.empty(len(rows), config.embedding_dim, device=weight.device)
        config.init_weight(values)
        rows.copy_(storage.encode(values))
    return None


def storage_of(config: BaseEmbeddingConfig, weight: Tensor | None = None) -> RowStorage:
    """Return the row storage of a table, which describes how rows are stored in memory or in a file.

    Args:
        config: Table config.
        weight: The table's weight. If the module was cast after construction, it determines the dtype.
    """
    if config.keys is not None:
        return HashedRows(
            dtype=config.data_type.dtype,
            keys=config.keys,
            name=config.name,
            dim=config.embedding_dim,
            max_rows=config.num_embeddings,
            bounds=config.init_bounds,
            init_fn=config.init_fn,
            bits=config.data_type.bits,
            file=config.storage,
            seed_name=config.seed_name,
        )
    storage = storage_for(config.data_type)
    # The module may have been cast after its construction, as by `half()`.
    was_cast = storage.is_trainable and weight is not None and weight.dtype != storage.dtype
    dtype = weight.dtype if was_cast and weight is not None else storage.dtype
    if config.storage is not None:
        size = (config.num_embeddings, config.embedding_dim)
        return FileBackedRows(dtype, config.storage, config.name, size)
    return DenseRows(dtype) if was_cast else storage


def storage_for(data_type: DataType) -> RowStorage:
    """Return the row storage of an in-memory table with a data type."""
    return row_format(data_type.dtype, data_type.bits)


def spans(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Return the (start, end) of consecutive pieces with the given sizes: [2, 3] gives [(0, 2), (2, 5)]."""
    ends = list(itertools.accumulate(sizes))
    return list(zip([0, *ends[:-1]], ends, strict=True))
