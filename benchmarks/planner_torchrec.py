"""TorchRec's planner on a set of tables, run by TorchRec's interpreter.

It returns the plan as rectangles, and the cost of that plan and of another one under TorchRec's model. Reads
one JSON object from standard input (see `Question`), writes one to standard output (see `Answer`).
"""

import copy
import json
import logging
import sys
import warnings
from typing import Any, TypedDict

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)

import torch  # noqa: E402
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig  # noqa: E402
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder  # noqa: E402
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology  # noqa: E402
from torchrec.distributed.planner.storage_reservations import (  # noqa: E402
    FixedPercentageStorageReservation,
)
from torchrec.distributed.planner.types import ParameterConstraints, Shard, ShardingOption  # noqa: E402

KERNELS = ("fused", "dense")
"""Compute kernels that keep a table in device memory; our plans use no others."""


class Sharded(TypedDict):
    """One table of a plan. A shard is its first row and column, its numbers of rows and columns, and its
    rank.
    """

    sharding_type: str
    shards: list[list[int]]


class Question(TypedDict):
    """The planning problem.

    `tables` have name, num_embeddings, embedding_dim and pooling_factors. Each rank has `batch_size` samples
    and `memory` bytes, of which the share `reserve` is not for tables.
    """

    tables: list[dict[str, Any]]
    world_size: int
    local_world_size: int
    batch_size: int
    memory: int
    reserve: float
    seconds: int
    other: dict[str, Sharded]


class Answer(TypedDict):
    """TorchRec's plan, and the cost of it and of the other plan under TorchRec's model; None if it cannot
    tell.
    """

    plan: dict[str, Sharded]
    own: float
    other: float | None


def main() -> None:
    question: Question = json.load(sys.stdin)
    tables, constraints = [], {}
    for table in question["tables"]:
        name = table["name"]
        tables.append(
            EmbeddingBagConfig(
                name=name,
                embedding_dim=max(4, table["embedding_dim"]),
                num_embeddings=table["num_embeddings"],
                feature_names=[f"{name}_f{j}" for j in range(len(table["pooling_factors"]))],
            )
        )
        constraints[name] = ParameterConstraints(
            pooling_factors=table["pooling_factors"], compute_kernels=list(KERNELS)
        )
    module = EmbeddingBagCollection(device=torch.device("meta"), tables=tables)
    planner = EmbeddingShardingPlanner(
        topology=Topology(
            world_size=question["world_size"],
            compute_device="cuda",
            local_world_size=question["local_world_size"],
            hbm_cap=question["memory"],
        ),
        constraints=constraints,
        batch_size=question["batch_size"],
        storage_reservation=FixedPercentageStorageReservation(question["reserve"]),
        timeout_seconds=question["seconds"],
    )
    sharders = [EmbeddingBagCollectionSharder()]
    planner.plan(module, sharders)
    plan: dict[str, Sharded] = {
        option.name: {
            "sharding_type": option.sharding_type,
            "shards": [[*shard.offset, *shard.size, shard.rank] for shard in option.shards],
        }
        for option in planner._best_plan
    }
    answer: Answer = {
        "plan": plan,
        "own": planner._perf_model.rate(planner._best_plan),
        "other": _rated(planner, planner._enumerator.enumerate(module, sharders), question["other"]),
    }
    print(json.dumps(answer))


def _rated(
    planner: EmbeddingShardingPlanner, known: list[ShardingOption], plan: dict[str, Sharded]
) -> float | None:
    """Return the cost of a plan under TorchRec's model: its own options with that plan's rectangles in
    them.
    """
    options = {(option.name, option.sharding_type): option for option in known}
    chosen = []
    for name, one in plan.items():
        if (name, one["sharding_type"]) not in options:
            return None
        option = copy.deepcopy(options[name, one["sharding_type"]])
        if one["shards"]:  # else on every rank, as TorchRec has it
            option.shards = [
                Shard(size=[rows, columns], offset=[row, column])
                for row, column, rows, columns, _ in one["shards"]
            ]
        ranks = [shard[-1] for shard in one["shards"]] or range(len(option.shards))
        for shard, rank in zip(option.shards, ranks, strict=True):
            shard.rank = rank
        chosen.append(option)
    planner._enumerator.populate_estimates(chosen)
    return float(planner._perf_model.rate(chosen))


if __name__ == "__main__":
    main()
