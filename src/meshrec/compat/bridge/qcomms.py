"""TorchRec's quantized collectives: ``torchrec.distributed.fbgemm_qcomm_codec``.

A codec names a MeshRec wire format. TorchRec falls back for bf16 on gloo; MeshRec does not need to.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, unique
from typing import Any

import torch
from torch import Tensor

from meshrec.comms.wire import CommsPrecision, WireFormat, WireFormats, wire_format
from meshrec.plan.sharding_plan import EmbeddingModuleShardingPlan, ShardingType


@unique
class CommType(Enum):
    """Precision of a collective."""

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"
    FP8 = "fp8"
    INT8 = "int8"
    MX4 = "mx4"

    def __str__(self) -> str:
        return self.value


class CommOp(Enum):
    """Collectives with registered codecs."""

    POOLED_EMBEDDINGS_ALL_TO_ALL = "pooled_embeddings_all_to_all"
    POOLED_EMBEDDINGS_REDUCE_SCATTER = "pooled_embeddings_reduce_scatter"
    SEQUENCE_EMBEDDINGS_ALL_TO_ALL = "sequence_embeddings_all_to_all"


@dataclass
class QCommsConfig:
    """Wire precision for embeddings and their gradients.

    ``forward_loss_scale`` and ``backward_loss_scale`` must be None. ``get_qcomm_codecs_registry`` rejects FP8
    and MX4.
    """

    forward_precision: CommType = CommType.FP32
    backward_precision: CommType = CommType.FP32
    forward_loss_scale: float | None = None
    backward_loss_scale: float | None = None
    fp8_quantize_dim: int | None = None
    fp8_quantize_dim_bwd: int | None = None
    fp8_bwd_uses_143: bool | None = False
    fp8_output_dtype: Any = None
    mx4_quantize_dim: int | None = None
    mx4_quantize_dim_bwd: int | None = None
    mx4_rounding_mode: Any = None
    output_dtype: Any = None


class QuantizedCommCodec:
    """Codec for one direction of a collective: forward, or backward.

    Args:
        format: MeshRec wire format, that is, the encoding of values on the way to other ranks.
    """

    def __init__(self, format: WireFormat) -> None:
        self.format = format

    def encode(self, input_tensor: Tensor, ctx: object | None = None) -> Tensor:
        """Encode a tensor row by row along the last dimension."""
        rows = input_tensor.reshape(-1, input_tensor.shape[-1])
        # Formats encode matrices.
        coded = self.format.encode(rows)
        return coded.view(*input_tensor.shape[:-1], coded.shape[-1])

    def decode(self, input_grad: Tensor, ctx: object | None = None) -> Tensor:
        """Decode a result of ``encode`` to fp32."""
        message = input_grad.reshape(-1, input_grad.shape[-1])
        length = input_grad.shape[-1]
        # TorchRec's decode does not pass the width. It follows from the encoded length and the bytes per
        # value.
        dim = round((length * self.format.unit.itemsize - self.format.row_overhead) / self.format.value_bytes)
        return self.format.decode(message, dim).float().view(*input_grad.shape[:-1], dim)

    @property
    def quantized_dtype(self) -> torch.dtype:
        """Dtype of encoded tensors."""
        return self.format.unit

    def calc_quantized_size(self, input_len: int, ctx: object | None = None) -> int:
        """Return the element count of an encoded row with ``input_len`` values."""
        return self.format.row_units(input_len)

    def create_context(self) -> None:
        """Return None: encoded rows are self-contained."""

    def padded_size(
        self, input_tensor: Tensor, dim_per_rank: Sequence[int], my_rank: int, qcomm_ctx: object
    ) -> tuple[int, int]:
        """Return the row width and the number of padding values, always 0.

        Args:
            input_tensor: tensor to encode, [n] or [n, D].
            dim_per_rank: widths by rank. Their sum is the row width for a 1-D tensor.
            my_rank: ignored.
            qcomm_ctx: ignored.
        """
        return (sum(dim_per_rank) if input_tensor.ndim == 1 else input_tensor.shape[1]), 0


@dataclass
class QuantizedCommCodecs:
    """Forward and backward codecs for a collective."""

    forward: Any = field(default_factory=lambda: QuantizedCommCodec(wire_format("fp32")))
    backward: Any = field(default_factory=lambda: QuantizedCommCodec(wire_format("fp32")))


Registry = Mapping[str, QuantizedCommCodecs]


def get_qcomm_codecs(qcomms_config: QCommsConfig | None) -> QuantizedCommCodecs:
    """Return the codecs for both directions of a config; without a config, codecs for fp32.

    Raises:
        ValueError: a format or a loss scale is not supported.
    """
    if qcomms_config is None:
        return QuantizedCommCodecs()
    if qcomms_config.forward_loss_scale is not None or qcomms_config.backward_loss_scale is not None:
        raise ValueError(
            "forward_loss_scale and backward_loss_scale keep small fp16 values from vanishing; MeshRec has "
            "no such scales. Leave them out, and take CommType.BF16 or CommType.INT8 for gradients: bf16 has "
            "the range of fp32, and int8 a scale for each row."
        )
    return QuantizedCommCodecs(
        QuantizedCommCodec(_format(qcomms_config.forward_precision)),
        QuantizedCommCodec(_format(qcomms_config.backward_precision)),
    )


def get_qcomm_codecs_registry(
    qcomms_config: QCommsConfig, comm_ops: Sequence[CommOp] | None = None, device: torch.device | None = None
) -> dict[str, QuantizedCommCodecs] | None:
    """Return codecs by collective; None if both directions are fp32.

    Args:
        qcomms_config: precision by direction.
        comm_ops: collectives (default: all).
        device: ignored, because every format works on every device and backend.

    Raises:
        ValueError: see ``get_qcomm_codecs``.
    """
    full = CommType.FP32
    if qcomms_config.forward_precision is full and qcomms_config.backward_precision is full:
        # Without a registry, all exchanges are in fp32.
        return None
    return {op.name: get_qcomm_codecs(qcomms_config) for op in (comm_ops or list(CommOp))}


def checked_registry(registry: Registry | None) -> Registry | None:
    """Return the registry after validation.

    Raises:
        ValueError: a collective is unknown, or a codec is not MeshRec's.
    """
    for name, codecs in (registry or {}).items():
        if name not in CommOp.__members__:
            raise ValueError(
                f"qcomm_codecs_registry has codecs for {name!r}; sharded modules use "
                f"{', '.join(CommOp.__members__)}."
            )
        for codec in (codecs.forward, codecs.backward):
            if not isinstance(codec, QuantizedCommCodec):
                raise ValueError(
                    f"qcomm_codecs_registry has a codec of type {type(codec).__name__} for {name}; MeshRec "
                    "takes those of get_qcomm_codecs_registry. For a format of your own, subclass "
                    "meshrec.comms.wire.WireFormat and give precision=CommsPrecision(...) to "
                    "meshrec.distributed's sharders."
                )
    return registry


def precision_of(
    registry: Registry | None, plan: EmbeddingModuleShardingPlan, *, pooled: bool
) -> CommsPrecision:
    """Return the wire formats of every table in a module.

    Args:
        registry: codecs by collective; None: fp32.

    Raises:
        ValueError: a format does not support the direction.
    """
    by_rows = {ShardingType.ROW_WISE, ShardingType.TABLE_ROW_WISE, ShardingType.GRID_SHARD}
    tables = {}
    for name, placed in plan.items():
        # MeshRec has wire formats per table, TorchRec has codecs per collective: the sharding type determines
        # which.
        op = CommOp.SEQUENCE_EMBEDDINGS_ALL_TO_ALL
        if pooled:
            is_split = placed.sharding_type in by_rows
            op = CommOp.POOLED_EMBEDDINGS_REDUCE_SCATTER if is_split else CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL
        codecs = (registry or {}).get(op.name, QuantizedCommCodecs())
        tables[name] = WireFormats(codecs.forward.format, codecs.backward.format).validated()
    return CommsPrecision(tables={name: CommsPrecision(*formats) for name, formats in tables.items()})


def _format(kind: CommType) -> WireFormat:
    """Return the wire format for a precision. Raises ValueError for FP8 and MX4, which MeshRec lacks."""
    if kind in (CommType.FP8, CommType.MX4):
        raise ValueError(
            f"CommType.{kind.name} is not among MeshRec's wire formats. Take CommType.INT8, which has the "
            "bytes of FP8 and a smaller error within a row, or precision=CommsPrecision('int4', 'int8') of "
            "meshrec.distributed's sharders in place of MX4."
        )
    return wire_format(kind.value)
