"""A DLRM in each library with equal sizes, built and trained for `benchmarks.dlrm_step`."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

if TYPE_CHECKING:
    from meshrec.distributed import EmbeddingModuleShardingPlan

LR = 0.02
BF16 = " bf16"
_PATH = "sparse_arch.embedding_bag_collection"


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Size of the model and its batches: ``batch`` samples on each rank, ``bag`` IDs per sample and table."""

    num_tables: int = 26
    num_rows: int = 100_000
    dim: int = 64
    batch: int = 1024
    bag: int = 4
    dense_in: int = 13
    bottom: tuple[int, ...] = (512, 256, 64)
    top: tuple[int, ...] = (512, 512, 256, 1)


TINY = Shape(num_tables=4, num_rows=100, dim=8, batch=16, bottom=(16, 8), top=(16, 1))


class Inputs(NamedTuple):
    """One batch of one rank."""

    dense: Tensor
    ids: Tensor
    offsets: Tensor
    labels: Tensor


Step = Callable[[Inputs], Tensor]
"""Trains on a batch and returns its loss."""


def make_inputs(shape: Shape, number: int, rank: int | None = None) -> Inputs:
    """Return a batch of a rank; by default, of this one."""
    generator = torch.Generator().manual_seed(1000 * number + (dist.get_rank() if rank is None else rank))
    num_bags = shape.num_tables * shape.batch
    return Inputs(
        torch.rand(shape.batch, shape.dense_in, generator=generator),
        torch.randint(0, shape.num_rows, (num_bags * shape.bag,), generator=generator),
        torch.arange(num_bags + 1) * shape.bag,
        torch.randint(0, 2, (shape.batch,), generator=generator).float(),
    )


def fill(weight: Tensor, first_row: int = 0) -> Tensor:
    """Fill a table with values that depend only on the row, because TorchRec initialises every shard as a
    whole table.
    """
    values = 0.01 * torch.arange(first_row, first_row + weight.shape[0]).sin()
    with torch.no_grad():
        return weight.copy_(values[:, None] if weight.dim() == 2 else values)


def keyed(shape: Shape) -> list[str]:
    return [f"f{number}" for number in range(shape.num_tables)]


def build(library: str, kind: str, shape: Shape) -> Step:
    """Build a library's model with its tables sharded as ``kind`` says; in bf16 if it ends in `BF16`."""
    bf16, kind = kind.endswith(BF16), kind.removesuffix(BF16)
    if kind == "mlps":
        return _mlps(shape)
    if kind == "dense alone":
        return _dense(library, shape, bf16=bf16)
    builders = {"meshrec": _meshrec, "torchrec": _torchrec, "plain": _plain}
    return builders[library](kind, shape, bf16=bf16)


def plan_tables(kind: str, shape: Shape, num_ranks: int) -> "EmbeddingModuleShardingPlan":
    """Return a plan that shards all tables in the same way."""
    from meshrec import distributed as md
    from meshrec.plan.builders import WorldShape

    builders = {
        "table_wise": lambda number: md.table_wise(rank=number % num_ranks),
        "column_wise": lambda number: md.column_wise(),
        "row_wise": lambda number: md.row_wise(),
        "table_row_wise": lambda number: md.table_row_wise(node=0),
        "grid_shard": lambda number: md.grid_shard(),
        "data_parallel": lambda number: md.data_parallel(),
    }
    size = md.TableSize(shape.num_rows, shape.dim)
    ranks = WorldShape(num_ranks, 1 if kind == "grid_shard" else num_ranks)
    names = [f"t{number}" for number in range(shape.num_tables)]
    return md.EmbeddingModuleShardingPlan(
        {name: builders[kind](number)(name, size, ranks) for number, name in enumerate(names)}
    )


