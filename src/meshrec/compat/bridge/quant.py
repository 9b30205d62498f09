"""TorchRec's quantisation functions and classes, which make MeshRec's quantised collections."""

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
from meshrec.compat.bridge.sparse import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from meshrec.compat.bridge.sparse.tensor_dict import maybe_td_to_kjt
from meshrec.modules import embedding_modules
from meshrec.modules.embedding_configs import DataType, EmbeddingBagConfig, EmbeddingConfig, PoolingType
from meshrec.modules.embedding_modules import TableCollection
from meshrec.quant import quantize

# torch.fx leaves these calls whole where the module that makes them says so.
torch.fx.wrap("bag_rows")
torch.fx.wrap("id_rows")

_DATA_TYPES = {
    torch.int8: DataType.INT8,
    torch.qint8: DataType.INT8,
    torch.quint4x2: DataType.INT4,
    torch.quint2x4: DataType.INT2,
    torch.float16: DataType.FP16,
    torch.bfloat16: DataType.BF16,
    torch.float32: DataType.FP32,
}


class QuantConfig(NamedTuple):
    """The types of results and of weights, as observers such as
    ``torch.quantization.PlaceholderObserver.with_args(dtype=torch.int8)``.
    """

    activation: Any
    weight: Any
    per_table_weight_dtype: Mapping[str, torch.dtype] | None = None


def data_type_of(dtype: torch.dtype) -> DataType:
    """Return MeshRec's data type for one of TorchRec's.

    Raises:
        ValueError: rows cannot have the type, such as uint8.
    """
    if dtype not in _DATA_TYPES:
        raise ValueError(
            f"rows cannot be quantised to {dtype}. Use one of {', '.join(map(str, _DATA_TYPES))}; codes are "
            "unsigned, with a scale and a bias for each row."
        )
    return _DATA_TYPES[dtype]


class EmbeddingBagCollection(embedding_modules.EmbeddingBagCollection):
    """TorchRec's quantised ``EmbeddingBagCollection(tables, is_weighted, device, output_dtype=torch.float)``.

    Args:
        tables: the tables, with ``data_type`` INT8, INT4 or INT2, or any other type.
        is_weighted: whether each row is scaled by the input's weight of its ID.
        device: device of the rows.
        output_dtype: type of the result.
        table_name_to_quantized_weights: refused: FBGEMM's rows are of another layout.
        hints: ``register_tbes``, ``quant_state_dict_split_scale_bias``, ``row_alignment`` and
            ``cache_features_order``, which change nothing here.
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

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:  # type: ignore[override]
        """Look up: [B, sum of D]. torch.fx records one lookup after the other."""
        if not isinstance(features, Proxy):
            return embeddings.keyed(super().forward(maybe_td_to_kjt(features)))
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
        """Make a quantised collection from a collection with a ``qconfig``, which is a ``QuantConfig``."""
        made: Self = _from_float(cls, module)
        return made


class EmbeddingCollection(embedding_modules.EmbeddingCollection):
    """TorchRec's quantised ``EmbeddingCollection(tables, device, need_indices=False,
    output_dtype=torch.float)``.

    See ``EmbeddingBagCollection``. With ``need_indices``, the results have the IDs as weights.
    """

    _need_indices = False  # of collections that a quantised model brings along

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

    def need_indices(self) -> bool:
        """Return whether the results have the IDs as weights."""
        return self._need_indices

    def forward(  # type: ignore[override]
        self, features: KeyedJaggedTensor
    ) -> dict[str, JaggedTensor]:
        """Look up: [n, D] by feature. torch.fx records one lookup after the other."""
        if not isinstance(features, Proxy):
            bags = maybe_td_to_kjt(features).to_dict()
            looked_up = super().forward(maybe_td_to_kjt(features))
            features_of = [name for config, _ in self.tables().values() for name in config.feature_names]
            return {
                name: JaggedTensor.unchecked(
                    rows.values(),
                    bags[feature].values() if self._need_indices else None,
                    rows.lengths(),
                    rows.offsets(),
                )
                for (name, rows), feature in zip(looked_up.items(), features_of, strict=True)
            }
        bags = features.to_dict()
        names = iter(self.embedding_names())
        result = {}
        for config, weight in self.tables().values():
            for name in config.feature_names:
                bag = bags[name]
                kind = (config.data_type.bits, config.embedding_dim, _dtype_of(self))
                rows = id_rows(weight, bag.values(), bag.offsets(), *kind)
                result[next(names)] = JaggedTensor(
                    values=rows,
                    weights=bag.values() if self._need_indices else None,
                    lengths=bag.lengths(),
                )
        return result

    @classmethod
    def from_float(cls, module: nn.Module, use_precomputed_fake_quant: bool = False) -> Self:
        """Make a quantised collection from a collection with a ``qconfig``, which is a ``QuantConfig``."""
        made: Self = _from_float(cls, module)
        made._need_indices = getattr(module, "_need_indices", False)
        return made


_LAYOUT = {
    "register_tbes": False,
    "quant_state_dict_split_scale_bias": False,
    "row_alignment": 16,
    "cache_features_order": False,
}


def _check_options(owner: str, weights: Mapping[str, Any] | None, hints: Mapping[str, Any]) -> None:
    """Take the options that change nothing, and refuse rows in FBGEMM's layout."""
    if weights is not None:
        raise ValueError(
            f"{owner}: table_name_to_quantized_weights holds rows in FBGEMM's layout. Make the collection "
            "from a float one with quantize_embeddings or from_float, or load a state dict of this class."
        )
    take_hints(owner, hints, _LAYOUT)


