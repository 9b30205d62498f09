"""TorchRec's path to inference: dense layers in fp16, and the sharding of a quantised model."""

import abc
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from meshrec import model_parallel as own
from meshrec.comms.mesh import ShardingEnv
from meshrec.compat.bridge.planner import EmbeddingShardingPlanner, FixedPercentageStorageReservation
from meshrec.compat.bridge.plans import ShardingPlan, to_own
from meshrec.compat.bridge.quant_sharders import (
    QuantEmbeddingBagCollectionSharder,
    QuantEmbeddingCollectionSharder,
)
from meshrec.compat.bridge.sharding_env import local_devices
from meshrec.modules.embedding_modules import TableCollection
from meshrec.plan.sharding_plan import ShardingType
from meshrec.planner import types

DEFAULT_SHARDERS = [QuantEmbeddingBagCollectionSharder(), QuantEmbeddingCollectionSharder()]


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
    """Spread the quantised collections of ``model`` over devices of this process, in place. Return it and the
    plan.

    Args:
        model: the quantised model.
        world_size: number of devices.
        compute_device: type of the devices. With ``"cpu"``, all of them are the CPU.
        sharding_device: changes nothing: rows are always on the device of their lookup, and never on
            ``meta``.
        sharders: the sharders (default: those of quantised collections).
        device_memory_size: bytes of a device.
        constraints: constraints of the planner (default: whole tables).
        ddr_cap: bytes of the host.
        sharding_plan: placement of the tables; None: the planner makes it.

    Raises:
        ValueError: there are fewer GPUs.
    """
    env = ShardingEnv.from_local(local_devices(world_size, compute_device))
    sharders = list(DEFAULT_SHARDERS if sharders is None else sharders)
    if sharding_plan is None:
        tables = [
            config.name
            for module in model.modules()
            if isinstance(module, TableCollection)
            for config, _ in module.tables().values()
        ]
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
            storage_reservation=FixedPercentageStorageReservation(percentage=0.0),
        )
        sharding_plan = planner.plan(model, sharders)
    made = own.DistributedModelParallel(
        model, env, plan=to_own(sharding_plan), sharders=sharders, init_data_parallel=False
    )
    return made.module, sharding_plan


def quantize_feature(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Convert tensors of fp32 and fp64 to fp16, in a hook before ``forward``."""
    wide = (torch.float32, torch.float64)
    return tuple(x.half() if isinstance(x, Tensor) and x.dtype in wide else x for x in inputs)


class PredictModule(nn.Module, abc.ABC):
    """A model that maps a dict of tensors to a dict of tensors. Subclasses write ``predict_forward``."""

    def __init__(self, module: nn.Module, device: torch.device | str | None = None) -> None:
        super().__init__()
        self._module = module.eval()
        self._device = None if device is None else torch.device(device)

    @property
    def predict_module(self) -> nn.Module:
        """The model that was given."""
        return self._module

    @abc.abstractmethod
    def predict_forward(self, batch: dict[str, Tensor]) -> Any:
        """Return the predictions for a batch, both dicts of tensors."""

    def forward(self, batch: dict[str, Tensor]) -> Any:
        """Run ``predict_forward`` without gradients, with the device as the current one if it is a GPU."""
        on_gpu = self._device is not None and self._device.type == "cuda"
        with torch.inference_mode(), torch.cuda.device(self._device) if on_gpu else nullcontext():
            return self.predict_forward(batch)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return the model's state dict."""
        return self._module.state_dict(*args, **kwargs)


def quantize_dense(
    predict_module: PredictModule,
    dtype: torch.dtype,
    additional_embedding_module_type: Sequence[type[nn.Module]] = (),
) -> nn.Module:
    """Convert the children of the model other than embedding collections, and their inputs, to fp16.

    Raises:
        ValueError: ``dtype`` is another type.
    """
    if dtype != torch.half:
        raise ValueError(
            f"dense layers are kept in fp16 here, got {dtype}. For bf16 call "
            "meshrec.quant.quantize(model, dense=DataType.BF16)."
        )
    kept: tuple[type[nn.Module], ...] = (TableCollection, *additional_embedding_module_type)
    for child in predict_module.predict_module.children():
        if not isinstance(child, kept):
            child.half().register_forward_pre_hook(quantize_feature)
    return predict_module
