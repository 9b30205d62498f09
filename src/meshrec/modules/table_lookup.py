"""The lookup that both collections share: features, their tables, and one kernel call for all of them."""

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
    with_own_keys,
)
from meshrec.modules.served_table import ServedTable
from meshrec.ops import keyed, tbe
from meshrec.sparse import KeyedJaggedTensor
from meshrec.tables.file_rows import FileBackedRows
from meshrec.tables.fused import WholeTables
from meshrec.tables.hashed import HashedRows, HashedTable
from meshrec.tables.index import Index, KeyReader, pin, pins_of, slots_of
from meshrec.tables.storage import DenseRows, QuantisedRows, RowStorage, lookup_of

# F features in the order of the tables, B samples, N ids, D width

_BLOCK_NUMBERS = 1 << 20

_POOLING_CODES = {PoolingType.SUM: 0, PoolingType.MEAN: 1, PoolingType.NONE: 2}


class TableLookup:
    """Looks up the features of a KeyedJaggedTensor in tables.

    Args:
        tables: the tables, with unique names.
        pooling: the pooling of each table.
        is_weighted: whether the input's weights scale the rows.
        bounds_check: what happens to ids outside their table.
        output_dtype: dtype of the result; None: the widest dtype of the tables, fp32 for quantised tables.

    Raises:
        ValueError: for no tables, names given twice, and a quantised output_dtype.
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
        twice = [name for name, count in Counter(table.name for table in tables).items() if count > 1]
        if twice:
            raise ValueError(f"the names {twice} are given to several tables. Names must be unique.")
        pairs = [(index, feature) for index, table in enumerate(tables) for feature in table.feature_names]
        self.features = [feature for _, feature in pairs]
        self.tables = [index for index, _ in pairs]
        self.pooling = [_POOLING_CODES[pooling[index]] for index in self.tables]
        self.dims = [tables[index].embedding_dim for index in self.tables]
        self.is_weighted = is_weighted
        self.output_dtype = output_dtype
        storages = [storage_of(table) for table in tables]
        self._quantised = any(not storage.is_trainable for storage in storages)
        self._bits = [storage.bits for storage in storages]
        self._look_up = lookup_of(storages)
        found = [
            storage.index(0, table.num_embeddings) for storage, table in zip(storages, tables, strict=True)
        ]
        self._indexes = {number: index for number, index in enumerate(found) if index is not None}
        self.hashed = {n: table for n, table in enumerate(tables) if table.keys is not None}
        """The tables with hashed keys."""
        self._served: dict[int, ServedTable] = {}
        self.bounds_check = bounds_check
        self._clamps_ids = bounds_check is BoundsCheckMode.WARN
        self._checks_ids = bounds_check is BoundsCheckMode.ERROR
        self._num_clamped = torch.zeros((), dtype=torch.int64)
        self._table_names = [table.name for table in tables]
        self._num_rows = [table.num_embeddings for table in tables]
        readers = Counter(self.features)
        self._own_keys = [
            use
            for use, (index, feature) in enumerate(pairs)
            if (index in self._indexes or index in self.hashed) and readers[feature] > 1
        ]
        self.embedding_names = [
            f"{feature}@{self._table_names[index]}" if readers[feature] > 1 else feature
            for index, feature in pairs
        ]
        lines = "".join(f"{self._table_names[index]}\t{feature}\n" for index, feature in pairs)
        self._names = torch.frombuffer(bytearray(lines.encode()), dtype=torch.uint8)
        self._known_keys: list[str] = []
        self._key_indices: list[int] = []

    @property
    def num_clamped_ids(self) -> int:
        """Number of IDs that ``BoundsCheckMode.WARN`` has replaced so far."""
        return int(self._num_clamped)

    def serve(self, tables: Mapping[int, ServedTable]) -> None:
        """Read tables with hashed keys, by number, as they are in a package from now on."""
        self._served = dict(tables)

    def positions(self, features: KeyedJaggedTensor) -> list[int]:
        """Return the position of each looked-up feature among the keys of the input.

        Raises:
            ValueError: a feature is missing.
        """
        keys = features.keys()
        if keys != self._known_keys:
            readers = [self._table_names[table] for table in self.tables]
            self._key_indices = positions_of(keys, self.features, readers)
            self._known_keys = list(keys)
        return self._key_indices

    def lookups(
        self,
        features: KeyedJaggedTensor,
        weights: Sequence[Tensor],
        *,
        flat: bool,
        hashed: Mapping[int, HashedTable] | None = None,
    ) -> tbe.Lookups:
        """Return the arguments of the kernels for one batch.

        ``hashed``: the tables with hashed keys, by number.

        Raises:
            ValueError: for a missing feature or missing weights, and for input on another device.
        """
        check_device(features.values(), self._table_names[0], weights[0].device)
        keys = self.positions(features)
        if self._own_keys:
            features, keys = with_own_keys(features, keys, self._own_keys)
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
        lookups = self._clamped(lookups) if self._clamps_ids else lookups
        if hashed:
            check_integers(lookups.values)
            lookups = lookups._replace(values=lookups.values.long())
            if not self._finds_while_reading(hashed):
                lookups = self._hashed(lookups, hashed)
        return self._resolved(lookups, self._indexes) if self._indexes else lookups

    def run(
        self,
        weights: Sequence[Tensor],
        lookups: tbe.Lookups,
        out_size: int,
        updater: WholeTables | None,
        hashed: Mapping[int, HashedTable] | None = None,
    ) -> Tensor:
        """Look up the batch, ``[B, sum of D]`` or flat, given what ``lookups`` returned."""
        dtype = torch.float32 if self.output_dtype is None else self.output_dtype.dtype
        if self.output_dtype is None and not self._quantised:
            dtype = functools.reduce(torch.promote_types, {weight.dtype for weight in weights})
        options = tbe.LookupOptions(out_size, dtype, self._checks_ids, self._names)
        if updater is not None and torch.is_grad_enabled():
            plain = [table for table in updater.plain_tables if weights[table].requires_grad]
            result: Tensor = tbe.fused_forward(weights, lookups, updater, plain, options)
            return result
        if hashed and self._finds_while_reading(hashed):
            indexes = {t: (table.slots, table.storage.keys.seed) for t, table in hashed.items()}
            found = keyed.hashed_forward(self._bits, indexes, weights, lookups, options)
            if found is not None:
                return found
            lookups = self._hashed(lookups, hashed)  # makes rows for the IDs that have none
            weights = [hashed[t].rows if t in hashed else weight for t, weight in enumerate(weights)]
        if self._served:
            found_by = {number: table.found_by() for number, table in self._served.items()}
            return keyed.forward(self._bits, found_by, weights, lookups, options)
        return self._look_up(weights, lookups, options)

    def _finds_while_reading(self, tables: Mapping[int, HashedTable]) -> bool:
        """Return whether the kernel that reads rows also finds them: where none is trained, and all are in
        memory.
        """
        if torch.is_grad_enabled() or self._indexes:
            return False
        return all(table.file is None for table in tables.values())

    def _hashed(self, lookups: tbe.Lookups, tables: Mapping[int, HashedTable]) -> tbe.Lookups:
        """Replace the IDs of tables with hashed keys by slots. The batch pins them."""
        return self._resolved(lookups, tables, {t: table.storage.keys.seed for t, table in tables.items()})

    def _resolved(
        self,
        lookups: tbe.Lookups,
        indexes: Mapping[int, Index],
        seeds: Mapping[int, int] = MappingProxyType({}),
    ) -> tbe.Lookups:
        """Replace the keys of tables with an index by slots; ``seeds`` makes keys of IDs."""
        num_keys = lookups.num_keys
        readers = {
            key: KeyReader([indexes[table]], 0, seeds.get(table))
            for key, table in zip(lookups.keys, lookups.tables, strict=True)
            if table in indexes
        }
        bounds = key_bounds(lookups.offsets, lookups.segments, num_keys)
        train = torch.is_grad_enabled()
        values, pins = slots_of(
            lookups.values, bounds, readers, num_keys=num_keys, train=train, at_once=not train
        )
        pin(values, [*pins_of(lookups.values), *pins])
        return lookups._replace(values=values)

    def _clamped(self, lookups: tbe.Lookups) -> tbe.Lookups:
        chosen = [i for i, table in enumerate(lookups.tables) if table not in self.hashed]
        values, counts = torch.ops.meshrec.clamp_ids.default(
            lookups.values,
            lookups.offsets,
            lookups.segments,
            lookups.num_keys,
            [lookups.keys[i] for i in chosen],
            [lookups.tables[i] for i in chosen],
            self._num_rows,
        )
        if self.hashed:
            counts = counts.new_zeros(len(lookups.tables)).index_copy_(0, torch.tensor(chosen), counts)
        torch.ops.meshrec_host.report_clamped(self._num_clamped, counts, self._names)
        return lookups._replace(values=values)


def make_weight(config: BaseEmbeddingConfig, device: torch.device | None) -> nn.Parameter:
    """Make a weight ``[num_embeddings, embedding_dim]``, or quantised rows. On ``meta`` nothing is filled."""
    storage = storage_of(config)
    if config.storage is not None and (device is None or device.type != "meta"):
        raise ValueError(no_room(config, device))
    weight = storage.allocate(config.num_embeddings, storage.columns(config.embedding_dim), device)
    if not weight.is_meta:
        init_weight(config, weight)
    return nn.Parameter(weight, requires_grad=storage.is_trainable)


def no_room(config: BaseEmbeddingConfig, device: torch.device | None) -> str:
    """Return what is wrong with a table on a device that is not ``meta``, if it has a storage."""
    return (
        f"table {config.name!r} has storage=FileRows(...), and the module was given the device "
        f"{device or 'cpu'}: an unsharded module would hold the whole table in memory. Make it with "
        "device='meta' and shard it, in one process too: DistributedModelParallel(model, "
        "ShardingEnv.single_process(), ...)."
    )


def init_weight(config: BaseEmbeddingConfig, weight: Tensor) -> None:
    """Initialise a weight as configured; a quantised one block by block."""
    storage = storage_of(config)
    if storage.is_trainable:
        return config.init_weight(weight)
    for rows in weight.detach().split(max(1, _BLOCK_NUMBERS // config.embedding_dim)):
        numbers = torch.empty(len(rows), config.embedding_dim, device=weight.device)
        config.init_weight(numbers)
        rows.copy_(storage.encode(numbers))
    return None


def storage_of(config: BaseEmbeddingConfig, weight: Tensor | None = None) -> RowStorage:
    """Return the storage of a table. ``weight`` gives the dtype if the module was cast after construction."""
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
        )
    storage = storage_for(config.data_type)
    was_cast = storage.is_trainable and weight is not None and weight.dtype != storage.dtype
    dtype = weight.dtype if was_cast and weight is not None else storage.dtype
    if config.storage is not None:
        size = (config.num_embeddings, config.embedding_dim)
        return FileBackedRows(dtype, config.storage, config.name, size)
    return DenseRows(dtype) if was_cast else storage


def storage_for(data_type: DataType) -> RowStorage:
    """Return the storage of rows of a data type."""
    return QuantisedRows(data_type.bits) if data_type.bits else DenseRows(data_type.dtype)


def spans(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Return (start, end) of consecutive pieces of the given sizes."""
    ends = list(itertools.accumulate(sizes))
    return list(zip([0, *ends[:-1]], ends, strict=True))