def _dtype_of(collection: TableCollection) -> torch.dtype:
    return torch.float32 if collection.output_dtype is None else collection.output_dtype.dtype


def quant_prep_enable_quant_state_dict_split_scale_bias(module: nn.Module) -> None:
    """Do nothing, because state dicts always have scales and biases as separate tensors."""


def quant_prep_enable_quant_state_dict_split_scale_bias_for_types(
    module: nn.Module, module_types: Sequence[type[nn.Module]]
) -> None:
    """Do nothing, because state dicts always have scales and biases as separate tensors."""


def meta_to_cpu_placement(module: nn.Module) -> None:
    """Move quantised collections on ``meta`` to the CPU, in place. Their rows are zeros."""
    for child in module.modules():
        if isinstance(child, EmbeddingBagCollection | EmbeddingCollection):
            weights = [weight for _, weight in child.tables().values()]
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
    """Quantise every embedding collection in ``module``, as TorchRec's function does.

    The arguments ``additional_...`` are not needed, because all kinds of collections are quantised.
    """
    made = _quantized(module, dtype, per_table_weight_dtype, output_dtype)
    return _put_into(module, made) if inplace else made


def quantize_inference_model(
    model: nn.Module,
    quantization_mapping: Mapping[str, type[nn.Module]] | None = None,
    per_table_weight_dtype: Mapping[str, torch.dtype] | None = None,
    fp_weight_dtype: torch.dtype = torch.int8,
    quantization_dtype: torch.dtype = torch.int8,
    output_dtype: torch.dtype = torch.float,
) -> nn.Module:
    """Quantise the embedding collections of ``model`` in place, as TorchRec's function does.

    Feature-processed collections get the type ``fp_weight_dtype``, which must be the type of all.

    Raises:
        ValueError: a ``quantization_mapping`` is given, or ``fp_weight_dtype`` differs.
    """
    if quantization_mapping is not None or fp_weight_dtype != quantization_dtype:
        raise ValueError(
            "quantization_mapping must be None, and fp_weight_dtype the same as quantization_dtype: all "
            "embedding collections become MeshRec's. Name tables in per_table_weight_dtype instead."
        )
    return _put_into(model, _quantized(model, quantization_dtype, per_table_weight_dtype, output_dtype))


def _quantized(
    module: nn.Module,
    dtype: torch.dtype,
    per_table: Mapping[str, torch.dtype] | None,
    output_dtype: torch.dtype,
) -> nn.Module:
    # TorchRec takes names of tables that are not there; each of its collections looks for its own.
    names = {
        config.name
        for child in module.modules()
        if isinstance(child, TableCollection)
        for config, _ in child.tables().values()
    }
    chosen = {name: data_type_of(own) for name, own in (per_table or {}).items() if name in names}
    made = quantize(
        pruned(module), data_type_of(dtype), per_table=chosen, output_dtype=data_type_of(output_dtype)
    )
    if isinstance(made, TableCollection):
        return _adopted(made)  # type: ignore[no-any-return]
    found = {path: child for path, child in made.named_modules() if isinstance(child, TableCollection)}
    for path, child in found.items():
        parent, _, name = path.rpartition(".")
        made.get_submodule(parent).register_module(name, _adopted(child))
    return made


def _from_float(cls: Any, module: nn.Module) -> Any:
    qconfig = getattr(module, "qconfig", None)
    if qconfig is None:
        raise ValueError(
            "the module has no qconfig. Set module.qconfig = QuantConfig(activation=..., weight=...)."
        )
    types = getattr(qconfig, "per_table_weight_dtype", None)
    return _adopted(_quantized(module, qconfig.weight().dtype, types, qconfig.activation().dtype), cls)


def _adopted(made: Any, cls: Any = None) -> Any:
    """Return a quantised collection of TorchRec's class that shares the rows of MeshRec's collection."""
    dtype = _dtype_of(made)
    if isinstance(made, embedding_modules.EmbeddingBagCollection):
        kind = EmbeddingBagCollection if cls is None else cls
        found = kind(made.embedding_bag_configs(), made.is_weighted(), "meta", output_dtype=dtype)
    else:
        kind = EmbeddingCollection if cls is None else cls
        found = kind(made.embedding_configs(), "meta", output_dtype=dtype)
        found._need_indices = bool(getattr(made, "_need_indices", False))
    _set_rows(found, [weight.detach() for _, weight in made.tables().values()])
    return found.train(made.training)


def _set_rows(collection: TableCollection, rows: Sequence[Tensor]) -> None:
    """Hold rows as buffers, as TorchRec does. They are not parameters, because nothing trains them."""
    _, holders = collection.table_holders()
    for (config, _), own in zip(collection.tables().values(), rows, strict=True):
        holder = holders._modules[config.name]
        assert holder is not None
        holder._parameters.pop("weight", None)
        holder._buffers.pop("weight", None)
        holder.register_buffer("weight", own)


def _put_into(model: nn.Module, made: nn.Module) -> nn.Module:
    """Return ``model`` with its collections replaced by those of ``made``."""
    if isinstance(model, TableCollection):
        return made
    for path, child in list(made.named_modules()):
        if isinstance(child, TableCollection):
            parent, _, name = path.rpartition(".")
            model.get_submodule(parent).register_module(name, child)
    return model
