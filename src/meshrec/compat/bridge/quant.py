"""TorchRec's quantisation: its functions and classes make MeshRec's quantised collections."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from typing_extensions import Self

from meshrec.modules import embedding_modules
from meshrec.modules.embedding_configs import DataType, EmbeddingBagConfig, EmbeddingConfig
from meshrec.modules.embedding_modules import TableCollection
from meshrec.quant import quantize

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
    """Observers that tell the types of results and of weights, such as
    ``torch.quantization.PlaceholderObserver.with_args(dtype=torch.int8)``.
    """

    activation: Any
    weight: Any
    per_table_weight_dtype: Mapping[str, torch.dtype] | None = None


def data_type_of(dtype: torch.dtype) -> DataType:
    """MeshRec's name for a type of TorchRec's.

    Raises:
        ValueError: for a type that rows cannot have, such as uint8.
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
        tables: with ``data_type`` INT8, INT4 or INT2; or any other.
        is_weighted: whether each row is scaled by the input's weight of its id.
        device: of the rows.
        output_dtype: of the result.
    """

    def __init__(
        self,
        tables: Sequence[EmbeddingBagConfig],
        is_weighted: bool,
        device: torch.device | str | None = None,
        output_dtype: torch.dtype = torch.float,
    ) -> None:
        super().__init__(tables, is_weighted, device, output_dtype=data_type_of(output_dtype))

    @classmethod
    def from_float(cls, module: nn.Module, use_precomputed_fake_quant: bool = False) -> Self:
        """From a collection with a ``qconfig``, which is a ``QuantConfig``."""
        made: Self = _from_float(cls, module)
        return made


class EmbeddingCollection(embedding_modules.EmbeddingCollection):
    """TorchRec's quantised ``EmbeddingCollection(tables, device, output_dtype=torch.float)``; see
    ``EmbeddingBagCollection``.
    """

    def __init__(
        self,
        tables: Sequence[EmbeddingConfig],
        device: torch.device | str | None = None,
        output_dtype: torch.dtype = torch.float,
    ) -> None:
        super().__init__(tables, device, output_dtype=data_type_of(output_dtype))

    @classmethod
    def from_float(cls, module: nn.Module, use_precomputed_fake_quant: bool = False) -> Self:
        """From a collection with a ``qconfig``, which is a ``QuantConfig``."""
        made: Self = _from_float(cls, module)
        return made


def quantize_embeddings(
    module: nn.Module,
    dtype: torch.dtype,
    inplace: bool,
    additional_qconfig_spec_keys: Sequence[type[nn.Module]] | None = None,
    additional_mapping: Mapping[type[nn.Module], type[nn.Module]] | None = None,
    output_dtype: torch.dtype = torch.float,
    per_table_weight_dtype: Mapping[str, torch.dtype] | None = None,
) -> nn.Module:
    """TorchRec's: every embedding collection in ``module``, quantised. ``additional_...``: not needed, all
    kinds of collections are.
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
    """TorchRec's: ``model`` with its embedding collections quantised, in place; those in feature-processed
    ones have the type ``fp_weight_dtype``, where it is that of all.

    Raises:
        ValueError: for a ``quantization_mapping``, or an ``fp_weight_dtype`` of its own.
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
    return quantize(module, data_type_of(dtype), per_table=chosen, output_dtype=data_type_of(output_dtype))


def _from_float(cls: Any, module: nn.Module) -> Any:
    qconfig = getattr(module, "qconfig", None)
    if qconfig is None:
        raise ValueError(
            "the module has no qconfig. Set module.qconfig = QuantConfig(activation=..., weight=...)."
        )
    types = getattr(qconfig, "per_table_weight_dtype", None)
    made = _quantized(module, qconfig.weight().dtype, types, qconfig.activation().dtype)
    made.__class__ = cls
    return made


def _put_into(model: nn.Module, made: nn.Module) -> nn.Module:
    """``model`` with the collections of ``made``."""
    if isinstance(model, TableCollection):
        return made
    for path, child in list(made.named_modules()):
        if isinstance(child, TableCollection):
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, child)
    return model
