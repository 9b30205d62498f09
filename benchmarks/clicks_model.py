"""The model of the benchmarks that train with a pipeline or without: a DLRM with its loss."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

import meshrec
from meshrec import distributed as md
from meshrec.model_parallel import DistributedModelParallel
from meshrec.models.dlrm import DLRM
from meshrec.optim import CombinedOptimizer, KeyedOptimizerWrapper, RowWiseAdagrad
from meshrec.pipeline import TrainPipeline

TABLES = "dlrm.sparse_arch.embedding_bag_collection"


class Clicks(nn.Module):
    """A DLRM with its loss."""

    def __init__(self, tables: meshrec.EmbeddingBagCollection, bottom: list[int], top: list[int]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.dlrm = DLRM(tables, 13, bottom, top)

    def forward(self, batch: tuple[Tensor, meshrec.KeyedJaggedTensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the loss twice, in the form of the pipelines."""
        logits = self.dlrm(*batch[:2]).squeeze(-1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch[2])
        return loss, loss.detach()


class ClicksLoop:
    """A loop that trains `Clicks` step by step, with its tables spread over the ranks whole."""

    def __init__(self, model: Clicks, env: md.ShardingEnv, *, pipelined: bool, strict: bool = False) -> None:
        tables: Any = model.get_submodule(TABLES)
        num_ranks = env.shard.size
        names = [config.name for config in tables.embedding_bag_configs()]
        plan = md.construct_module_sharding_plan(
            tables,
            {name: md.table_wise(rank=number % num_ranks) for number, name in enumerate(names)},
            world_size=num_ranks,
        )
        self.model = DistributedModelParallel(
            model,
            env,
            plan=md.ShardingPlan({TABLES: plan}),
            sharders=[md.EmbeddingBagCollectionSharder(RowWiseAdagrad(lr=0.05))],
        )
        fused = self.model.fused_optimizer
        rest = {name: p for name, p in self.model.named_parameters() if name not in fused.params}
        dense = KeyedOptimizerWrapper(rest, lambda parameters: torch.optim.Adagrad(parameters, lr=0.01))
        self._optimizer = CombinedOptimizer([fused, dense])
        self.pipeline = TrainPipeline(self.model, self._optimizer, strict=strict) if pipelined else None

    def step(self, batches: Iterator[Any]) -> Tensor:
        """Train on the next batch, and return its loss."""
        if self.pipeline is not None:
            output: Tensor = self.pipeline.progress(batches)
            return output
        self._optimizer.zero_grad()
        loss, output = self.model(next(batches))
        loss.backward()
        self._optimizer.step()
        return output
