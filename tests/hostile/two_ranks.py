"""What ranks do with a checkpoint whose manifest is replaced."""

import torch
import torch.distributed as dist

from meshrec import EmbeddingBagCollection, EmbeddingBagConfig
from meshrec import distributed as md
from meshrec.checkpoint import load, save
from meshrec.checkpoint.manifest import MANIFEST
from meshrec.comms.mesh import default_env
from meshrec.model_parallel import DistributedModelParallel


def sharded():
    config = EmbeddingBagConfig(name="t", num_embeddings=7, embedding_dim=4, feature_names=["f"])
    tables = EmbeddingBagCollection(tables=[config])
    world_size = default_env().shard.size
    plan = md.construct_module_sharding_plan(tables, {"t": md.row_wise()}, world_size=world_size)
    model = DistributedModelParallel(
        torch.nn.ModuleDict({"tables": tables, "dense": torch.nn.Linear(3, 2)}),
        plan=md.ShardingPlan({"tables": plan}),
        sharders=[md.EmbeddingBagCollectionSharder()],
        dense=None,
    )
    return {"model": model, "plain": [torch.arange(4), "text"]}


def save_sharded(folder):
    save(folder, sharded())


def load_each(folder, contents):
    """Load the checkpoint with each manifest in turn; give the kind and the text of each error, or None."""
    sound, told = (folder / MANIFEST).read_bytes(), []
    for content in (*contents, sound):
        if dist.get_rank() == 0:
            (folder / MANIFEST).write_bytes(content)
        dist.barrier()
        try:
            load(folder, sharded())
        except Exception as error:  # whatever it is: the ranks' are compared
            told.append((type(error).__name__, str(error)))
        else:
            told.append(None)
        dist.barrier()
    assert told.pop() is None  # the ranks are still in step
    return told
