"""TorchRec's path to inference: dense layers in fp16, and sharding of a quantised model."""

import abc
from collections.abc import Mapping, Sequence
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
    """``model`` with its quantised collections spread over devices of this process, in place, and the plan.

    Args:
        model: quantised.
        world_size: how many devices.
        compute_device: their type. On ``"cpu"`` all of them are the CPU.
        sharding_device: changes nothing: rows are always where they are looked up, and never on ``meta``.
        sharders: default: those of quantised collections.
        device_memory_size, ddr_cap: bytes of a device, and of the host.
        constraints: default: whole tables.
        sharding_plan: where tables go; None: the planner makes it.

    Raises:
        ValueError: for GPUs that are not there.
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
    """Tensors of fp32 and fp64 in fp16; a hook before ``forward``."""
    wide = (torch.float32, torch.float64)
    return tuple(x.half() if isinstance(x, Tensor) and x.dtype in wide else x for x in inputs)


class PredictModule(nn.Module, abc.ABC):
    """A model to be asked with a dict of tensors: a subclass says how, in ``predict_forward``."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._module = module.eval()

    @property
    def predict_module(self) -> nn.Module:
        """The model."""
        return self._module

    @abc.abstractmethod
    def predict_forward(self, batch: dict[str, Tensor]) -> Any:
        """A dict of tensors for a dict of tensors."""

    def forward(self, batch: dict[str, Tensor]) -> Any:
        """``predict_forward`` without gradients."""
        with torch.inference_mode():
            return self.predict_forward(batch)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """The model's."""
        return self._module.state_dict(*args, **kwargs)


def quantize_dense(
    predict_module: PredictModule,
    dtype: torch.dtype,
    additional_embedding_module_type: Sequence[type[nn.Module]] = (),
) -> nn.Module:
    """The children of the model that are no embedding collections in fp16, and what they are given.

    Raises:
        ValueError: for another type.
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
