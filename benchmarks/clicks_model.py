"""A DLRM with its loss, of equal sizes in MeshRec and in TorchRec, and the loops that train it: plain ones,
and each library's pipeline.

TorchRec's pipeline chooses streams by device; ``torch.cuda.stream(None)`` does nothing on a CPU, so the
pipeline runs there unchanged.
"""

import importlib.util
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import meshrec
from benchmarks.harness import configs
from meshrec import distributed as md
from meshrec.model_parallel import DistributedModelParallel
from meshrec.models.dlrm import DLRM
from meshrec.optim import CombinedOptimizer, KeyedOptimizerWrapper, RowWiseAdagrad
from meshrec.pipeline import TrainPipeline

TABLES = "dlrm.sparse_arch.embedding_bag_collection"
# With ten times this rate, the first step of Adagrad amplifies rounding, and losses cannot be compared.
LR, EPS = 0.002, 1e-8
HAS_TORCHREC = all(importlib.util.find_spec(name) is not None for name in ("torchrec", "fbgemm_gpu"))


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of the model and its batches: ``batch`` samples on each rank, ``bag`` IDs per sample and table,
    or a random number with this mean if ``is_ragged``.
    """

    num_tables: int = 26
    num_rows: int = 100_000
    dim: int = 64
    batch: int = 1024
    bag: int = 4
    is_ragged: bool = False
    dense_in: int = 13
    bottom: tuple[int, ...] = (512, 256, 64)
    top: tuple[int, ...] = (512, 512, 256, 1)


class Batch(NamedTuple):
    """One batch of one rank."""

    dense: Tensor
    features: meshrec.KeyedJaggedTensor
    labels: Tensor


def make_batches(shape: Shape, rank: int, count: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(rank)
    names, size = [f"f{t}" for t in range(shape.num_tables)], (shape.num_tables * shape.batch,)
    batches = []
    for _ in range(count):
        lengths = torch.full(size, shape.bag)
        if shape.is_ragged:
            lengths = torch.randint(0, 2 * shape.bag, size, generator=generator)
        ids = torch.randint(0, shape.num_rows, (int(lengths.sum()),), generator=generator)
        dense = torch.rand(shape.batch, shape.dense_in, generator=generator)
        labels = torch.rand(shape.batch, generator=generator).round()
        batches.append(Batch(dense, meshrec.KeyedJaggedTensor(names, ids, lengths=lengths), labels))
    return batches


@torch.no_grad()
def fill(weight: Tensor) -> Tensor:
    """Fill a table with values that depend only on the row. TorchRec gives the part of a rank without rows as
    a vector.
    """
    values = 0.01 * torch.arange(weight.shape[0]).sin()
    return weight.copy_(values[:, None] if weight.dim() == 2 else values)


class Clicks(nn.Module):
    """A DLRM with its loss."""

    def __init__(self, dlrm: nn.Module, *, bf16: bool = False) -> None:
        super().__init__()
        self.dlrm, self._bf16 = dlrm, bf16

    def forward(self, batch: Any) -> tuple[Tensor, Tensor]:
        """Return the loss twice, in the form of the pipelines."""
        with torch.autocast("cpu", torch.bfloat16, enabled=self._bf16):
            logits = self.dlrm(batch.dense, batch.features).squeeze(-1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits.float(), batch.labels)
        return loss, loss.detach()


class Loop:
    """A loop that trains `Clicks` step by step. ``pipeline`` has its steps, if there is one."""

    model: nn.Module
    optimizer: Any
    pipeline: Any = None

    def step(self, batches: Iterator[Any]) -> Tensor:
        """Train on the next batch, and return its loss."""
        if self.pipeline is not None:
            output: Tensor = self.pipeline.progress(batches)
            return output
        self.optimizer.zero_grad()
        loss, output = self.model(next(batches))
        loss.backward()
        self.optimizer.step()
        return output


class ClicksLoop(Loop):
    """MeshRec's loop, with its tables spread over the ranks whole."""

    def __init__(
        self,
        shape: Shape,
        env: md.ShardingEnv,
        *,
        pipelined: bool,
        strict: bool = False,
        bf16: bool = False,
        dense_options: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        tables = configs(shape.num_tables, shape.num_rows, shape.dim, **options)
        collection = meshrec.EmbeddingBagCollection(tables, device="meta")
        torch.manual_seed(0)
        model = Clicks(DLRM(collection, shape.dense_in, shape.bottom, shape.top), bf16=bf16)
        num_ranks = env.shard.size
        placed = {config.name: md.table_wise(rank=t % num_ranks) for t, config in enumerate(tables)}
        plan = md.construct_module_sharding_plan(collection, placed, world_size=num_ranks)
        self.model = DistributedModelParallel(
            model,
            env,
            plan=md.ShardingPlan({TABLES: plan}),
            sharders=[md.EmbeddingBagCollectionSharder(RowWiseAdagrad(lr=LR, eps=EPS))],
            dense_options=dense_options,
        )
        fused = self.model.fused_optimizer
        rest = {name: p for name, p in self.model.named_parameters() if name not in fused.params}
        dense = KeyedOptimizerWrapper(
            rest, lambda parameters: torch.optim.Adagrad(parameters, LR, fused=True)
        )
        self.optimizer = CombinedOptimizer([fused, dense])
        if pipelined:
            self.pipeline = TrainPipeline(self.model, self.optimizer, strict=strict)


@dataclass
class TorchRecBatch:
    """One batch of TorchRec's model; ``features`` is TorchRec's KeyedJaggedTensor."""

    dense: Tensor
    features: Any
    labels: Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> "TorchRecBatch":
        return self

    def record_stream(self, stream: Any) -> None: ...

    def pin_memory(self) -> "TorchRecBatch":
        return self


def torchrec_batch(batch: Batch) -> TorchRecBatch:
    from torchrec import KeyedJaggedTensor

    ids = batch.features
    features = KeyedJaggedTensor(list(ids.keys()), ids.values(), lengths=ids.lengths(), offsets=ids.offsets())
    return TorchRecBatch(batch.dense, features, batch.labels)


class TorchRecLoop(Loop):
    """TorchRec's loop on the same model and plan."""

    def __init__(self, shape: Shape, env: md.ShardingEnv, *, pipelined: bool, bf16: bool = False) -> None:
        warnings.simplefilter("ignore")
        from fbgemm_gpu.split_embedding_configs import EmbOptimType
        from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
        from torchrec.distributed import DistributedModelParallel, ShardingEnv
        from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
        from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
        from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
        from torchrec.distributed.types import ShardingPlan
        from torchrec.models.dlrm import DLRM
        from torchrec.streamable import Pipelineable

        Pipelineable.register(TorchRecBatch)  # TorchRec may not be there when the class is made
        device, world = torch.device("cpu"), env.world.size
        tables = [
            EmbeddingBagConfig(
                name=f"t{t}",
                embedding_dim=shape.dim,
                num_embeddings=shape.num_rows,
                feature_names=[f"f{t}"],
                init_fn=fill,
            )
            for t in range(shape.num_tables)
        ]
        collection = EmbeddingBagCollection(tables=tables, device=device)
        torch.manual_seed(0)
        model = Clicks(DLRM(collection, shape.dense_in, list(shape.bottom), list(shape.top)), bf16=bf16)
        fused = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": LR, "eps": EPS}
        sharder = EmbeddingBagCollectionSharder(fused_params=fused)
        plan = construct_module_sharding_plan(
            collection,
            # Left to itself it takes the dense kernel on a CPU, and then drops the optimizer.
            {f"t{t}": table_wise(rank=t % world, compute_kernel="fused") for t in range(shape.num_tables)},
            sharder=sharder,
            local_size=world,
            world_size=world,
            device_type="cpu",
        )
        self.model = DistributedModelParallel(
            model,
            env=ShardingEnv.from_process_group(env.world.group),
            device=device,
            plan=ShardingPlan({TABLES: plan}),
            sharders=[sharder],
        )
        ordinary = [p for name, p in self.model.named_parameters() if TABLES not in name]
        self.optimizer = torch.optim.Adagrad(ordinary, lr=LR, fused=True)
        if pipelined:
            self.pipeline = TrainPipelineSparseDist(self.model, self.optimizer, device)
