"""Unsharded collections of embedding tables, pooled (bags) or not (sequences).

A single kernel call looks up a batch in all tables of a collection.
"""

import copy
import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from typing_extensions import Self

from meshrec.modules.embedding_configs import (
    BaseEmbeddingConfig,
    BoundsCheckMode,
    DataType,
    EmbeddingBagConfig,
    EmbeddingConfig,
    PoolingType,
    check_configs,
)
from meshrec.modules.input_checks import check_features, inverse_rows
from meshrec.modules.served_table import served_table
from meshrec.modules.table_lookup import (
    TableLookup,
    init_weight,
    make_weight,
    spans,
    storage_error,
    storage_of,
)
from meshrec.optim.table_names import full_names
from meshrec.sparse import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from meshrec.tables.fused import WholeTables
from meshrec.tables.hashed.admission_eviction import AdmissionEviction
from meshrec.tables.hashed.table import HashedTable, is_growable
from meshrec.tables.module import TableModule
from meshrec.tables.optimizer import FusedOptimizer

# Shape legend: F features in the order of the tables, B samples, N IDs, D width.


class TableCollection(nn.Module, ABC):
    """Base class for collections of embedding tables with a shared lookup and an optional fused optimizer.

    Args:
        configs: Table configs.
        pooling: Pooling type for every table.
        is_weighted: Whether to multiply rows by the input's weights.
        bounds_check: How to handle IDs outside the table.
        output_dtype: Output dtype; None: see the property ``output_dtype``.
    """

    def __init__(
        self,
        configs: Sequence[BaseEmbeddingConfig],
        pooling: Sequence[PoolingType],
        is_weighted: bool,
        bounds_check: BoundsCheckMode,
        output_dtype: DataType | None,
    ) -> None:
        super().__init__()
        # Changed only by seed_by().
        self._configs = list(configs)
        self._lookup = TableLookup(
            configs,
            pooling,
            is_weighted=is_weighted,
            bounds_check=bounds_check,
            output_dtype=output_dtype,
        )
        # Set by attach(), called by meshrec.fuse. From then on, gradients go to it instead of to .grad.
        self._updater: WholeTables | None = None

    @abstractmethod
    def table_holders(self) -> tuple[str, nn.ModuleDict]:
        """Return the name of the attribute that holds the table submodules, and the attribute's value.

        The value is a ModuleDict keyed by table name.
        """

    def tables(self) -> dict[str, tuple[BaseEmbeddingConfig, nn.Parameter]]:
        """Return the config and the weight for every table, by parameter name."""
        prefix, _ = self.table_holders()
        names = [f"{prefix}.{config.name}.weight" for config in self._configs]
        return dict(zip(names, zip(self._configs, self._weights(), strict=True), strict=True))

    def embedding_names(self) -> list[str]:
        """Return the output keys: feature names, or ``feature@table`` if a feature reads several tables."""
        return list(self._lookup.embedding_names)

    @property
    def bounds_check(self) -> BoundsCheckMode:
        """How a lookup handles IDs outside the table."""
        return self._lookup.bounds_check

    @property
    def output_dtype(self) -> DataType | None:
        """Output dtype. None: the widest dtype among the tables, or fp32 if some table is quantized."""
        return self._lookup.output_dtype

    @property
    def num_clamped_ids(self) -> int:
        """Number of invalid IDs which ``BoundsCheckMode.WARN`` has replaced so far."""
        return self._lookup.num_clamped_ids

    @property
    def device(self) -> torch.device:
        """Device of the tables."""
        return self._weights()[0].device

    @property
    def is_fused(self) -> bool:
        """Whether ``meshrec.fuse`` has attached an optimizer to this collection."""
        return self._updater is not None

    @property
    def fused_optimizer(self) -> FusedOptimizer:
        """The optimizer attached by ``meshrec.fuse``.

        Raises:
            ValueError: The module is not fused.
        """
        if self._updater is None:
            raise ValueError(
                "the module has no fused optimizer. Call meshrec.fuse(module, optimizer=...) first."
            )
        return self._updater.optimizer

    def __prepare_scriptable__(self) -> Any:
        """Raise ValueError. ``torch.jit.script`` calls this; TorchScript cannot compile the lookup."""
        raise ValueError(
            f"TorchScript cannot compile {type(self).__name__}, whose lookup is a Python operator. Use "
            "torch.export or meshrec.export.export (which also writes TorchScript: torchscript=True), or "
            "torch.jit.trace."
        )

    def attach(self, updater: WholeTables) -> None:
        """Let the backward pass send gradients to ``updater`` from now on. Called by ``meshrec.fuse``."""
        self._updater = updater

    def seed_by(self, names: Mapping[str, str]) -> None:
        """Set the field ``seed_name`` in some table configs. It determines the seed for initial rows.

        Args:
            names: New seed name, by table name. Other tables are unchanged.
        """
        modules = self.table_modules()
        for index, config in enumerate(self._configs):
            if config.name not in names:
                continue
            # Three copies of the config exist: here, in the lookup and in the table module.
            self._configs[index] = config = dataclasses.replace(config, seed_name=names[config.name])
            if index in self._lookup.hashed:
                self._lookup.hashed[index] = config
            module = modules.get(config.name)
            if module is not None and is_growable(module.storage):
                module.use_storage(dataclasses.replace(module.storage, seed_name=config.seed_name))

    def reset_parameters(self) -> None:
        """Initialize all weights again, as in the constructor."""
        holders = self.table_holders()[1]._modules
        for config, weight in self.tables().values():
            # Hashed tables have no rows in the parameter; their module removes all rows.
            if config.keys is None:
                init_weight(config, weight)
            else:
                holders[config.name].reset_parameters()  # type: ignore[operator]

    def _weights(self) -> list[nn.Parameter]:
        """Return all table weights, in config order."""
        # Called in every forward. Reading _parameters skips nn.Module.__getattr__, which is slow.
        holders = self.table_holders()[1]._modules.values()
        try:
            return [holder._parameters["weight"] for holder in holders]  # type: ignore[misc]
        except KeyError:  # parametrized
            return [holder.weight for holder in holders]  # type: ignore[misc]

    def table_modules(self) -> dict[str, TableModule]:
        """Return the submodules for quantized and hashed tables, by table name.

        Other tables are torch modules, and are not included.
        """
        holders = self.table_holders()[1]._modules
        return {name: child for name, child in holders.items() if isinstance(child, TableModule)}

    def hashed_tables(self) -> dict[str, HashedTable]:
        """Return the hashed tables by name."""
        tables = self._hashed_tables()
        return {self._configs[index].name: table for index, table in tables.items()}

    @property
    def admission_evictions(self) -> list[AdmissionEviction]:
        """Objects which admit and evict rows of hashed tables; empty unless the collection is fused."""
        return [] if self._updater is None else self._updater.admission_evictions

    def _hashed_tables(self) -> dict[int, HashedTable]:
        """Return the hashed tables by table index. Leaves out tables that `serve` has replaced."""
        if self._lookup.served:
            return {}
        holders: Mapping[str, Any] = self.table_holders()[1]._modules
        return {index: holders[config.name].tables[0] for index, config in self._lookup.hashed.items()}

    def serve(self) -> None:
        """Replace all hashed tables by their read-only form for exported packages; see `served_table`."""
        holders = self.table_holders()[1]._modules
        for index, config in self._lookup.hashed.items():
            storage = storage_of(config)
            assert is_growable(storage)
            holders[config.name] = module = served_table(storage)
            self._lookup.served[index] = module, storage

    def _rows(self, weights: Sequence[Tensor], hashed: dict[int, HashedTable] | None) -> Sequence[Tensor]:
        """Return one tensor per table, from which kernels read rows.

        For most tables this is the weight parameter. A hashed table's weight parameter is an empty
        placeholder, so the kernels read the table's row memory instead.
        """
        if not hashed:
            return weights
        # Tables whose gradients autograd returns.
        unfused = range(len(weights)) if self._updater is None else self._updater.plain_tables
        for index in unfused:
            if index in hashed and torch.is_grad_enabled() and weights[index].requires_grad:
                raise ValueError(
                    f"table {self._configs[index].name!r} has hashed keys and no fused optimizer: its "
                    "gradients would have nowhere to stay. Call meshrec.fuse(module, optimizer=...), shard "
                    "the module, or look up under torch.no_grad()."
                )
        return [hashed[n].rows if n in hashed else weight for n, weight in enumerate(weights)]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move or cast the module; torch calls this method for ``to``, ``cuda``, ``half``, and similar
        methods.

        Args:
            fn: Moves or casts a tensor.
            recurse: Whether to change submodules, too.
        """
        before = self._weights()
        # Optimizer state lies outside the module, where _apply does not reach.
        if self._updater is not None and any(_changes_weight(weight, fn) for weight in before):
            raise ValueError(
                "a fused module cannot be moved or cast: its optimizer state would stay behind. "
                "Move it first and fuse it afterwards."
            )
        # `fn` of an empty tensor tells the new device and dtype, without moving the rows.
        for config, weight in zip(self._configs, before, strict=True):
            if (
                config.storage is not None
                and (moved := fn(weight.detach().new_empty(0)).device).type != "meta"
            ):
                raise ValueError(storage_error(config, moved))
            dtype = fn(weight.detach().new_empty(0)).dtype
            if dtype != weight.dtype and dtype not in _ROW_DTYPES:
                raise ValueError(
                    f"table {config.name!r} cannot be cast to {dtype}. Choose float32, float16 or bfloat16."
                )
        # Rows of hashed tables are outside the parameter, so torch would move only the empty placeholder.
        for index, config in self._lookup.hashed.items():
            if not before[index].is_meta and _changes_weight(before[index], fn):
                raise ValueError(
                    f"table {config.name!r} has hashed keys: its rows stay on the CPU, in the data type of "
                    "its configuration. Choose data_type there."
                )
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        # torch may create new parameters without the attributes set on the old, such as the optimizer.
        for old, new in zip(before, self._weights(), strict=True):
            vars(new).update(vars(old))
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        # torch copies a parameter without attributes, such as the recorded optimizer.
        for old, new in zip(self._weights(), copied._weights(), strict=True):
            vars(new).update(copy.deepcopy(vars(old), memo))
        return copied


class EmbeddingBagCollection(TableCollection):
    """Collection of embedding tables which returns a pooled row per bag.

    A single kernel call looks up all tables. Parameters are named ``embedding_bags.<table>.weight``. They get
    ordinary gradients. After ``meshrec.fuse``, the backward pass updates them instead.

    Args:
        tables: Table configs. Several features may share a table. A feature that reads several tables has an
            output per table, named ``feature@table``.
        is_weighted: Whether to multiply rows by the input's weights before pooling.
        device: Device for the parameters; ``meta`` allocates nothing.
        bounds_check: How to handle IDs outside the table.
        output_dtype: Output dtype. None: the widest dtype among the tables, or fp32 if some table is
            quantized.

    Raises:
        TypeError: ``tables`` is not a list of EmbeddingBagConfig.
        ValueError: The list is empty, or several tables have the same name.

    Example::

        >>> config = EmbeddingBagConfig(name="t", num_embeddings=100, embedding_dim=8, feature_names=["item"])
        >>> collection = EmbeddingBagCollection([config])
        >>> ids = KeyedJaggedTensor(["item"], torch.tensor([5, 7, 1]), lengths=torch.tensor([1, 2]))
        >>> collection(ids)["item"].shape
        torch.Size([2, 8])
    """

    def __init__(
        self,
        tables: Sequence[EmbeddingBagConfig],
        is_weighted: bool = False,
        device: torch.device | str | None = None,
        *,
        bounds_check: BoundsCheckMode = BoundsCheckMode.ERROR,
        output_dtype: DataType | None = None,
    ) -> None:
        check_configs(self, tables, EmbeddingBagConfig)
        super().__init__(
            tables, [config.pooling for config in tables], is_weighted, bounds_check, output_dtype
        )
        self.embedding_bags = module_dict_of(
            {
                config.name: _table_module(config, device)
                # A torch module, for TorchRec's parameter names. Its forward method is not called.
                or nn.EmbeddingBag(
                    config.num_embeddings,
                    config.embedding_dim,
                    mode=config.pooling.value.lower(),
                    include_last_offset=True,
                    _weight=make_weight(config, _as_device(device)),
                )
                for config in tables
            }
        )

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Look up all IDs and pool the rows per bag.

        Args:
            features: IDs for the features of all tables; other keys are ignored. If keys have different
                numbers of bags, ``inverse_indices`` must map samples to bags.

        Returns:
            KeyedTensor [B, sum of D], with D columns per feature, in table order.

        Raises:
            TypeError: The input is not a KeyedJaggedTensor.
            ValueError: A feature or the weights are missing, the input is on another device, offsets do not
                match the values, a weight is NaN, or (``BoundsCheckMode.ERROR``) an ID is outside its table.
        """
        check_features(features)
        weights = self._weights()
        lookup = self._lookup
        if features.variable_stride_per_key():
            values = self._pool_variable_batch(features, weights)
        else:
            hashed = self._hashed_tables() if lookup.hashed else None
            lookups = lookup.lookups(features, weights, flat=False, hashed=hashed)
            values = lookup.run(
                self._rows(weights, hashed), lookups, features.stride(), self._updater, hashed
            )
        return KeyedTensor.unchecked(lookup.embedding_names, lookup.dims, values, 1)

    def _pool_variable_batch(self, features: KeyedJaggedTensor, weights: Sequence[Tensor]) -> Tensor:
        """Look up keys with different numbers of bags, and copy bags to samples by ``inverse_indices``.

        Returns:
            Pooled rows, [B, sum of D].
        """
        lookup = self._lookup
        hashed = self._hashed_tables() if lookup.hashed else None
        lookups = lookup.lookups(features, weights, flat=True, hashed=hashed)
        rows = inverse_rows(features, lookup.features)
        strides = features.stride_per_key()
        sizes = [strides[key] * dim for key, dim in zip(lookup.positions(features), lookup.dims, strict=True)]
        # The output is flat, because keys have different numbers of rows.
        flat = lookup.run(self._rows(weights, hashed), lookups, sum(sizes), self._updater, hashed)
        pieces = [
            flat[start:end].view(-1, dim).index_select(0, row)
            for (start, end), dim, row in zip(spans(sizes), lookup.dims, rows, strict=True)
        ]
        return torch.cat(pieces, dim=1)

    def table_holders(self) -> tuple[str, nn.ModuleDict]:
        """Return ``"embedding_bags"`` and its ModuleDict."""
        return "embedding_bags", self._modules["embedding_bags"]  # type: ignore[return-value]

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """Return the table configs."""
        return list(cast(list[EmbeddingBagConfig], self._configs))

    def is_weighted(self) -> bool:
        """Return whether rows are multiplied by the input's weights before pooling."""
        return self._lookup.is_weighted


