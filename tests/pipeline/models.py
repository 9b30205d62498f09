"""Models, plans and batches for the tests of the pipeline."""

from dataclasses import dataclass

import torch
from torch import nn

from meshrec import distributed as md
from meshrec.comms.mesh import default_env
from meshrec.model_parallel import DistributedModelParallel
from meshrec.modules import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    PoolingType,
)
from meshrec.optim import (
    CombinedOptimizer,
    GradientClipping,
    GradientClippingOptimizer,
    KeyedOptimizerWrapper,
)
from meshrec.sparse import KeyedJaggedTensor

TABLES = [
    ("t0", 10, 8, ["a", "b"], "SUM"),
    ("t1", 7, 5, ["b"], "MEAN"),
    ("t2", 30, 4, ["c"], "SUM"),
    ("t3", 1, 6, ["a"], "MEAN"),
]
BATCH_SIZES = [3, 4, 0, 5]
MIXED = ("row_wise", "grid", "data_parallel", "table_wise")


@dataclass
class Batch:
    dense: torch.Tensor
    parts: tuple[KeyedJaggedTensor, int]

    def to(self, device, non_blocking=False):
        return Batch(self.dense.to(device), (self.parts[0].to(device), self.parts[1]))


class Model(nn.Module):
    """``extra``: what the forward pass does besides: nothing, or one of the things below."""

    def __init__(self, sequence=False, extra=None):
        torch.manual_seed(11)
        super().__init__()
        if sequence:
            tables = [
                EmbeddingConfig(name=name, num_embeddings=rows, embedding_dim=dim, feature_names=features)
                for name, rows, dim, features, _ in TABLES
            ]
            self.collection = EmbeddingCollection(tables=tables)
        else:
            tables = [
                EmbeddingBagConfig(
                    name=name,
                    num_embeddings=rows,
                    embedding_dim=dim,
                    feature_names=features,
                    pooling=PoolingType[pooling],
                )
                for name, rows, dim, features, pooling in TABLES
            ]
            self.collection = EmbeddingBagCollection(tables=tables)
        self.sequence, self.extra = sequence, extra
        self.over = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))

    def forward(self, batch):
        features, number = batch.parts
        if self.extra == "postprocessed":
            features = KeyedJaggedTensor(
                features.keys(), features.values().clone(), lengths=features.lengths()
            )
        gate = self.over(batch.dense).mean()
        outputs = [self.look_up(features)]
        if self.extra == "twice" or (self.extra == "branch" and number % 3 == 1):
            outputs.append(self.look_up(features))
        if self.extra == "branch" and number % 5 == 2:
            other = KeyedJaggedTensor(features.keys(), features.values(), lengths=features.lengths())
            outputs = [self.look_up(other)]
        output = torch.stack([each.square().sum() for each in outputs]).sum() * gate.sigmoid()
        return output, output.detach().clone()

    def look_up(self, features):
        found = self.collection(features)
        if self.sequence:
            return torch.cat([jagged.values().reshape(-1) for jagged in found.values()])
        return found.values()


def make_batch(number, rank):
    generator = torch.Generator().manual_seed(1000 * number + rank)
    keys, size = ["c", "unused", "a", "b"], BATCH_SIZES[rank]
    lengths = torch.randint(0, 4, (len(keys), size), generator=generator)
    rows = {"c": 30, "unused": 1000, "a": 1, "b": 7}
    ids = [
        torch.randint(0, rows[key], (int(n.sum()),), generator=generator)
        for key, n in zip(keys, lengths, strict=True)
    ]
    features = KeyedJaggedTensor(keys, torch.cat(ids), lengths=lengths.view(-1))
    return Batch(torch.rand(4, 3, generator=generator), (features, number))


def make_batches(count, rank=None):
    rank = default_env().world.rank if rank is None else rank
    return [make_batch(number, rank) for number in range(count)]


def builder(kind, number, env):
    ranks, nodes = env.shard.size, env.shard.size // env.local_size
    return {
        "table_wise": md.table_wise(rank=number % ranks),
        "column_wise": md.column_wise(),
        "row_wise": md.row_wise(),
        "table_row_wise": md.table_row_wise(node=number % nodes),
        "table_column_wise": md.table_column_wise(node=number % nodes),
        "grid": md.grid_shard(),
        "data_parallel": md.data_parallel(),
    }[kind]


def sharded(
    kinds=MIXED, spec=None, *, sequence=False, update=None, extra=None, env=None, dense="ddp", clip=None
):
    """The model and its optimizer; tables without a spec, and the dense part, have SGD with momentum."""
    env = default_env() if env is None else env
    model = Model(sequence, extra)
    builders = {
        name: builder(kind, i, env) for i, ((name, *_), kind) in enumerate(zip(TABLES, kinds, strict=True))
    }
    plan = md.construct_module_sharding_plan(
        model.collection, builders, world_size=env.shard.size, local_size=env.local_size
    )
    kind = md.EmbeddingCollectionSharder if sequence else md.EmbeddingBagCollectionSharder
    parallel = DistributedModelParallel(
        model,
        env,
        plan=md.ShardingPlan({"collection": plan}),
        sharders=[kind(spec, update=update)],
        dense=dense,
    )
    fused = parallel.fused_optimizer
    own = {name: p for name, p in parallel.named_parameters() if name not in fused.params}
    rest = KeyedOptimizerWrapper(own, lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.5))
    optimizer = CombinedOptimizer([fused, rest])
    if clip is not None:
        optimizer = GradientClippingOptimizer(optimizer, GradientClipping.NORM, clip)
    return parallel, optimizer


def plain_loop(model, optimizer, batches, accumulate=1):
    outputs = []
    for number, batch in enumerate(batches):
        if number % accumulate == 0:
            optimizer.zero_grad()
        steps = number % accumulate == accumulate - 1 or number == len(batches) - 1
        wrapped = model._dmp_wrapped_module
        if isinstance(wrapped, nn.parallel.DistributedDataParallel):
            wrapped.require_backward_grad_sync = steps
        losses, output = model(batch)
        losses.sum().backward()
        if steps:
            optimizer.step()
        outputs.append(output)
    return outputs


def state_of(model, optimizer):
    """Everything that training changes on this rank."""
    found = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for name, parameter in optimizer.params.items():
        for slot, value in optimizer.state.get(parameter, {}).items():
            found[f"{name} {slot}"] = torch.as_tensor(local(value))
    return {name: local(value).clone() for name, value in found.items()}


def local(value):
    if hasattr(value, "to_local"):
        value = value.to_local()
    if hasattr(value, "local_shards"):
        shards = value.local_shards()
        value = torch.cat([shard.reshape(-1) for shard in shards]) if shards else torch.empty(0)
    return value


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    different = [name for name in found if not torch.equal(found[name], expected[name])]
    assert different == []
