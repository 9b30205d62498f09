"""Collections of embedding tables, looked up together: pooled (bags) and as sequences."""

import copy
import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

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
)
from meshrec.modules.hashed_holder import HashedHolder
from meshrec.modules.input_checks import inverse_rows
from meshrec.modules.quantised_table import QuantisedTable
from meshrec.modules.served_table import ServedTable
from meshrec.modules.table_lookup import (
    TableLookup,
    init_weight,
    make_weight,
    no_room,
    spans,
    storage_of,
)
from meshrec.sparse import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from meshrec.tables.fused import WholeTables
from meshrec.tables.hashed import HashedRows, HashedTable
from meshrec.tables.optimizer import FusedOptimizer
from meshrec.tables.turnover import Turnover

# F features in the order of the tables, B samples, N ids, D width


class TableCollection(nn.Module, ABC):
    """Base class of both collections: named tables, one lookup, and an optional fused optimizer."""

    def __init__(
        self,
        configs: Sequence[BaseEmbeddingConfig],
        pooling: Sequence[PoolingType],
        is_weighted: bool,
        bounds_check: BoundsCheckMode,
        output_dtype: DataType | None,
    ) -> None:
        super().__init__()
        self._configs = list(configs)
        self._lookup = TableLookup(
            configs,
            pooling,
            is_weighted=is_weighted,
            bounds_check=bounds_check,
            output_dtype=output_dtype,
        )
        self._updater: WholeTables | None = None

    @abstractmethod
    def table_holders(self) -> tuple[str, nn.ModuleDict]:
        """Return the name of the ModuleDict that holds the tables, and the ModuleDict."""

    def tables(self) -> dict[str, tuple[BaseEmbeddingConfig, nn.Parameter]]:
        """Return the configuration and the weight of each table, by the parameter's name."""
        prefix, _ = self.table_holders()
        names = [f"{prefix}.{config.name}.weight" for config in self._configs]
        return dict(zip(names, zip(self._configs, self._weights(), strict=True), strict=True))

    def embedding_names(self) -> list[str]:
        """Return the keys of the result."""
        return list(self._lookup.embedding_names)

    @property
    def bounds_check(self) -> BoundsCheckMode:
        """The handling of IDs outside their table."""
        return self._lookup.bounds_check

    @property
    def output_dtype(self) -> DataType | None:
        """The dtype of the result; None for the widest dtype of the tables, fp32 if they are quantised."""
        return self._lookup.output_dtype

    @property
    def num_clamped_ids(self) -> int:
        """Number of IDs that ``BoundsCheckMode.WARN`` has replaced so far."""
        return self._lookup.num_clamped_ids

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return self._weights()[0].device

    @property
    def is_fused(self) -> bool:
        """Whether ``meshrec.fuse`` attached an optimizer."""
        return self._updater is not None

    @property
    def fused_optimizer(self) -> FusedOptimizer:
        """The optimizer that ``meshrec.fuse`` attached.

        Raises:
            ValueError: if the module is not fused.
        """
        if self._updater is None:
            raise ValueError(
                "the module has no fused optimizer. Call meshrec.fuse(module, optimizer=...) first."
            )
        return self._updater.optimizer

    def __prepare_scriptable__(self) -> Any:
        """Raise ValueError: ``torch.jit.script`` asks for this, and TorchScript cannot follow the lookup."""
        raise ValueError(
            f"TorchScript cannot compile {type(self).__name__}, whose lookup is a Python operator. Use "
            "torch.export or meshrec.export.export (which also writes TorchScript: torchscript=True), or "
            "torch.jit.trace."
        )

    def attach(self, updater: WholeTables) -> None:
        """Hand the gradients of lookups to ``updater`` from now on; ``meshrec.fuse`` calls this."""
        self._updater = updater

    def reset_parameters(self) -> None:
        """Initialise all weights as at construction."""
        holders = self.table_holders()[1]._modules
        for config, weight in self.tables().values():
            if config.keys is None:
                init_weight(config, weight)
            else:
                holders[config.name].reset_parameters()  # type: ignore[operator]

    def _weights(self) -> list[nn.Parameter]:
        # Read in every forward: what is plain is found without a module's search for attributes.
        holders = self.table_holders()[1]._modules.values()
        try:
            return [holder._parameters["weight"] for holder in holders]  # type: ignore[misc]
        except KeyError:  # parametrized
            return [holder.weight for holder in holders]  # type: ignore[misc]

    def hashed_tables(self) -> dict[str, HashedTable]:
        """Return the tables with hashed keys, by name; see ``HashedTable``."""
        numbers = self._hashed_tables()
        return {self._configs[number].name: table for number, table in numbers.items()}

    @property
    def turnovers(self) -> list[Turnover]:
        """The turnovers of fused tables with hashed keys, which admit IDs and evict rows."""
        return [] if self._updater is None else self._updater.turnovers

    def _hashed_tables(self) -> dict[int, HashedTable]:
        """Return the tables with hashed keys, by number."""
        found = {}
        holders = self.table_holders()[1]._modules
        for number, config in self._lookup.hashed.items():
            holder = holders[config.name]
            if isinstance(holder, HashedHolder):
                found[number] = holder.table
        return found

    def serve(self) -> None:
        """Hold tables with hashed keys as a package has them, without their rows; see ``ServedTable``."""
        holders, served = self.table_holders()[1]._modules, {}
        for number, config in self._lookup.hashed.items():
            holder = holders[config.name]
            assert isinstance(holder, HashedHolder)
            served[number] = holders[config.name] = ServedTable(holder.storage)
        self._lookup.serve(served)

    def _rows(self, weights: Sequence[Tensor], hashed: dict[int, HashedTable] | None) -> Sequence[Tensor]:
        """Return the memory of each table's rows for the kernels.

        Raises:
            ValueError: the gradient of a hashed table would go nowhere.
        """
        if not hashed:
            return weights
        plain = range(len(weights)) if self._updater is None else self._updater.plain_tables
        for number in plain:
            if number in hashed and torch.is_grad_enabled() and weights[number].requires_grad:
                raise ValueError(
                    f"table {self._configs[number].name!r} has hashed keys and no fused optimizer: its "
                    "gradients would have nowhere to stay. Call meshrec.fuse(module, optimizer=...), shard "
                    "the module, or look up under torch.no_grad()."
                )
        return [hashed[n].rows if n in hashed else weight for n, weight in enumerate(weights)]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        before = self._weights()
        if self._updater is not None and any(_is_changed(weight, fn) for weight in before):
            raise ValueError(
                "a fused module cannot be moved or cast: its optimizer state would stay behind. "
                "Move it first and fuse it afterwards."
            )
        for config, weight in zip(self._configs, before, strict=True):
            if (
                config.storage is not None
                and (moved := fn(weight.detach().new_empty(0)).device).type != "meta"
            ):
                raise ValueError(no_room(config, moved))
        for number, config in self._lookup.hashed.items():
            if not before[number].is_meta and _is_changed(before[number], fn):
                raise ValueError(
                    f"table {config.name!r} has hashed keys: its rows stay on the CPU, in the data type of "
                    "its configuration. Choose data_type there."
                )
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for old, new in zip(before, self._weights(), strict=True):
            vars(new).update(vars(old))
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        # torch copies a parameter without its attributes; the choice of its optimizer is one.
        for old, new in zip(self._weights(), copied._weights(), strict=True):
            vars(new).update(copy.deepcopy(vars(old), memo))
        return copied