class EmbeddingCollection(TableCollection):
    """Collection of embedding tables which returns a row per ID (sequence embeddings).

    A single kernel call looks up all tables. Parameters are named ``embeddings.<table>.weight``. They get
    ordinary gradients. After ``meshrec.fuse``, the backward pass updates them instead.

    Args:
        tables: Table configs, as in `EmbeddingBagCollection`.
        device: Device for the parameters; ``meta`` allocates nothing.
        bounds_check: How to handle IDs outside the table.
        output_dtype: Output dtype, as in `EmbeddingBagCollection`.

    Raises:
        TypeError: ``tables`` is not a list of configs.
        ValueError: The list is empty, or several tables have the same name.

    Example::

        >>> config = EmbeddingConfig(name="t", num_embeddings=100, embedding_dim=8, feature_names=["item"])
        >>> collection = EmbeddingCollection([config])
        >>> ids = KeyedJaggedTensor(["item"], torch.tensor([5, 7, 1]), lengths=torch.tensor([1, 2]))
        >>> collection(ids)["item"].values().shape
        torch.Size([3, 8])
    """

    def __init__(
        self,
        tables: Sequence[EmbeddingConfig],
        device: torch.device | str | None = None,
        *,
        bounds_check: BoundsCheckMode = BoundsCheckMode.ERROR,
        output_dtype: DataType | None = None,
    ) -> None:
        check_configs(self, tables, EmbeddingConfig)
        super().__init__(tables, [PoolingType.NONE] * len(tables), False, bounds_check, output_dtype)
        self.embeddings = module_dict_of(
            {
                config.name: _table_module(config, device)
                or nn.Embedding(
                    config.num_embeddings,
                    config.embedding_dim,
                    _weight=make_weight(config, _as_device(device)),
                )
                for config in tables
            }
        )

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Look up the row for every ID.

        Args:
            features: IDs for the features of all tables; other keys are ignored.

        Returns:
            JaggedTensor by feature (``feature@table`` if several tables read it). Its values are the rows [N,
            D] for the feature's N IDs, with the lengths of the input.

        Raises:
            TypeError: As in ``EmbeddingBagCollection.forward``.
            ValueError: As in ``EmbeddingBagCollection.forward``.
        """
        check_features(features)
        weights = self._weights()
        lookup = self._lookup
        hashed = self._hashed_tables() if lookup.hashed else None
        lookups = lookup.lookups(features, weights, flat=True, hashed=hashed)
        # The output size must be on the host, so this waits for the device, unless sync() has been called.
        counts = features.length_per_key()
        sizes = [counts[key] * dim for key, dim in zip(lookup.positions(features), lookup.dims, strict=True)]
        flat = lookup.run(self._rows(weights, hashed), lookups, sum(sizes), self._updater, hashed)
        # Views: lengths and offsets are shared with the input.
        ids_of = features.to_dict()
        result: dict[str, JaggedTensor] = {}
        for name, feature, dim, (start, end) in zip(
            lookup.embedding_names, lookup.features, lookup.dims, spans(sizes), strict=True
        ):
            ids = ids_of[feature]
            rows = flat[start:end].view(-1, dim)
            result[name] = JaggedTensor.unchecked(rows, None, ids.lengths(), ids.offsets())
        return result

    def table_holders(self) -> tuple[str, nn.ModuleDict]:
        """Return ``"embeddings"`` and its ModuleDict."""
        return "embeddings", self._modules["embeddings"]  # type: ignore[return-value]

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """Return the table configs."""
        return list(cast(list[EmbeddingConfig], self._configs))


def seed_by_path(collections: Mapping[str, TableCollection]) -> None:
    """Give tables with the same name in different collections different seeds for initial rows.

    If several collections use a table name, the seeds of these tables are derived from their full paths.
    A table with a unique name keeps the seed derived from the name alone. A new seed would change initial
    rows that were never read, and a checkpoint does not contain these rows.

    Args:
        collections: Collections by module path.
    """
    tables = {
        path: [config.name for config in collection._configs] for path, collection in collections.items()
    }
    # Full path by module path and table name, only where several tables have the name.
    names: dict[str, dict[str, str]] = {}
    for (path, name), full in full_names(tables).items():
        if full != name:
            names.setdefault(path, {})[name] = full
    for path, seed_names in names.items():
        collections[path].seed_by(seed_names)


def module_dict_of(tables: Mapping[str, nn.Module]) -> nn.ModuleDict:
    """Return a ModuleDict that holds the given table modules by table name.

    Unlike with the ModuleDict constructor, a table may be named like a ModuleDict method, such as "items".
    """
    holder = nn.ModuleDict()
    # ModuleDict rejects method names as keys, but "items" is a common table name.
    holder._modules.update(tables)
    return holder


def _table_module(config: BaseEmbeddingConfig, device: torch.device | str | None) -> TableModule | None:
    """Create the submodule for a quantized or hashed table. Return None for other tables."""
    storage = storage_of(config)
    if is_growable(storage):
        target = _as_device(device)
        if storage.file is not None and (target is None or target.type != "meta"):
            raise ValueError(storage_error(config, target))
        return TableModule.hashed(dataclasses.replace(storage, file=None), target)  # no rows yet
    if storage.is_trainable:
        return None
    size = (config.num_embeddings, config.embedding_dim)
    return TableModule(config.name, size, storage, make_weight(config, _as_device(device)))


_ROW_DTYPES = (torch.float32, torch.float16, torch.bfloat16)  # dtypes that the lookup kernels read


def _changes_weight(weight: Tensor, fn: Callable[[Tensor], Tensor]) -> bool:
    """Return whether ``fn``, as passed to ``Module._apply``, would move or cast ``weight``."""
    # An empty tensor costs nothing to move or cast.
    probe = fn(weight.detach().new_empty(0))
    return probe.device != weight.device or probe.dtype != weight.dtype


def _as_device(device: torch.device | str | None) -> torch.device | None:
    return None if device is None else torch.device(device)
