"""TorchRec's quantization functions and classes, implemented with MeshRec's quantized collections."""

import copy
import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import Proxy
from typing_extensions import Self

from meshrec.compat.bridge import embeddings
from meshrec.compat.bridge.hints import take_hints
from meshrec.compat.bridge.pruning import pruned
from meshrec.compat.bridge.quant_lookups import bag_rows, id_rows
from meshrec.compat.bridge.quant_tables import QuantTableGroup, table_groups
from meshrec.compat.bridge.sparse import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from meshrec.compat.bridge.sparse.helpers import maybe_td_to_kjt
from meshrec.distributed.embedding_modules import ShardedEmbeddingBagCollection, ShardedEmbeddingCollection
from meshrec.modules import embedding_modules
from meshrec.modules.embedding_configs import DataType, EmbeddingBagConfig, EmbeddingConfig, PoolingType
from meshrec.modules.embedding_modules import TableCollection
from meshrec.modules.feature_processor import FeatureProcessedEmbeddingBagCollection
from meshrec.quant import quantize

_logger = logging.getLogger("meshrec")
_SHARDED = (ShardedEmbeddingBagCollection, ShardedEmbeddingCollection)

# torch.fx records these calls without tracing into them.
torch.fx.wrap("bag_rows")
torch.fx.wrap("id_rows")

# Observers may name signed or unsigned dtypes. The result is the same.
_DATA_TYPES = {
    torch.int8: DataType.INT8,
    torch.qint8: DataType.INT8,
    torch.quint8: DataType.INT8,
    torch.quint4x2: DataType.INT4,
    torch.quint2x4: DataType.INT2,
    torch.float16: DataType.FP16,
    torch.bfloat16: DataType.BF16,
    torch.float32: DataType.FP32,
}


class QuantConfig(NamedTuple):
    """Result and weight dtypes, as torch.quantization observers.

    Example observer: ``torch.quantization.PlaceholderObserver.with_args(dtype=torch.int8)``.
    """

    activation: Any
    weight: Any
    per_table_weight_dtype: Mapping[str, torch.dtype] | None = None


def data_type_of(dtype: torch.dtype) -> DataType:
    """Return MeshRec's data type for a torch dtype.

    Raises:
        ValueError: table rows cannot have this dtype, such as uint8.
    """
    if dtype not in _DATA_TYPES:
        raise ValueError(
            f"rows cannot be quantised to {dtype}. Use one of {', '.join(map(str, _DATA_TYPES))}; codes are "
            "unsigned, with a scale and a bias for each row."
        )
    return _DATA_TYPES[dtype]


class EmbeddingBagCollection(embedding_modules.EmbeddingBagCollection):
    """TorchRec's quantized ``EmbeddingBagCollection(tables, is_weighted, device, output_dtype=torch.float)``.

    Args:
        tables: table configs with any data type, such as INT8, INT4 or INT2.
        is_weighted: whether per-sample weights scale the rows.
        device: device for the rows.
        output_dtype: result dtype.
        table_name_to_quantized_weights: must be None, because FBGEMM's row layout differs.
        hints: ``register_tbes``, ``quant_state_dict_split_scale_bias``, ``row_alignment`` and
            ``cache_features_order``, which are ignored.
    """

    def __init__(
        self,
        tables: Sequence[EmbeddingBagConfig],
        is_weighted: bool,
        device: torch.device | str | None = None,
        output_dtype: torch.dtype = torch.float,
        table_name_to_quantized_weights: Mapping[str, Any] | None = None,
        **hints: Any,
    ) -> None:
        _check_options("EmbeddingBagCollection", table_name_to_quantized_weights, hints)
        super().__init__(tables, is_weighted, device, output_dtype=data_type_of(output_dtype))
        _set_rows(self, [weight.detach() for _, weight in self.tables().values()])

    @property
    def tbes(self) -> list[QuantTableGroup]:
        """Table groups by pooling type, with their rows."""
        return table_groups(self)

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:  # type: ignore[override]
        """Look up and pool the bags of all features: values [B, sum of D]."""
        # Eager calls use MeshRec's lookup. torch.fx records the loop below.
        if not isinstance(features, Proxy):
            return embeddings.to_torchrec_keyed_tensor(super().forward(maybe_td_to_kjt(features)))
        bags = features.to_dict()
        pooled = []
        for config, weight in self.tables().values():
            for name in config.feature_names:
                bag, mean = bags[name], config.pooling is PoolingType.MEAN
                arguments = (bag.values(), bag.offsets(), bag.weights() if self.is_weighted() else None)
                kind = (config.data_type.bits, config.embedding_dim, int(mean), _dtype_of(self))
                pooled.append(bag_rows(weight, *arguments, *kind))
        return KeyedTensor(
            keys=self.embedding_names(),
            length_per_key=[c.embedding_dim for c, _ in self.tables().values() for _ in c.feature_names],
            values=torch.cat(pooled, dim=1),
        )

    @classmethod
    def from_float(cls, module: nn.Module, use_precomputed_fake_quant: bool = False) -> Self:
        """Quantize a collection with a ``qconfig`` attribute, which must be a ``QuantConfig``."""
        return _from_float(cls, module)  # type: ignore[no-any-return]


