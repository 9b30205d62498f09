"""Table configs and collections with TorchRec's arguments and TorchRec's initial weights for a seed."""

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from meshrec import sparse
from meshrec.compat.bridge import table_configs
from meshrec.compat.bridge.adapted import Adapted
from meshrec.compat.bridge.sparse import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from meshrec.compat.bridge.sparse.helpers import maybe_td_to_kjt
from meshrec.compat.bridge.sparse.segments import positions_of
from meshrec.compat.bridge.virtual_tables import hashed_config
from meshrec.modules import embedding_configs, embedding_modules
from meshrec.modules.embedding_configs import DataType, PoolingType
from meshrec.ops.operators import InputError

torch.fx.wrap("concatenated_bags")

_logger = logging.getLogger("meshrec")
_C = TypeVar("_C", bound=embedding_configs.BaseEmbeddingConfig)

# TorchScript compiles every module attribute that this class variable does not exclude. It looks at the class
# itself only, so both collections repeat it.
_PYTHON_ONLY = tuple(
    name for name, value in vars(embedding_modules.TableCollection).items() if isinstance(value, property)
)
# TorchRec's config arguments without a counterpart, with the only value that changes nothing.
_NOT_HERE = {
    "num_embeddings_post_pruning": None,
    "need_pos": False,
    "input_dim": None,
    "total_num_buckets": None,
    "enable_embedding_update": False,
    "stash_weights": False,
}


def _config(
    num_embeddings: int,
    embedding_dim: int,
    name: str = "",
    data_type: DataType = DataType.FP32,
    feature_names: Sequence[str] = (),
    weight_init_max: float | None = None,
    weight_init_min: float | None = None,
    num_embeddings_post_pruning: int | None = None,
    init_fn: Callable[[Tensor], object] | None = None,
    *,
    use_virtual_table: bool = False,
    virtual_table_eviction_policy: object = None,
    **more: Any,
) -> dict[str, Any]:
    """Convert TorchRec's table config arguments to keyword arguments of MeshRec's configs."""
    # Only None is accepted: pruning sets it later.
    more["num_embeddings_post_pruning"] = num_embeddings_post_pruning
    for argument, value in more.items():
        if argument not in _NOT_HERE:
            raise TypeError(f"an embedding config has no argument {argument!r}. Leave it out.")
        if value != _NOT_HERE[argument]:
            raise ValueError(
                f"table {name!r}: MeshRec has no {argument}, got {value!r}. Leave it out: "
                "docs/from-torchrec.md says what is nearest."
            )
    rows: dict[str, Any] = {"num_embeddings": num_embeddings}
    if use_virtual_table:
        rows = {"keys": hashed_config(virtual_table_eviction_policy, num_embeddings, name)}
    elif virtual_table_eviction_policy is not None:
        raise ValueError(
            f"table {name!r} has a virtual_table_eviction_policy and no virtual table. Set "
            "use_virtual_table=True, or leave the policy out."
        )
    return {
        **rows,
        "embedding_dim": embedding_dim,
        "name": name,
        "data_type": data_type,
        # TorchRec's collections read a feature of the table's name where none is given.
        "feature_names": list(feature_names) or [name],
        "weight_init_max": weight_init_max,
        "weight_init_min": weight_init_min,
        "init_fn": init_fn,
    }


def _bag_config(
    *args: Any, pooling: PoolingType = PoolingType.SUM, **kwargs: Any
) -> embedding_configs.EmbeddingBagConfig:
    """Construct an ``EmbeddingBagConfig`` from the arguments of TorchRec's class."""
    return table_configs.EmbeddingBagConfig(**_config(*args, **kwargs), pooling=pooling)


def _sequence_config(*args: Any, **kwargs: Any) -> embedding_configs.EmbeddingConfig:
    """Construct an ``EmbeddingConfig`` from the arguments of TorchRec's class."""
    return table_configs.EmbeddingConfig(**_config(*args, **kwargs))


def _skip_draws(
    tables: Sequence[embedding_configs.BaseEmbeddingConfig], device: torch.device | str | None
) -> None:
    """Advance the random number generator as if torch's nn.Embedding initialized the tables.

    Tables on ``meta`` and tables with hashed keys draw nothing.
    """
    if device is not None and torch.device(device).type == "meta":
        return
    for config in tables:
        if config.keys is not None:
            continue  # hashed keys: rows are initialized by ID
        # The same shape, dtype and device as the table, so that the generator advances equally.
        shape = (config.num_embeddings, config.embedding_dim)
        torch.empty(shape, dtype=config.data_type.dtype, device=device).normal_()


