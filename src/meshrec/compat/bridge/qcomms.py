"""TorchRec's quantised collectives: the codecs of ``torchrec.distributed.fbgemm_qcomm_codec``.

A codec names one of MeshRec's wire formats. Where TorchRec falls back (bf16 on gloo), MeshRec does not have
to.
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
    """The precision of a collective."""

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"
    FP8 = "fp8"
    INT8 = "int8"
    MX4 = "mx4"

    def __str__(self) -> str:
        return self.value


class CommOp(Enum):
    """The collectives that codecs are registered for."""

    POOLED_EMBEDDINGS_ALL_TO_ALL = "pooled_embeddings_all_to_all"
    POOLED_EMBEDDINGS_REDUCE_SCATTER = "pooled_embeddings_reduce_scatter"
    SEQUENCE_EMBEDDINGS_ALL_TO_ALL = "sequence_embeddings_all_to_all"


@dataclass
class QCommsConfig:
    """The precision of embeddings and their gradients on the network.

    ``forward_loss_scale`` and ``backward_loss_scale`` must be None, and formats of TorchRec that MeshRec
    lacks (FP8, MX4) are refused by ``get_qcomm_codecs_registry``.
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
    """One direction of a collective, in one of MeshRec's wire formats."""

    def __init__(self, format: WireFormat) -> None:
        self.format = format

    def encode(self, input_tensor: Tensor, ctx: object | None = None) -> Tensor:
        """Encode a tensor, row by row of its last dimension."""
        rows = input_tensor.reshape(-1, input_tensor.shape[-1])
        coded = self.format.encode(rows)
        return coded.view(*input_tensor.shape[:-1], coded.shape[-1])

    def decode(self, input_grad: Tensor, ctx: object | None = None) -> Tensor:
        """Decode what ``encode`` encoded, to fp32."""
        message = input_grad.reshape(-1, input_grad.shape[-1])
        length = input_grad.shape[-1]
        dim = round((length * self.format.unit.itemsize - self.format.row_overhead) / self.format.value_bytes)
        return self.format.decode(message, dim).float().view(*input_grad.shape[:-1], dim)

    @property
    def quantized_dtype(self) -> torch.dtype:
        """The dtype of what ``encode`` returns."""
        return self.format.unit

    def calc_quantized_size(self, input_len: int, ctx: object | None = None) -> int:
        """Return the number of elements of an encoded row of ``input_len`` values."""
        return self.format.row_units(input_len)

    def create_context(self) -> None:
        """Return None: a row carries all that its decoder needs."""

    def padded_size(
        self, input_tensor: Tensor, dim_per_rank: Sequence[int], my_rank: int, qcomm_ctx: object
    ) -> tuple[int, int]:
        """Return the width of the rows and the number of values added to them, which is 0."""
        return (sum(dim_per_rank) if input_tensor.ndim == 1 else input_tensor.shape[1]), 0


@dataclass
class QuantizedCommCodecs:
    """The codecs of a collective, forward and backward."""

    forward: Any = field(default_factory=lambda: QuantizedCommCodec(wire_format("fp32")))
    backward: Any = field(default_factory=lambda: QuantizedCommCodec(wire_format("fp32")))


Registry = Mapping[str, QuantizedCommCodecs]


def get_qcomm_codecs(qcomms_config: QCommsConfig | None) -> QuantizedCommCodecs:
    """Return the codecs of a config; fp32 without one.

    Raises:
        ValueError: MeshRec lacks a format, or scales no losses.
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
    qcomms_config: QCommsConfig,
    comm_ops: Sequence[CommOp] | None = None,
    device: torch.device | None = None,
) -> dict[str, QuantizedCommCodecs] | None:
    """Return the codecs of a config for some collectives (default: all); None if both directions are fp32.

    Every format works on every device and backend, so ``device`` changes nothing.

    Raises:
        ValueError: see ``get_qcomm_codecs``.
    """
    full = CommType.FP32
    if qcomms_config.forward_precision is full and qcomms_config.backward_precision is full:
        return None
    return {op.name: get_qcomm_codecs(qcomms_config) for op in (comm_ops or list(CommOp))}


def checked_registry(registry: Registry | None) -> Registry | None:
    """Return codecs that a sharder is given.

    Raises:
        ValueError: they are not for collectives of sharded modules, or not MeshRec's.
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
    """Return the wire formats of a module's tables. Row-wise tables take those of the reduce-scatter.

    Raises:
        ValueError: a format is not for its direction.
    """
    by_rows = {ShardingType.ROW_WISE, ShardingType.TABLE_ROW_WISE, ShardingType.GRID_SHARD}
    tables = {}
    for name, placed in plan.items():
        op = CommOp.SEQUENCE_EMBEDDINGS_ALL_TO_ALL
        if pooled:
            is_split = placed.sharding_type in by_rows
            op = CommOp.POOLED_EMBEDDINGS_REDUCE_SCATTER if is_split else CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL
        codecs = (registry or {}).get(op.name, QuantizedCommCodecs())
        tables[name] = WireFormats(codecs.forward.format, codecs.backward.format).checked()
    return CommsPrecision(tables={name: CommsPrecision(*each) for name, each in tables.items()})


def _format(kind: CommType) -> WireFormat:
    if kind in (CommType.FP8, CommType.MX4):
        raise ValueError(
            f"CommType.{kind.name} is not among MeshRec's wire formats. Take CommType.INT8, which has the "
            "bytes of FP8 and a smaller error within a row, or precision=CommsPrecision('int4', 'int8') of "
            "meshrec.distributed's sharders in place of MX4."
        )
    return wire_format(kind.value)