class EmbeddingCollection(embedding_modules.EmbeddingCollection):
    """TorchRec's quantized ``EmbeddingCollection(tables, device, need_indices=False, output_dtype=...)``.

    See ``EmbeddingBagCollection``. With ``need_indices``, outputs have the IDs in ``weights``.
    """

    # For collections that are loaded or copied without the constructor.
    _need_indices = False

    def __init__(
        self,
        tables: Sequence[EmbeddingConfig],
        device: torch.device | str | None = None,
        need_indices: bool = False,
        output_dtype: torch.dtype = torch.float,
        table_name_to_quantized_weights: Mapping[str, Any] | None = None,
        **hints: Any,
    ) -> None:
        _check_options("EmbeddingCollection", table_name_to_quantized_weights, hints)
        super().__init__(tables, device, output_dtype=data_type_of(output_dtype))
        _set_rows(self, [weight.detach() for _, weight in self.tables().values()])
        self._need_indices = need_indices

    @property
    def tbes(self) -> list[QuantTableGroup]:
        """All tables as a single group, with their rows."""
        return table_groups(self)

    def need_indices(self) -> bool:
        """Return whether outputs have the IDs in ``weights``."""
        return self._need_indices

    def forward(  # type: ignore[override]
        self, features: KeyedJaggedTensor
    ) -> dict[str, JaggedTensor]:
        """Look up a row per ID. Returns rows [n, D] by feature, in the bags of the input."""
        if not isinstance(features, Proxy):
            features = maybe_td_to_kjt(features)
            return embeddings.to_torchrec_jagged_tensors(
                super().forward(features), features, self._configs, self._need_indices
            )
        bags = features.to_dict()
        # Result keys, in table and feature order: feature, or feature@table.
        names = iter(self.embedding_names())
        result = {}
        for config, weight in self.tables().values():
            for name in config.feature_names:
                bag = bags[name]
                kind = (config.data_type.bits, config.embedding_dim, _dtype_of(self))
                rows = id_rows(weight, bag.values(), bag.offsets(), *kind)
                result[next(names)] = JaggedTensor(
                    values=rows, weights=bag.values() if self._need_indices else None, lengths=bag.lengths()
                )
        return result

    @classmethod
    def from_float(cls, module: nn.Module, use_precomputed_fake_quant: bool = False) -> Self:
        """Quantize a collection with a ``qconfig`` attribute, which must be a ``QuantConfig``."""
        quantized: Self = _from_float(cls, module)
        quantized._need_indices = getattr(module, "_need_indices", False)
        return quantized


# TorchRec's default values. Another value is logged, and changes nothing.
_LAYOUT = {
    "register_tbes": False,
    "quant_state_dict_split_scale_bias": False,
    "row_alignment": 16,
    "cache_features_order": False,
}


def _check_options(owner: str, weights: Mapping[str, Any] | None, hints: Mapping[str, Any]) -> None:
    """Accept TorchRec's options for the row layout, which have no effect here. Reject rows in FBGEMM's
    layout.
    """
    if weights is not None:
        raise ValueError(
            f"{owner}: table_name_to_quantized_weights holds rows in FBGEMM's layout. Make the collection "
            "from a float one with quantize_embeddings or from_float, or load a state dict of this class."
        )
    take_hints(owner, hints, _LAYOUT)


def _dtype_of(collection: TableCollection) -> torch.dtype:
    """Return the dtype of lookup results."""
    return torch.float32 if collection.output_dtype is None else collection.output_dtype.dtype


