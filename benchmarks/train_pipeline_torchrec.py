"""TorchRec's TrainPipelineSparseDist on the model, plan and network of the pipeline benchmark.

It chooses streams by device; ``torch.cuda.stream(None)`` does nothing on a CPU, so the pipeline runs there
unchanged. The exchange of the IDs of batch i + 1 starts before the forward pass of batch i, whose end waits
for the sizes. The model must be traceable.
"""

import importlib.util
import itertools
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.dlrm_contenders import fill
from meshrec.comms.mesh import ShardingEnv

PATH = "dlrm.sparse_arch.embedding_bag_collection"


def is_here() -> bool:
    """Return whether TorchRec and FBGEMM are installed."""
    return all(importlib.util.find_spec(name) is not None for name in ("torchrec", "fbgemm_gpu"))


@dataclass
class PeerBatch:
    """One batch of the model; ``features`` is TorchRec's KeyedJaggedTensor."""

    dense: Tensor
    features: Any
    labels: Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> "PeerBatch":
        return self

    def record_stream(self, stream: Any) -> None: ...

    def pin_memory(self) -> "PeerBatch":
        return self


class PeerLoop:
    """TorchRec's pipeline on one rank.

    Args:
        num_tables, width, bottom, top: sizes of the model.
        batches: this rank's batches (dense, keys, ids, lengths, labels), used in rotation.
        env: environment of the simulated network's group.
    """

    def __init__(
        self,
        num_tables: int,
        width: int,
        bottom: Sequence[int],
        top: Sequence[int],
        batches: Sequence[tuple[Tensor, list[str], Tensor, Tensor, Tensor]],
        env: ShardingEnv,
    ) -> None:
        warnings.simplefilter("ignore")
        from fbgemm_gpu.split_embedding_configs import EmbOptimType
        from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
        from torchrec.distributed import DistributedModelParallel
        from torchrec.distributed import ShardingEnv as PeerEnv
        from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
        from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
        from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
        from torchrec.distributed.types import ShardingPlan
        from torchrec.models.dlrm import DLRM
        from torchrec.streamable import Pipelineable

        Pipelineable.register(PeerBatch)  # TorchRec may not be there when the class is made
        device, world = torch.device("cpu"), env.world.size
        tables = [
            EmbeddingBagConfig(
                name=f"t{i}",
                embedding_dim=width,
                num_embeddings=10_000,
                feature_names=[f"f{i}"],
                init_fn=fill,
            )
            for i in range(num_tables)
        ]
        collection = EmbeddingBagCollection(tables=tables, device=device)
        torch.manual_seed(0)
        model = _PeerClicks(DLRM(collection, 13, list(bottom), list(top)))
        fused = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.05, "eps": 1e-8}
        sharder = EmbeddingBagCollectionSharder(fused_params=fused)
        plan = construct_module_sharding_plan(
            model.get_submodule(PATH),
            {f"t{i}": table_wise(rank=i % world, compute_kernel="fused") for i in range(num_tables)},
            sharder=sharder,
            local_size=world,
            world_size=world,
            device_type="cpu",
        )
        self.model = DistributedModelParallel(
            model,
            env=PeerEnv.from_process_group(env.world.group),
            device=device,
            plan=ShardingPlan({PATH: plan}),
            sharders=[sharder],
        )
        ordinary = [p for name, p in self.model.named_parameters() if PATH not in name]
        optimizer = torch.optim.Adagrad(ordinary, lr=0.01)
        self.pipeline = TrainPipelineSparseDist(self.model, optimizer, device)
        self.batches: Iterator[PeerBatch] = itertools.cycle(
            PeerBatch(dense, KeyedJaggedTensor(keys, ids, lengths=lengths), labels)
            for dense, keys, ids, lengths, labels in batches
        )

    def step(self) -> Tensor:
        output: Tensor = self.pipeline.progress(self.batches)
        return output


class _PeerClicks(nn.Module):
    """TorchRec's DLRM with its loss."""

    def __init__(self, dlrm: nn.Module) -> None:
        super().__init__()
        self.dlrm = dlrm

    def forward(self, batch: PeerBatch) -> tuple[Tensor, Tensor]:
        """Return the loss twice, in the form of the pipeline."""
        logits = self.dlrm(batch.dense, batch.features).squeeze(-1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)
        return loss, loss.detach()