class EmbeddingBagCollection(TableCollection):
    """Tables whose rows are pooled bag by bag, all of them in one kernel.

    The parameters are ``embedding_bags.<table>.weight``. They get ordinary gradients, or are updated in the
    backward pass after ``meshrec.fuse``.

    Args:
        tables: the tables. Several features may share one; a feature read by several tables gives one result
            per table, named ``feature@table``.
        is_weighted: whether each row is scaled by the input's weight of its id.
        device: device of the parameters; on ``meta`` they are not allocated.
        bounds_check: what happens to ids outside their table.
        output_dtype: dtype of the result; None: the widest dtype of the tables, fp32 for quantised tables.

    Raises:
        ValueError: for no tables, and for a name given to several tables.
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
        super().__init__(
            tables, [config.pooling for config in tables], is_weighted, bounds_check, output_dtype
        )
        self._bag_configs = list(tables)
        self.embedding_bags = holder_of(
            {
                config.name: _held(config, device)
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
        """Look up the rows of all IDs, and pool them bag by bag.

        Args:
            features: must have the features of all tables; other keys are ignored. Keys with batch sizes of
                their own need ``inverse_indices``.

        Returns:
            ``[B, sum of D]``, one column block per feature, in the order of tables and their features.

        Raises:
            ValueError: for a missing feature, missing weights, input on another device, offsets that do not
                fit the values, NaN weights, and (``BoundsCheckMode.ERROR``) for ids outside their table.
        """
        weights = self._weights()
        lookup = self._lookup
        if features.variable_stride_per_key():
            values = self._variable_batch(features, weights)
        else:
            hashed = self._hashed_tables() if lookup.hashed else None
            lookups = lookup.lookups(features, weights, flat=False, hashed=hashed)
            values = lookup.run(
                self._rows(weights, hashed), lookups, features.stride(), self._updater, hashed
            )
        return KeyedTensor.unchecked(lookup.embedding_names, lookup.dims, values, 1)

    def _variable_batch(self, features: KeyedJaggedTensor, weights: Sequence[Tensor]) -> Tensor:
        lookup = self._lookup
        hashed = self._hashed_tables() if lookup.hashed else None
        lookups = lookup.lookups(features, weights, flat=True, hashed=hashed)
        rows = inverse_rows(features, lookup.features)
        strides = features.stride_per_key()
        sizes = [strides[key] * dim for key, dim in zip(lookup.positions(features), lookup.dims, strict=True)]
        flat = lookup.run(self._rows(weights, hashed), lookups, sum(sizes), self._updater, hashed)
        pieces = [
            flat[start:end].view(-1, dim).index_select(0, row)
            for (start, end), dim, row in zip(spans(sizes), lookup.dims, rows, strict=True)
        ]
        return torch.cat(pieces, dim=1)

    def table_holders(self) -> tuple[str, nn.ModuleDict]:
        """Return the name ``embedding_bags`` and the ModuleDict."""
        return "embedding_bags", self._modules["embedding_bags"]  # type: ignore[return-value]

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """Return the configurations of the tables."""
        return list(self._bag_configs)

    def is_weighted(self) -> bool:
        """Return whether the input's weights scale the rows."""
        return self._lookup.is_weighted


