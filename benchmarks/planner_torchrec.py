"""Plans a task file with TorchRec's planner and prints the plan as rectangles (run by TorchRec's
interpreter).

Usage: python planner_torchrec.py TASK.json WORLD_SIZE
"""

import json
import logging
import sys
import time
import warnings

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)

import torch  # noqa: E402
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig  # noqa: E402
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder  # noqa: E402
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology  # noqa: E402
from torchrec.distributed.planner.storage_reservations import (  # noqa: E402
    FixedPercentageStorageReservation,
)
from torchrec.distributed.planner.types import ParameterConstraints  # noqa: E402


def main() -> None:
    path, world_size = sys.argv[1], int(sys.argv[2])
    with open(path) as file:
        task = json.load(file)
    tables, constraints = [], {}
    for table in task["tables"]:
        name = table["name"]
        tables.append(
            EmbeddingBagConfig(
                name=name,
                embedding_dim=max(4, table["embedding_dim"]),
                num_embeddings=table["num_embeddings"],
                feature_names=[f"{name}_f{j}" for j in range(len(table["pooling_factors"]))],
            )
        )
        constraints[name] = ParameterConstraints(pooling_factors=table["pooling_factors"])
    module = EmbeddingBagCollection(device=torch.device("meta"), tables=tables)
    planner = EmbeddingShardingPlanner(
        topology=Topology(
            world_size=world_size,
            compute_device="cuda",
            local_world_size=min(8, world_size),
            hbm_cap=80 * 1024**3,
        ),
        constraints=constraints,
        batch_size=task["global_batch_size"] // world_size,
        storage_reservation=FixedPercentageStorageReservation(0.15),
    )
    started = time.perf_counter()
    planner.plan(module, [EmbeddingBagCollectionSharder()])
    seconds = time.perf_counter() - started
    plan = {}
    for option in planner._best_plan:
        plan[option.name] = {
            "sharding_type": option.sharding_type,
            "shards": [[*shard.offset, *shard.size, shard.rank] for shard in option.shards],
        }
    print(json.dumps({"seconds": seconds, "plan": plan}))


if __name__ == "__main__":
    main()
