"""TorchRec's inference path: dense layers in fp16, and sharding for quantized models."""

import abc
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from meshrec import model_parallel as core
from meshrec.comms.mesh import ShardingEnv
from meshrec.compat.bridge.planner import EmbeddingShardingPlanner, FixedPercentageStorageReservation
from meshrec.compat.bridge.plans import BoundsCheckMode, ShardingPlan, to_core
from meshrec.compat.bridge.quant_sharders import (
    QuantEmbeddingBagCollectionSharder,
    QuantEmbeddingCollectionSharder,
)
from meshrec.compat.bridge.sharding_env import local_devices
from meshrec.modules.embedding_modules import TableCollection
from meshrec.plan.sharding_plan import ShardingType
from meshrec.planner import types

# Keys of TorchRec's kernel options. All are accepted without effect.
FUSED_PARAM_REGISTER_TBE_BOOL = "__register_tbes_in_named_modules"
FUSED_PARAM_QUANT_STATE_DICT_SPLIT_SCALE_BIAS = "__register_quant_state_dict_split_scale_bias"
FUSED_PARAM_TBE_ROW_ALIGNMENT = "__register_tbe_row_alignment"
FUSED_PARAM_BOUNDS_CHECK_MODE = "__register_tbe_bounds_check_mode"
FUSED_PARAM_LENGTHS_TO_OFFSETS_LOOKUP = "__register_lengths_to_offsets_lookup"

DEFAULT_FUSED_PARAMS: dict[str, Any] = {
    FUSED_PARAM_REGISTER_TBE_BOOL: True,
    FUSED_PARAM_QUANT_STATE_DICT_SPLIT_SCALE_BIAS: True,
    FUSED_PARAM_BOUNDS_CHECK_MODE: BoundsCheckMode.NONE,
    FUSED_PARAM_LENGTHS_TO_OFFSETS_LOOKUP: False,
}
"""TorchRec's kernel options, without effect here."""

DEFAULT_SHARDERS = [
    QuantEmbeddingBagCollectionSharder(DEFAULT_FUSED_PARAMS),
    QuantEmbeddingCollectionSharder(DEFAULT_FUSED_PARAMS),
]


# Kept only for the getter, which must return the value that a program has set.
_propagates = False


def set_propogate_device(val: bool) -> None:
    """Set TorchRec's switch for device propagation, which has no effect here.

    Lookups always run on the device of their rows.
    """
    global _propagates
    _propagates = val


def get_propogate_device() -> bool:
    """Return the value that was set with ``set_propogate_device``."""
    return _propagates


def shard_quant_model(
    model: nn.Module,
    world_size: int = 1,
    compute_device: str = "cuda",
    sharding_device: str = "meta",
    sharders: Sequence[Any] | None = None,
    device_memory_size: int | None = None,
    constraints: Mapping[str, Any] | None = None,
    ddr_cap: int | None = None,
    sharding_plan: ShardingPlan | None = None,
) -> tuple[nn.Module, ShardingPlan]:
    """Shard a model's quantized collections over devices of this process, in place.

    Args:
        model: quantized model.
        world_size: number of devices.
        compute_device: device type. With ``"cpu"``, all devices are the CPU.
        sharding_device: ignored: rows always live on the device of their lookup.
        sharders: sharders (default: those for quantized collections).
        device_memory_size: bytes per device.
        constraints: planner constraints (default: table-wise sharding).
        ddr_cap: host bytes.
        sharding_plan: table placement; None: call the planner.

    Returns:
        The model and the sharding plan.

    Raises:
        ValueError: the host has fewer GPUs than ``world_size``.
    """
    # "Ranks" are devices of this process here.
    env = ShardingEnv.from_local(local_devices(world_size, compute_device))
    sharders = list(DEFAULT_SHARDERS if sharders is None else sharders)
    if sharding_plan is None:
        tables = [
            config.name
            for module in model.modules()
            if isinstance(module, TableCollection)
            for config, _ in module.tables().values()
        ]
        # TorchRec's default for inference: whole tables, so that results need no reduction.
        whole = types.ParameterConstraints(sharding_types=[ShardingType.TABLE_WISE])
        topology = types.Topology(
            world_size=world_size,
            compute_device=compute_device,
            local_world_size=world_size,
            hbm_cap=device_memory_size,
            ddr_cap=ddr_cap,
        )
        planner = EmbeddingShardingPlanner(
            topology,
            batch_size=1,
            constraints=dict.fromkeys(tables, whole) if constraints is None else constraints,
            # Serving has no gradients or optimizer state to reserve memory for.
            storage_reservation=FixedPercentageStorageReservation(percentage=0.0),
        )
        sharding_plan = planner.plan(model, sharders)
    sharded = core.DistributedModelParallel(
        model, env, plan=to_core(sharding_plan), sharders=sharders, init_data_parallel=False
    )
    return sharded.module, sharding_plan


def quantize_feature(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Convert fp32 and fp64 tensors to fp16. A forward pre-hook."""
    wide = (torch.float32, torch.float64)
    return tuple(x.half() if isinstance(x, Tensor) and x.dtype in wide else x for x in inputs)


class PredictModule(nn.Module, abc.ABC):
    """Base class of inference models whose input and output are dicts of tensors.

    Subclasses implement ``predict_forward``.
    """

    def __init__(self, module: nn.Module, device: torch.device | str | None = None) -> None:
        super().__init__()
        self._module = module.eval()
        self._device = None if device is None else torch.device(device)

    @property
    def predict_module(self) -> nn.Module:
        """Wrapped model."""
        return self._module

    @abc.abstractmethod
    def predict_forward(self, batch: dict[str, Tensor]) -> Any:
        """Return predictions for a batch; both are tensor dicts."""

    def forward(self, batch: dict[str, Tensor]) -> Any:
        """Run ``predict_forward`` in inference mode, on the module's GPU if it has one."""
        # A server thread may have another current device.
        on_gpu = self._device is not None and self._device.type == "cuda"
        with torch.inference_mode(), torch.cuda.device(self._device) if on_gpu else nullcontext():
            return self.predict_forward(batch)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return the wrapped model's state dict."""
        return self._module.state_dict(*args, **kwargs)


def quantize_dense(
    predict_module: PredictModule,
    dtype: torch.dtype,
    additional_embedding_module_type: Sequence[type[nn.Module]] = (),
) -> nn.Module:
    """Convert the model's children and their inputs to fp16, except embedding collections.

    Args:
        predict_module: wrapper around the model. Changed in place.
        dtype: must be float16.
        additional_embedding_module_type: further module types to leave unchanged.

    Raises:
        ValueError: ``dtype`` is not float16.
    """
    if dtype != torch.half:
        raise ValueError(
            f"dense layers are kept in fp16 here, got {dtype}. For bf16 call "
            "meshrec.quant.quantize(model, dense=DataType.BF16)."
        )
    unchanged: tuple[type[nn.Module], ...] = (TableCollection, *additional_embedding_module_type)
    for child in predict_module.predict_module.children():
        if not isinstance(child, unchanged):
            # The hook converts inputs to fp16 too: a module changes only its own parameters.
            child.half().register_forward_pre_hook(quantize_feature)
    return predict_module