def _unquantized(collection: nn.Module, tables: Sequence[_C], kind: type[_C]) -> list[_C]:
    """Return copies of the configs with quantized data types replaced by fp16, as TorchRec trains them."""
    embedding_configs.check_configs(collection, tables, kind)
    if quantised := [config.name for config in tables if config.data_type.bits]:
        _logger.warning(
            "the tables %s have quantised data types, and are in fp16 until they are quantised.", quantised
        )
    # Copies: a program may set config attributes later.
    return [
        replace(config, data_type=DataType.FP16 if config.data_type.bits else config.data_type)
        for config in tables
    ]


# `isinstance` with these names must hold for MeshRec's configs. Subclasses would not satisfy this.
EmbeddingBagConfig = Adapted(embedding_configs.EmbeddingBagConfig, _bag_config)
EmbeddingConfig = Adapted(embedding_configs.EmbeddingConfig, _sequence_config)


class RowIndexError(InputError, IndexError):
    """IDs are outside a table without pooling. It is an IndexError, because TorchRec programs catch that."""


class EmbeddingBagCollection(embedding_modules.EmbeddingBagCollection):
    """TorchRec's ``EmbeddingBagCollection(tables, is_weighted=False, device=None)``.

    Draws the same initial weights as TorchRec for a seed. TorchRec draws all tables twice, and keeps the
    second draw. Eager calls use MeshRec's batched kernel. TorchScript and torch.fx see a sequence of
    ``nn.EmbeddingBag`` calls.

    Args:
        tables: table configs; may be empty.
        is_weighted: whether per-sample weights scale the rows.
        device: device for the parameters.
    """

    __jit_ignored_attributes__ = __jit_unused_properties__ = _PYTHON_ONLY
    fused_optimizer = embedding_modules.TableCollection.fused_optimizer
    _is_weighted: bool
    _feature_names: list[list[str]]
    _embedding_names: list[str]
    _lengths_per_embedding: list[int]

    def __init__(
        self,
        tables: Sequence[embedding_configs.EmbeddingBagConfig],
        is_weighted: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        tables = _unquantized(self, tables, embedding_configs.EmbeddingBagConfig)
        if tables:
            # TorchRec's first draw, which it overwrites.
            _skip_draws(tables, device)
            super().__init__(tables, is_weighted, device)
        else:
            _fill_empty(self)
            self.embedding_bags = nn.ModuleDict()
        # The fields from here on are set once and never change. Only the scripted and traced paths read them.
        self._is_weighted = is_weighted
        self._embedding_bag_configs = self.embedding_bag_configs()
        self._feature_names = [list(table.feature_names) for table in tables]
        self._embedding_names = [name for names in names_by_table(tables) for name in names]
        self._lengths_per_embedding = [t.embedding_dim for t in tables for _ in t.feature_names]

    def __prepare_scriptable__(self) -> "EmbeddingBagCollection":
        return self

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Look up and pool the bags of all features: [B, sum of D], with a column block per feature."""
        # Eager calls use MeshRec's lookup. The loop below is for TorchScript and torch.fx, which can record
        # it.
        if not torch.jit.is_scripting():
            if not isinstance(features, Proxy) and self._configs:
                return to_torchrec_keyed_tensor(super().forward(maybe_td_to_kjt(features)), torch.float32)
        pooled: list[Tensor] = []
        names: list[str] = []
        bags = features.to_dict()
        for i, table in enumerate(self.embedding_bags.values()):
            for name in self._feature_names[i]:
                bag = bags[name]
                rows = table(
                    input=bag.values(),
                    offsets=bag.offsets(),
                    per_sample_weights=bag.weights() if self._is_weighted else None,
                ).float()
                pooled.append(rows)
                names.append(name)
        return KeyedTensor(
            keys=self._embedding_names,
            length_per_key=self._lengths_per_embedding,
            values=concatenated_bags(pooled, names, features.inverse_indices_or_none()),
        )


class EmbeddingCollection(embedding_modules.EmbeddingCollection):
    """TorchRec's ``EmbeddingCollection(tables, device=None, ...)``, with TorchRec's weights for a seed.

    Args:
        tables: table configs; may be empty.
        device: device for the parameters.
        need_indices: whether outputs have the IDs in ``weights``.
        use_gather_select: ignored.
        use_gather_select_per_sharding: ignored.
    """

    __jit_ignored_attributes__ = __jit_unused_properties__ = _PYTHON_ONLY
    fused_optimizer = embedding_modules.TableCollection.fused_optimizer
    _need_indices: bool
    _feature_names: list[list[str]]
    _embedding_names_by_table: list[list[str]]

    def __init__(
        self,
        tables: Sequence[embedding_configs.EmbeddingConfig],
        device: torch.device | str | None = None,
        need_indices: bool = False,
        use_gather_select: bool = False,
        use_gather_select_per_sharding: dict[str, bool] | None = None,
    ) -> None:
        tables = _unquantized(self, tables, embedding_configs.EmbeddingConfig)
        if tables:
            # TorchRec interleaves the draws here, a skipped draw and a real draw per table. On meta nothing
            # is drawn.
            super().__init__(tables, torch.device("meta"))
            where = torch.get_default_device() if device is None else torch.device(device)
            if where.type != "meta":
                self.to_empty(device=where)
                for config, weight in self.tables().values():
                    _skip_draws([config], where)
                    config.init_weight(weight)
        else:
            _fill_empty(self)
            self.embeddings = nn.ModuleDict()
        self._need_indices = need_indices
        self._embedding_configs = self.embedding_configs()
        # Set by `set_use_sorted_select`, only for the getter: the order of reads does not change results.
        self._sorted_select = False
        # Kept only for the methods that return them.
        self._gather_select = (use_gather_select, use_gather_select_per_sharding)
        self._feature_names = [list(table.feature_names) for table in tables]
        self._embedding_names_by_table = names_by_table(tables)

    def __prepare_scriptable__(self) -> "EmbeddingCollection":
        return self

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Look up a row per ID. Returns rows [n, D] by feature, in the bags of the input."""
        result: dict[str, JaggedTensor] = {}
        # Eager calls use MeshRec's lookup. The loop below is for TorchScript and torch.fx, which can record
        # it.
        if not torch.jit.is_scripting():
            if not isinstance(features, Proxy) and self._configs:
                return self._look_up(maybe_td_to_kjt(features))
        bags = features.to_dict()
        for i, table in enumerate(self.embeddings.values()):
            names = self._feature_names[i]
            embedding_names = self._embedding_names_by_table[i]
            for j, embedding_name in enumerate(embedding_names):
                bag = bags[names[j]]
                result[embedding_name] = JaggedTensor(
                    values=table(input=bag.values()).float(),
                    weights=bag.values() if self._need_indices else None,
                    lengths=bag.lengths(),
                )
        return result

    def _look_up(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Look up rows with MeshRec's collection, and convert the result to TorchRec's JaggedTensors."""
        try:
            looked_up = super().forward(features)
        except InputError as error:
            raise RowIndexError(str(error)) from error
        # fp32 for every table dtype, as in TorchRec.
        return to_torchrec_jagged_tensors(
            looked_up, features, self._configs, self._need_indices, torch.float32
        )

    def need_indices(self) -> bool:
        """Return whether outputs have the IDs in ``weights``."""
        return self._need_indices

    def embedding_dim(self) -> int:
        """Return the first table's width; -1 without tables."""
        return self._configs[0].embedding_dim if self._configs else -1

    def embedding_names_by_table(self) -> list[list[str]]:
        """Return the result keys, grouped by table."""
        return self._embedding_names_by_table

    def use_gather_select(self) -> bool:
        """Return the constructor argument."""
        return self._gather_select[0]

    def use_sorted_select(self) -> bool:
        """Return the value last passed to ``set_use_sorted_select``; initially False."""
        return self._sorted_select

    def set_use_sorted_select(self, use_sorted_select: bool) -> None:
        """Store the option. It has no effect: gradients are always accumulated in ID order."""
        self._sorted_select = use_sorted_select

    def use_gather_select_per_sharding(self) -> dict[str, bool] | None:
        """Return the constructor argument."""
        return self._gather_select[1]


def mark_data_parallel_skip_grad_sync(module: nn.Module) -> None:
    """Mark a module as read-only, for `should_skip_data_parallel_grad_sync`.

    The mark changes nothing else, because MeshRec exchanges no gradients for read-only tables.
    """
    module._torchrec_data_parallel_skip_grad_sync = True


def should_skip_data_parallel_grad_sync(module: nn.Module) -> bool:
    """Return whether the module is marked as read-only."""
    return bool(getattr(module, "_torchrec_data_parallel_skip_grad_sync", False))


def names_by_table(tables: Sequence[embedding_configs.BaseEmbeddingConfig]) -> list[list[str]]:
    """Return the keys under which lookups return each table's features, grouped by table.

    A key is ``feature``, or ``feature@table`` if several tables read this feature.
    """
    readers = Counter(name for table in tables for name in table.feature_names)
    return [
        [name if readers[name] == 1 else f"{name}@{table.name}" for name in table.feature_names]
        for table in tables
    ]


def concatenated_bags(
    pooled: list[Tensor], names: list[str], inverse_indices: tuple[list[str], Tensor] | None
) -> Tensor:
    """Concatenate the pooled rows of all features along the columns, [B, sum of D].

    Args:
        pooled: for every feature i, pooled rows [B_i, D_i]. With inverse indices, the list entries are
            replaced.
        inverse_indices: for features with different batch sizes, the feature names, and an index tensor
            [K, B] with the row of every sample in the pooled rows of every feature. None: all batch sizes are
            equal.
    """
    if inverse_indices is not None:
        rows = positions_of(inverse_indices[0])
        # Indices instead of zip or enumerate with a nested list: TorchScript compiles this function.
        for i in range(len(pooled)):
            pooled[i] = pooled[i].index_select(0, inverse_indices[1][rows[names[i]]])
    return torch.cat(pooled, dim=1)


def to_torchrec_keyed_tensor(kt: sparse.KeyedTensor, dtype: torch.dtype | None = None) -> KeyedTensor:
    """Convert MeshRec's KeyedTensor to TorchRec's, with values in ``dtype`` if given."""
    return KeyedTensor.unchecked(kt.keys(), kt.length_per_key(), kt.values().to(dtype=dtype), kt.key_dim())


def to_torchrec_jagged_tensors(
    looked_up: Mapping[str, sparse.JaggedTensor],
    features: KeyedJaggedTensor,
    configs: Sequence[embedding_configs.BaseEmbeddingConfig],
    need_indices: bool,
    dtype: torch.dtype | None = None,
) -> dict[str, JaggedTensor]:
    """Convert the result of MeshRec's EmbeddingCollection to TorchRec's.

    Args:
        looked_up: rows [N, D] by result key, in table order.
        dtype: dtype of the rows; None: unchanged.
    """
    ids = features.to_dict()
    # Results come in table and feature order, so they are matched with the features by position.
    names = [name for config in configs for name in config.feature_names]
    return {
        key: JaggedTensor.unchecked(
            rows.values().to(dtype=dtype),
            ids[name].values() if need_indices else None,
            rows.lengths(),
            rows.offsets(),
        )
        for (key, rows), name in zip(looked_up.items(), names, strict=True)
    }


def _fill_empty(collection: embedding_modules.TableCollection) -> None:
    """Initialize a collection without tables, which the constructor of MeshRec's class would reject."""
    nn.Module.__init__(collection)
    collection._configs = []
    collection._updater = None


def data_type_to_dtype(data_type: DataType) -> torch.dtype:
    """Return the torch dtype for a DataType."""
    return data_type.dtype


def dtype_to_data_type(dtype: torch.dtype) -> DataType:
    """Return the DataType for a torch dtype.

    Raises:
        ValueError: tables cannot have this dtype.
    """
    for data_type in DataType:
        if data_type.dtype == dtype:
            return data_type
    raise ValueError(f"tables have {[str(d.dtype) for d in DataType]}, got {dtype}. Choose one of these.")


def pooling_type_to_str(pooling_type: PoolingType) -> str:
    """Return ``"sum"`` or ``"mean"``.

    Raises:
        ValueError: the pooling type is NONE.
    """
    if pooling_type is PoolingType.NONE:
        raise ValueError("PoolingType.NONE does not pool, so it has no name. Use an EmbeddingCollection.")
    return str(pooling_type.value).lower()
