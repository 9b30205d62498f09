"""The model, plans and batches of the checkpoint tests; ranks import it by its file."""

import random

import torch
from torch import nn

from meshrec import EmbeddingBagCollection, EmbeddingBagConfig, Hashed, KeyedJaggedTensor
from meshrec import distributed as md
from meshrec.comms.collectives import gather_objects
from meshrec.comms.mesh import default_env
from meshrec.model_parallel import DistributedModelParallel
from meshrec.optim import Adam, RowWiseAdagrad
from meshrec.tables import LRU, MinCount

SIZES = {"t0": (16, 8), "t1": (9, 4), "t2": (12, 6)}
SPECS = {"rowwise": RowWiseAdagrad(lr=0.1), "adam": Adam(lr=0.01)}
KINDS = ["tw", "rw", "cw", "twrw", "twcw", "grid", "dp", "mix"]
GLOBAL_BATCH = 4
HASHED = Hashed(max_rows=24, admit=MinCount(2), evict=LRU())
"""The keys of the table ``h``, which models have if they are asked to."""


class Model(nn.Module):
    def __init__(self, device=None, *, hashed=False):
        super().__init__()
        torch.manual_seed(0)
        tables = [
            EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=dim, feature_names=[f"f{name}"])
            for name, (rows, dim) in SIZES.items()
        ]
        if hashed:
            tables.append(EmbeddingBagConfig(name="h", embedding_dim=8, feature_names=["fh"], keys=HASHED))
        self.ebc = EmbeddingBagCollection(tables=tables, device=device)
        self.over = nn.Linear(18 + 8 * hashed, 1, device=device)

    def forward(self, features):
        return self.over(self.ebc(features).values())


def builder(kind, number, world_size):
    rng = random.Random(f"{kind}{number}{world_size}")
    num_nodes = 2 if world_size == 4 else 1
    if kind == "mix":
        kind = rng.choice(KINDS[:-1])
    return {
        "tw": lambda: md.table_wise(rank=number % world_size),
        "rw": md.row_wise,
        "cw": md.column_wise,
        "twrw": lambda: md.table_row_wise(node=number % num_nodes),
        "twcw": lambda: md.table_column_wise(node=number % num_nodes),
        "grid": md.grid_shard,
        "dp": md.data_parallel,
    }[kind]()


def make_plan(kind, *, hashed=False):
    world_size = default_env().shard.size
    names = [*SIZES, *(["h"] if hashed else [])]
    builders = {name: builder(kind, number, world_size) for number, name in enumerate(names)}
    module_plan = md.construct_module_sharding_plan(
        Model("meta", hashed=hashed).ebc,
        builders,
        world_size=world_size,
        local_size=2 if world_size == 4 else None,
    )
    return md.ShardingPlan({"ebc": module_plan})


def make(kind="rw", optimizer="rowwise", *, dense="ddp", plan=None, hashed=False):
    """A model, and the optimizer of its dense part."""
    sharders = [md.EmbeddingBagCollectionSharder(SPECS[optimizer])]
    model = DistributedModelParallel(
        Model(hashed=hashed), plan=plan or make_plan(kind, hashed=hashed), sharders=sharders, dense=dense
    )
    dense_parameters = [p for name, p in model.named_parameters() if name.startswith("over")]
    return model, torch.optim.Adam(dense_parameters, lr=0.01)


def batch(step, *, hashed=False):
    """This rank's part of the batch of a step: the same samples on any number of ranks."""
    axis = default_env().world
    generator = torch.Generator().manual_seed(step)
    lengths = torch.randint(0, 4, (len(SIZES), GLOBAL_BATCH), generator=generator)
    values, own_lengths = [], []
    share = GLOBAL_BATCH // axis.size
    for (rows, _), of_table in zip(SIZES.values(), lengths, strict=True):
        ids = torch.randint(0, rows, (int(of_table.sum()),), generator=generator).split(of_table.tolist())
        mine = slice(axis.rank * share, (axis.rank + 1) * share)
        values += ids[mine]
        own_lengths.append(of_table[mine])
    if hashed:  # IDs that come and go
        ids = torch.randint(step, step + 30, (GLOBAL_BATCH, 3), generator=generator) * 0x9E3779B97F4A7C15
        values.append(ids[axis.rank * share : (axis.rank + 1) * share].flatten())
        own_lengths.append(torch.full((share,), 3))
    keys = [f"f{name}" for name in SIZES] + ["fh"] * hashed
    return KeyedJaggedTensor(keys, torch.cat(values), lengths=torch.cat(own_lengths))


def train(model, optimizer, steps, *, hashed=False):
    for step in steps:
        optimizer.zero_grad()
        model(batch(step, hashed=hashed)).square().mean().backward()
        optimizer.step()


def state_of(model, optimizer):
    return {"model": model, "dense": optimizer, "tables": model.fused_optimizer}


def whole_state(model, optimizer):
    """Every value of model and optimizers, whole, by name; collective."""
    found = dict(model.state_dict())
    for prefix, each in (("tables", model.fused_optimizer), ("dense", optimizer)):
        for name, slots in each.state_dict()["state"].items():
            found |= {f"{prefix}.{name}.{slot}": value for slot, value in slots.items()}
    return whole(found)


def whole(values):
    """Plain tensors, also of DTensors that know their rectangles; collective, and one exchange for all."""
    parts = {}
    for name, value in values.items():
        local = getattr(value, "_local_tensor", None)
        if hasattr(local, "local_shards"):
            parts[name] = list(zip(map(tuple, local.local_offsets()), local.local_shards(), strict=False))
    found = {}
    for name, value in values.items():
        if name in parts:
            found[name] = torch.full(value.shape, float("nan"))
        else:
            value = value.full_tensor() if hasattr(value, "full_tensor") else value
            found[name] = value.detach().clone() if isinstance(value, torch.Tensor) else value
    for of_rank in gather_objects(parts, default_env().world, "test"):
        for name, shards in of_rank.items():
            for offset, shard in shards:
                region = found[name]
                for dim, begin in enumerate(offset):
                    region = region.narrow(dim, begin, shard.shape[dim])
                region.copy_(shard)
    return found


def differences(actual, expected):
    """The names that differ in some bit."""
    assert actual.keys() == expected.keys()
    return [name for name in actual if not torch.equal(*map(torch.as_tensor, (actual[name], expected[name])))]