def quant_prep_enable_quant_state_dict_split_scale_bias(module: nn.Module) -> None:
    """Do nothing: state dicts always hold scales and biases as separate tensors."""


def quant_prep_enable_quant_state_dict_split_scale_bias_for_types(
    module: nn.Module, module_types: Sequence[type[nn.Module]]
) -> None:
    """Do nothing: state dicts always hold scales and biases as separate tensors."""


def meta_to_cpu_placement(module: nn.Module) -> None:
    """Move quantized collections from ``meta`` to the CPU, in place. Their rows become zeros."""
    for child in module.modules():
        if isinstance(child, EmbeddingBagCollection | EmbeddingCollection):
            weights = [weight for _, weight in child.tables().values()]
            # Only rows without memory are replaced.
            _set_rows(child, [torch.zeros_like(w, device="cpu") if w.is_meta else w for w in weights])


def quantize_embeddings(
    module: nn.Module,
    dtype: torch.dtype,
    inplace: bool,
    additional_qconfig_spec_keys: Sequence[type[nn.Module]] | None = None,
    additional_mapping: Mapping[type[nn.Module], type[nn.Module]] | None = None,
    output_dtype: torch.dtype = torch.float,
    per_table_weight_dtype: Mapping[str, torch.dtype] | None = None,
) -> nn.Module:
    """Quantize all embedding collections in ``module``, as TorchRec's function does.

    Sharded collections stay unchanged, because ranks may call this alone. `meshrec.quant.quantize` quantizes
    them collectively.

    Args:
        module: collection or model.
        dtype: row dtype.
        inplace: whether to change ``module``. A collection itself is never changed: use the return value.
        additional_qconfig_spec_keys: ignored, because all kinds of collections are quantized.
        additional_mapping: ignored, like the previous argument.
        output_dtype: result dtype.
        per_table_weight_dtype: row dtype for some tables, by name. Unknown names are ignored.

    Returns:
        The quantized module.
    """
    # Quantization of sharded collections is collective, but TorchRec programs call this on single ranks.
    if _is_sharded(module):
        unsharded = module if inplace else copy.deepcopy(module)
        return _quantize_unsharded(unsharded, dtype, per_table_weight_dtype, output_dtype)
    quantized = _quantized(module, dtype, per_table_weight_dtype, output_dtype)
    # Quantization always makes a copy, whose collections are then moved into the original.
    return _put_into(module, quantized) if inplace else quantized


def quantize_inference_model(
    model: nn.Module,
    quantization_mapping: Mapping[str, type[nn.Module]] | None = None,
    per_table_weight_dtype: Mapping[str, torch.dtype] | None = None,
    fp_weight_dtype: torch.dtype = torch.int8,
    quantization_dtype: torch.dtype = torch.int8,
    output_dtype: torch.dtype = torch.float,
) -> nn.Module:
    """Quantize all embedding collections in ``model``, in place, as TorchRec's function does.

    Args:
        model: collection or model. Sharded collections stay unchanged.
        quantization_mapping: must be None.
        per_table_weight_dtype: row dtype for some tables, by name. Unknown names are ignored.
        fp_weight_dtype: row dtype for feature-processed collections. If the model has any, this must equal
            ``quantization_dtype``.
        quantization_dtype: row dtype.
        output_dtype: result dtype.

    Raises:
        ValueError: ``quantization_mapping`` is given, or ``fp_weight_dtype`` differs.
    """
    if quantization_mapping is not None:
        raise ValueError(
            "quantization_mapping must be None: all embedding collections become MeshRec's. Name tables in "
            "per_table_weight_dtype instead."
        )
    # TorchRec quantizes collections with feature processors separately; here all get one type.
    has_processors = any(isinstance(m, FeatureProcessedEmbeddingBagCollection) for m in model.modules())
    if has_processors and data_type_of(fp_weight_dtype) != data_type_of(quantization_dtype):
        raise ValueError(
            f"fp_weight_dtype {fp_weight_dtype} must be quantization_dtype {quantization_dtype}: all "
            "collections of the model get one type. Name tables in per_table_weight_dtype instead."
        )
    arguments = (quantization_dtype, per_table_weight_dtype, output_dtype)
    if _is_sharded(model):
        return _quantize_unsharded(model, *arguments)
    return _put_into(model, _quantized(model, *arguments))