def _meshrec(kind: str, shape: Shape, *, bf16: bool) -> Step:
    from meshrec import distributed as md
    from meshrec.model_parallel import DistributedModelParallel
    from meshrec.models import DLRM
    from meshrec.modules import EmbeddingBagCollection, EmbeddingBagConfig
    from meshrec.optim import RowWiseAdagrad
    from meshrec.sparse import KeyedJaggedTensor

    tables = [
        EmbeddingBagConfig(
            name=f"t{number}",
            embedding_dim=shape.dim,
            num_embeddings=shape.num_rows,
            feature_names=[f"f{number}"],
            init_fn=nn.init.zeros_,
        )
        for number in range(shape.num_tables)
    ]
    collection = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
    torch.manual_seed(0)
    model = DLRM(collection, shape.dense_in, shape.bottom, shape.top)
    plan = plan_tables(kind, shape, dist.get_world_size())
    sharder = md.EmbeddingBagCollectionSharder(RowWiseAdagrad(lr=LR, eps=1e-8))
    dmp = DistributedModelParallel(model, plan=md.ShardingPlan({_PATH: plan}), sharders=[sharder])
    sharded: Any = dmp.module.get_submodule(_PATH)
    for shards in sharded.embedding_bags.values():
        for rectangle, weight in zip(shards.rectangles, shards.shards(), strict=True):
            fill(weight, rectangle.r0)
    dense = [p for name, p in dmp.named_parameters() if _PATH not in name]
    optimizer = torch.optim.Adagrad(dense, lr=LR, fused=True)

    def step(inputs: Inputs) -> Tensor:
        features = KeyedJaggedTensor(keyed(shape), inputs.ids, offsets=inputs.offsets)
        return _train(dmp, optimizer, inputs, features, bf16=bf16)

    return step


def _torchrec(kind: str, shape: Shape, *, bf16: bool) -> Step:
    import warnings

    warnings.simplefilter("ignore")
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
    from torchrec.distributed import DistributedModelParallel
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.sharding_plan import (
        column_wise,
        construct_module_sharding_plan,
        data_parallel,
        table_wise,
    )
    from torchrec.distributed.types import ShardingPlan
    from torchrec.models.dlrm import DLRM

    world = dist.get_world_size()
    builders = {
        # Left to itself it takes the dense kernel on a CPU, and then drops the optimizer.
        "table_wise": lambda number: table_wise(rank=number % world, compute_kernel="fused"),
        "column_wise": lambda number: column_wise(ranks=list(range(world)), compute_kernel="fused"),
        "data_parallel": lambda number: data_parallel(),
    }
    tables = [
        EmbeddingBagConfig(
            name=f"t{number}",
            embedding_dim=shape.dim,
            num_embeddings=shape.num_rows,
            feature_names=[f"f{number}"],
            init_fn=fill,
        )
        for number in range(shape.num_tables)
    ]
    collection = EmbeddingBagCollection(tables=tables, device=torch.device("cpu"))
    torch.manual_seed(0)
    model = DLRM(collection, shape.dense_in, list(shape.bottom), list(shape.top))
    fused = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": LR, "eps": 1e-8}
    sharder = EmbeddingBagCollectionSharder(fused_params=fused)
    plan = construct_module_sharding_plan(
        model.get_submodule(_PATH),
        {f"t{number}": builders[kind](number) for number in range(shape.num_tables)},
        sharder=sharder,
        local_size=world,
        world_size=world,
        device_type="cpu",
    )
    dmp = DistributedModelParallel(
        model, device=torch.device("cpu"), plan=ShardingPlan({_PATH: plan}), sharders=[sharder]
    )
    ordinary = [p for name, p in dmp.named_parameters() if _PATH not in name or kind == "data_parallel"]
    optimizer = torch.optim.Adagrad(ordinary, lr=LR, fused=True)

    def step(inputs: Inputs) -> Tensor:
        features = KeyedJaggedTensor(
            keys=keyed(shape), values=inputs.ids, offsets=inputs.offsets, lengths=inputs.offsets.diff()
        )
        return _train(dmp, optimizer, inputs, features, bf16=bf16)

    return step


class _PlainTables(nn.Module):
    """Plain torch: the model that a user would write without a library."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self._shape = shape
        self.tables = nn.ModuleList(
            nn.EmbeddingBag(shape.num_rows, shape.dim, mode="sum", include_last_offset=True)
            for _ in range(shape.num_tables)
        )
        for each in self.tables:
            fill(each.weight)

    def forward(self, inputs: Inputs) -> Tensor:
        offsets = inputs.offsets[: self._shape.batch + 1]
        ids = inputs.ids.chunk(self._shape.num_tables)
        return torch.stack([each(own, offsets) for each, own in zip(self.tables, ids, strict=True)], dim=1)


class _NoTables(nn.Module):
    """Plain torch: the dense part alone, with the same sizes and no tables."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self._vectors = torch.rand(shape.batch, shape.num_tables, shape.dim).requires_grad_()

    def forward(self, inputs: Inputs) -> Tensor:
        # Tables take a new gradient in every step. No optimizer has these vectors, so none resets theirs.
        self._vectors.grad = None
        return self._vectors


