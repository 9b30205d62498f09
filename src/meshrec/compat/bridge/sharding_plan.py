"""Manual plans with TorchRec's arguments. A generator computes a table's placement from the weight."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from meshrec.compat.bridge.comm import get_device_type, get_local_size
from meshrec.compat.bridge.plans import EmbeddingModuleShardingPlan, ParameterSharding, table_from_core
from meshrec.compat.bridge.sharders import EmbeddingBagCollectionSharder, EmbeddingCollectionSharder
from meshrec.optim.in_backward import in_backward_spec
from meshrec.plan import builders as core
from meshrec.plan.sharding_plan import (
    EmbeddingComputeKernel,
    EnumerableShardingSpec,
    RemoteDevice,
    ShardingType,
    ShardMetadata,
    TableSize,
)
from meshrec.plan.sharding_plan import ParameterSharding as CoreSharding

ParameterShardingGenerator = Callable[[nn.Parameter, int, int, str, Any], ParameterSharding]


def _generator(
    make: Callable[..., core.ShardingGenerator], kernel: Any = None, **arguments: Any
) -> ParameterShardingGenerator:
    """Convert a builder of MeshRec's plans to a generator in TorchRec's form.

    Args:
        kernel: compute kernel; None: chosen per table.
    """

    def generate(
        param: nn.Parameter, local_size: int, world_size: int, device_type: str, sharder: object
    ) -> ParameterSharding:
        """Return the table's placement in TorchRec's form.

        Args:
            param: table weight [num_embeddings, embedding_dim].
        """
        size = TableSize(param.shape[0], param.shape[1])
        core_generator = make(**arguments, compute_kernel=_kernel(kernel, param))
        # Generators are not told the table's name, so errors use these words instead.
        placed = core_generator(
            "of this parameter", size, core.WorldShape(world_size, local_size, device_type)
        )
        return table_from_core(placed, world_size=world_size, local_size=local_size)

    return generate


def data_parallel() -> ParameterShardingGenerator:
    """Replicate the table on every rank."""
    copies = CoreSharding(
        sharding_type=ShardingType.DATA_PARALLEL, compute_kernel=EmbeddingComputeKernel.DENSE
    )
    return _generator(lambda compute_kernel: lambda table, size, ranks: copies)


def table_wise(
    rank: int, device: str | None = None, compute_kernel: str | None = None
) -> ParameterShardingGenerator:
    """Place the table on a single rank.

    Args:
        rank: rank that holds the table.
        device: must be None or this process's device type.
        compute_kernel: kernel name; None: ``fused`` with an in-backward optimizer, else ``dense``.
    """
    _check_device(device)
    return _generator(core.table_wise, compute_kernel, rank=rank)


def row_wise(
    sizes_placement: object | None = None, compute_kernel: str | None = None, num_buckets: int | None = None
) -> ParameterShardingGenerator:
    """Split the rows evenly over all ranks.

    Args:
        sizes_placement: must be None.
        compute_kernel: kernel name; None: ``fused`` with an in-backward optimizer, else ``dense``.
        num_buckets: must be None.
    """
    if sizes_placement is not None or num_buckets is not None:
        raise ValueError(
            "row_wise splits rows evenly: MeshRec has no sizes_placement and no num_buckets. For other "
            "shards write a ParameterSharding with a sharding_spec."
        )
    return _generator(core.row_wise, compute_kernel)


def column_wise(
    ranks: Sequence[int] | None = None,
    size_per_rank: Sequence[int] | None = None,
    compute_kernel: str | None = None,
    device_types: Sequence[str] | None = None,
) -> ParameterShardingGenerator:
    """Split the columns over ranks.

    Args:
        ranks: rank per equal column block.
        size_per_rank: columns on ranks 0, 1, ...; used instead of ``ranks``.
        compute_kernel: kernel name; None: ``fused`` with an in-backward optimizer, else ``dense``.
        device_types: must be this process's device type.

    Raises:
        ValueError: neither ``ranks`` nor ``size_per_rank`` is given.
    """
    for device in device_types or ():
        _check_device(device)
    if size_per_rank is not None:
        return _generator(_columns_of, compute_kernel, sizes=list(size_per_rank))
    if ranks is None:
        raise ValueError("column_wise needs ranks, or size_per_rank. Give one of them.")
    return _generator(core.column_wise, compute_kernel, ranks=list(ranks))


def table_row_wise(host_index: int) -> ParameterShardingGenerator:
    """Split the rows over the ranks of a node."""
    return _generator(core.table_row_wise, node=host_index)


def grid_shard(host_indexes: Sequence[int]) -> ParameterShardingGenerator:
    """Split the columns over nodes, and the rows over the ranks within a node."""
    return _generator(core.grid_shard, nodes=list(host_indexes))


def get_default_sharders() -> list[Any]:
    """Return a sharder per kind of embedding module."""
    return [EmbeddingBagCollectionSharder(), EmbeddingCollectionSharder()]


def get_module_to_default_sharders() -> dict[type[nn.Module], Any]:
    """Return the default sharders by module type."""
    return {sharder.module_type: sharder for sharder in get_default_sharders()}


def apply_to_all(
    module: nn.Module, parameter_sharding_generator: ParameterShardingGenerator, sharder: Any = None
) -> dict[str, ParameterShardingGenerator]:
    """Return the same generator for every table in ``module``.

    Args:
        module: embedding module.
        parameter_sharding_generator: generator to repeat.
        sharder: ignored.
    """
    return dict.fromkeys(core.tables_of(module), parameter_sharding_generator)


def construct_module_sharding_plan(
    module: nn.Module,
    per_param_sharding: Mapping[str, ParameterShardingGenerator],
    sharder: Any = None,
    local_size: int | None = None,
    world_size: int | None = None,
    device_type: str | None = None,
) -> EmbeddingModuleShardingPlan:
    """Build a module plan from a generator per table.

    Args:
        module: embedding module.
        per_param_sharding: generator by table.
        sharder: passed to the generators.
        local_size: ranks per node (default: from the launcher).
        world_size: number of ranks (default: from the process group).
        device_type: device type (default: ``"cuda"`` if available).

    Raises:
        ValueError: tables and generators do not match, or a rank or node does not exist.
    """
    tables = core.tables_of(module)
    if set(tables) != set(per_param_sharding):
        raise ValueError(
            f"the module has the tables {list(tables)}, the generators are for {list(per_param_sharding)}. "
            "Give each table one."
        )
    world_size = world_size or dist.get_world_size()
    local_size = local_size or get_local_size(world_size)
    # Quantized tables have byte buffers with another shape. Generators get a meta parameter with the table's
    # shape.
    weights = {
        name: nn.Parameter(torch.empty(size, dtype=torch.uint8, device="meta"), requires_grad=False)
        for name, size in tables.items()
    }
    weights.update({name.split(".")[-2]: weight for name, weight in module.named_parameters()})
    device_type = device_type or get_device_type()
    return EmbeddingModuleShardingPlan(
        {
            name: generate(weights[name], local_size, world_size, device_type, sharder)
            for name, generate in per_param_sharding.items()
        }
    )


def _columns_of(sizes: list[int], compute_kernel: EmbeddingComputeKernel) -> core.ShardingGenerator:
    """Return a generator of column-wise shardings with ``sizes[i]`` columns on rank i."""

    def generate(table: str, size: TableSize, ranks: core.WorldShape) -> CoreSharding:
        """Return a column-wise sharding with ``sizes[i]`` columns on rank i.

        Args:
            table: ignored.
            size: table shape.
            ranks: world shape.
        """
        if sum(sizes) != size.embedding_dim:
            raise ValueError(
                f"size_per_rank {sizes} makes {sum(sizes)} columns, but the table has {size.embedding_dim}. "
                "Give sizes that add up to it."
            )
        starts = [sum(sizes[:rank]) for rank in range(len(sizes))]
        shards = tuple(
            ShardMetadata(
                shard_offsets=(0, start),
                shard_sizes=(size.num_embeddings, columns),
                placement=RemoteDevice(rank=rank, device=ranks.device),
            )
            for rank, (start, columns) in enumerate(zip(starts, sizes, strict=True))
            # A rank with 0 columns holds no shard.
            if columns
        )
        return CoreSharding(
            sharding_type=ShardingType.COLUMN_WISE,
            compute_kernel=compute_kernel,
            ranks=tuple(shard.placement.rank for shard in shards),
            sharding_spec=EnumerableShardingSpec(shards=shards),
        )

    return generate


def _kernel(compute_kernel: Any, param: nn.Parameter) -> EmbeddingComputeKernel:
    """Return the requested kernel; by default ``fused`` with an in-backward optimizer, else ``dense``."""
    if compute_kernel is None:
        has_optimizer = in_backward_spec(param) is not None
        return EmbeddingComputeKernel.FUSED if has_optimizer else EmbeddingComputeKernel.DENSE
    value = getattr(compute_kernel, "value", compute_kernel)
    allowed = [kernel.value for kernel in EmbeddingComputeKernel]
    if value not in allowed:
        raise ValueError(f"MeshRec has no compute kernel {value!r}, only {allowed}. Leave it out.")
    return EmbeddingComputeKernel(value)


def _check_device(device: str | None) -> None:
    """Raise ValueError if a device type differs from this process's."""
    if device is not None and device != get_device_type():
        raise ValueError(
            f"tables of one model live on one kind of device, here {get_device_type()!r}, got "
            f"{device!r}. Leave it out."
        )