def _is_sharded(model: nn.Module) -> bool:
    return any(isinstance(module, _SHARDED) for module in model.modules())


def _quantize_unsharded(model: nn.Module, *arguments: Any) -> nn.Module:
    """Quantize all collections that are not sharded, in place. Not collective."""
    _logger.warning(
        "sharded collections are not quantised, as in TorchRec. Call meshrec.quant.quantize(model, ...) on "
        "all ranks, or quantise the model before it is sharded."
    )
    return _replaced(model, {path: _quantized(child, *arguments) for path, child in _collections(model)})


def _quantized(
    module: nn.Module,
    dtype: torch.dtype,
    per_table: Mapping[str, torch.dtype] | None,
    output_dtype: torch.dtype,
) -> nn.Module:
    """Return a quantized copy in which the collections have TorchRec's classes.

    Args:
        per_table: data types by table name; None: none.
    """
    # As in TorchRec, names of other models' tables are ignored.
    names = {config.name for _, child in _collections(module) for config, _ in child.tables().values()}
    types = {
        name: data_type_of(table_dtype) for name, table_dtype in (per_table or {}).items() if name in names
    }
    quantized = quantize(
        pruned(module), data_type_of(dtype), per_table=types, output_dtype=data_type_of(output_dtype)
    )
    if isinstance(quantized, TableCollection):
        return _to_torchrec_class(quantized)  # type: ignore[no-any-return]
    return _replaced(quantized, {path: _to_torchrec_class(child) for path, child in _collections(quantized)})


def _from_float(cls: Any, module: nn.Module) -> Any:
    """Quantize a collection as the dtypes in ``module.qconfig`` request, and return it as class ``cls``."""
    qconfig = getattr(module, "qconfig", None)
    if qconfig is None:
        raise ValueError(
            "the module has no qconfig. Set module.qconfig = QuantConfig(activation=..., weight=...)."
        )
    types = getattr(qconfig, "per_table_weight_dtype", None)
    return _to_torchrec_class(
        _quantized(module, qconfig.weight().dtype, types, qconfig.activation().dtype), cls
    )


def _to_torchrec_class(collection: Any, cls: Any = None) -> Any:
    """Convert MeshRec's quantized collection to TorchRec's class. Both share the rows."""
    dtype = _dtype_of(collection)
    # On meta, because the rows of the other collection are put in below.
    if isinstance(collection, embedding_modules.EmbeddingBagCollection):
        configs, weighted = collection.embedding_bag_configs(), collection.is_weighted()
        converted = (cls or EmbeddingBagCollection)(configs, weighted, "meta", output_dtype=dtype)
    else:
        converted = (cls or EmbeddingCollection)(collection.embedding_configs(), "meta", output_dtype=dtype)
        converted._need_indices = bool(getattr(collection, "_need_indices", False))
    _set_rows(converted, [weight.detach() for _, weight in collection.tables().values()])
    return converted.train(collection.training)


def _set_rows(collection: TableCollection, rows: Sequence[Tensor]) -> None:
    """Register rows as buffers, as TorchRec does. They are not trained."""
    _, holders = collection.table_holders()
    for (config, _), weight in zip(collection.tables().values(), rows, strict=True):
        holder = holders._modules[config.name]
        assert holder is not None
        # The entry moves from parameters to buffers: register_buffer rejects a name that is already taken.
        holder._parameters.pop("weight", None)
        holder._buffers.pop("weight", None)
        holder.register_buffer("weight", weight)


def _collections(model: nn.Module) -> list[tuple[str, TableCollection]]:
    """Return all embedding collections in a model, with their paths."""
    return [(path, child) for path, child in model.named_modules() if isinstance(child, TableCollection)]


def _replaced(model: nn.Module, modules: Mapping[str, nn.Module]) -> nn.Module:
    """Replace the submodules at some paths, in place, and return the model."""
    for path, module in modules.items():
        parent, _, name = path.rpartition(".")
        model.get_submodule(parent).register_module(name, module)
    return model


def _put_into(model: nn.Module, quantized: nn.Module) -> nn.Module:
    """Replace the collections in ``model`` by those in ``quantized``, and return the model.

    If the model is a collection itself, return its quantized form.
    """
    if isinstance(model, TableCollection):
        return quantized
    return _replaced(model, dict(_collections(quantized)))