class _PlainModel(nn.Module):
    """The dense part in plain torch, as a user would write it without a library."""

    def __init__(self, shape: Shape, tables: nn.Module) -> None:
        super().__init__()
        self.tables = tables
        num_vectors = shape.num_tables + 1
        rows, columns = torch.triu_indices(num_vectors, num_vectors, 1)
        self._pairs = rows * num_vectors + columns
        torch.manual_seed(0)
        self.bottom = _layers([shape.dense_in, *shape.bottom], nn.ReLU())
        self.top = _layers([shape.dim + len(self._pairs), *shape.top], nn.Identity())

    def forward(self, dense: Tensor, inputs: Inputs) -> Tensor:
        vector = self.bottom(dense)
        vectors = torch.cat([vector[:, None], self.tables(inputs)], 1)
        products = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1)[:, self._pairs]
        return self.top(torch.cat([vector, products], 1))


def _layers(sizes: Sequence[int], last: nn.Module) -> nn.Sequential:
    pairs = list(itertools.pairwise(sizes))
    linears = [nn.Linear(*pair) for pair in pairs]
    return nn.Sequential(*(nn.Sequential(each, nn.ReLU()) for each in linears[:-1]), linears[-1], last)


class _OurDenseModel(nn.Module):
    """The dense part of MeshRec's DLRM, without tables."""

    def __init__(self, shape: Shape, tables: nn.Module) -> None:
        from meshrec.models import DenseArch, InteractionArch, OverArch

        super().__init__()
        self.tables = tables
        self.dense_arch = DenseArch(shape.dense_in, shape.bottom)
        self.inter_arch = InteractionArch(shape.num_tables)
        self.over_arch = OverArch(self.inter_arch.model.out_features(shape.dim), shape.top)

    def forward(self, dense: Tensor, inputs: Inputs) -> Tensor:
        return self.over_arch(self.inter_arch(self.dense_arch(dense), self.tables(inputs)))


def _plain(kind: str, shape: Shape, *, bf16: bool) -> Step:
    model = nn.parallel.DistributedDataParallel(_PlainModel(shape, _PlainTables(shape)))
    optimizer = torch.optim.Adagrad(model.parameters(), lr=LR, fused=True)
    return lambda inputs: _train(model, optimizer, inputs, inputs, bf16=bf16)


def _dense(library: str, shape: Shape, *, bf16: bool) -> Step:
    """Build the dense part without a process group: no sharding can be faster than it."""
    build_model = _OurDenseModel if library == "meshrec" else _PlainModel
    model = build_model(shape, _NoTables(shape))
    optimizer = torch.optim.Adagrad(model.parameters(), lr=LR, fused=True)
    return lambda inputs: _train(model, optimizer, inputs, inputs, bf16=bf16)


def _mlps(shape: Shape) -> Step:
    """Build only the MLPs, with weights and activations in bf16, and without loss and optimizer."""
    model = _PlainModel(shape, nn.Identity()).to(torch.bfloat16)
    vectors = torch.rand(shape.batch, model.top[0][0].in_features, dtype=torch.bfloat16).requires_grad_()

    def step(inputs: Inputs) -> Tensor:
        model.zero_grad()
        vectors.grad = None
        outputs = model.bottom(inputs.dense.bfloat16()), model.top(vectors)
        loss: Tensor = sum(output.float().mean() for output in outputs)
        loss.backward()
        return loss

    return step


def _train(
    model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Inputs, features: Any, *, bf16: bool
) -> Tensor:
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        logits = model(inputs.dense, features).squeeze(-1)
    loss = nn.functional.binary_cross_entropy_with_logits(logits.float(), inputs.labels)
    loss.backward()
    optimizer.step()
    return loss