class EmbeddingCollection(TableCollection):
    """Tables that give one row per id (sequence embeddings), all of them in one kernel.

    The parameters are ``embeddings.<table>.weight``. They get ordinary gradients, or are updated in the
    backward pass after ``meshrec.fuse``.

    Args: see ``EmbeddingBagCollection``.

    Raises:
        ValueError: for no tables, and for a name given to several tables.
    """

    def __init__(
        self,
        tables: Sequence[EmbeddingConfig],
        device: torch.device | str | None = None,
        *,
        bounds_check: BoundsCheckMode = BoundsCheckMode.ERROR,
        output_dtype: DataType | None = None,
    ) -> None:
        super().__init__(tables, [PoolingType.NONE] * len(tables), False, bounds_check, output_dtype)
        self._sequence_configs = list(tables)
        self.embeddings = holder_of(
            {
                config.name: _held(config, device)
                or nn.Embedding(
                    config.num_embeddings,
                    config.embedding_dim,
                    _weight=make_weight(config, _as_device(device)),
                )
                for config in tables
            }
        )

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Look up every ID.

        Args:
            features: must have the features of all tables; other keys are ignored.

        Returns:
            By feature (``feature@table`` if several tables read it), a JaggedTensor with one row of width D
            per ID, ``[n, D]``, and the feature's lengths.

        Raises:
            ValueError: as in ``EmbeddingBagCollection.forward``.
        """
        weights = self._weights()
        lookup = self._lookup
        hashed = self._hashed_tables() if lookup.hashed else None
        lookups = lookup.lookups(features, weights, flat=True, hashed=hashed)
        counts = features.length_per_key()
        sizes = [counts[key] * dim for key, dim in zip(lookup.positions(features), lookup.dims, strict=True)]
        flat = lookup.run(self._rows(weights, hashed), lookups, sum(sizes), self._updater, hashed)
        ids_of = features.to_dict()
        result: dict[str, JaggedTensor] = {}
        for name, feature, dim, (start, end) in zip(
            lookup.embedding_names, lookup.features, lookup.dims, spans(sizes), strict=True
        ):
            ids = ids_of[feature]
            result[name] = JaggedTensor(
                values=flat[start:end].view(-1, dim), lengths=ids.lengths(), offsets=ids.offsets()
            )
        return result

    def table_holders(self) -> tuple[str, nn.ModuleDict]:
        """Return the name ``embeddings`` and the ModuleDict."""
        return "embeddings", self._modules["embeddings"]  # type: ignore[return-value]

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """Return the configurations of the tables."""
        return list(self._sequence_configs)


def holder_of(tables: Mapping[str, nn.Module]) -> nn.ModuleDict:
    """Return a ModuleDict of the tables, whose names may also be those of its methods."""
    holder = nn.ModuleDict()
    # ModuleDict refuses the names of its methods as keys, and a table may well be called "items".
    holder._modules.update(tables)
    return holder


def _held(
    config: BaseEmbeddingConfig, device: torch.device | str | None
) -> QuantisedTable | HashedHolder | None:
    """Make the module that holds a quantised or hashed table; return None for other tables."""
    storage = storage_of(config)
    if isinstance(storage, HashedRows):
        where = _as_device(device)
        if storage.file is not None and (where is None or where.type != "meta"):
            raise ValueError(no_room(config, where))
        return HashedHolder(dataclasses.replace(storage, file=None), where)  # it has no rows yet
    if storage.is_trainable:
        return None
    return QuantisedTable(storage, config.embedding_dim, make_weight(config, _as_device(device)))


def _is_changed(weight: Tensor, fn: Callable[[Tensor], Tensor]) -> bool:
    """Return whether ``fn``, which a module applies to its parameters, moves or casts this one."""
    probe = fn(weight.detach().new_empty(0))
    return probe.device != weight.device or probe.dtype != weight.dtype


def _as_device(device: torch.device | str | None) -> torch.device | None:
    return None if device is None else torch.device(device)
