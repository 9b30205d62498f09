"""Models whose tables are in files or in memory, under plans of several kinds, and drawn programs that train
them side by side.
"""

import os
import random

import torch

from meshrec import (
    DataType,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    FileRows,
    Hashed,
    KeyedJaggedTensor,
    checkpoint,
)
from meshrec import distributed as md
from meshrec.comms.mesh import default_env
from meshrec.model_parallel import DistributedModelParallel
from meshrec.optim import SGD, Adam, PartialRowWiseLAMB, RowWiseAdagrad
from meshrec.pipeline import TrainPipeline
from meshrec.tables.cached.file import RowFileError
from meshrec.tables.hashed.keys import LFU, LRU, TTL, LowestNorm, MinCount, MinCountSketch, Probability

BUILDERS = {
    "one": (lambda: md.table_wise(rank=0), md.data_parallel, lambda: md.table_wise(rank=0)),
    "rows": (md.row_wise, md.row_wise, md.row_wise),
    "columns": (lambda: md.column_wise(ranks=[0, 1]), lambda: md.table_wise(rank=1), md.column_wise),
    "grid": (md.grid_shard, md.data_parallel, md.row_wise),
}


class Model(torch.nn.Module):
    """One collection on ``meta``; its loss is the sum of the squares of all pooled rows."""

    def __init__(self, configs, folder, cached, data_type):
        super().__init__()
        torch.manual_seed(0)
        storage = None if folder is None else FileRows(path=folder, cache_rows=cached)
        self.ebc = EmbeddingBagCollection(
            [
                EmbeddingBagConfig(
                    name=name, feature_names=[f"f_{name}"], data_type=data_type, storage=storage, **config
                )
                for name, config in configs.items()
            ],
            device="meta",
        )

    def forward(self, features):
        loss = self.ebc(features).values().square().sum()
        return loss, loss.detach()


class FileTables:
    """Three tables, for models that differ in where rows are, in the plan and in the optimizer.

    Args:
        configs: the options of each table by name, for every kind of keys that a test draws.
        draw_ids: called as ``draw_ids(lengths [3, samples], generator)``; returns a batch's IDs.
        specs: the optimizers by name. The first of each mapping is the default.
        longest: the largest number of IDs of a bag.
        cached: the least and the largest number of cached rows that programs draw.
        updates: when tables are updated; programs draw one.
    """

    def __init__(self, configs, draw_ids, specs, *, longest, cached, updates=("in_backward",)):
        self.configs, self.specs = configs, specs
        self.names = list(next(iter(configs.values())))
        self.draw_ids, self._longest, self._cached, self._updates = draw_ids, longest, cached, updates

    def plan_of(self, kind, keys, world_size):
        kind = "one" if world_size == 1 else kind
        builders = dict(zip(self.names, [builder() for builder in BUILDERS[kind]], strict=True))
        ebc = Model(self.configs[keys], None, 1, DataType.FP32).ebc
        made = md.construct_module_sharding_plan(ebc, builders, world_size=world_size, local_size=1)
        return md.ShardingPlan({"ebc": made})

    def make(
        self,
        folder,
        *,
        spec=None,
        kind="one",
        keys=None,
        cached=70,
        data_type=DataType.FP32,
        update="in_backward",
        env=None,
    ):
        """Return a sharded model with its rows in ``folder``; None: in memory."""
        env, keys = env or default_env(), keys or next(iter(self.configs))
        spec = self.specs[spec or next(iter(self.specs))]
        return DistributedModelParallel(
            Model(self.configs[keys], folder, cached, data_type),
            env,
            plan=self.plan_of(kind, keys, env.shard.size),
            sharders=[md.EmbeddingBagCollectionSharder(spec, update=update)],
            init_data_parallel=False,
        )

    def alone(self, folder, **options):
        """Return a model of this process."""
        return self.make(folder, env=md.ShardingEnv.single_process(), **options)

    def batches(self, steps):
        """Yield the batch of this rank for each step."""
        for step in steps:
            generator = torch.Generator().manual_seed(100 * step + default_env().world.rank)
            lengths = torch.randint(0, self._longest + 1, (3, 5), generator=generator)
            ids = self.draw_ids(lengths, generator)
            yield KeyedJaggedTensor([f"f_{name}" for name in self.names], ids, lengths=lengths.view(-1))

    def train(self, model, steps, update="in_backward"):
        for batch in self.batches(steps):
            model(batch)[0].backward()
            if update == "on_step":
                model.fused_optimizer.step()
                model.fused_optimizer.zero_grad()

    def drawn_program(self, folder, number):
        """Trains, evaluates, loads, moves, saves in the background; beside it the same in memory."""
        draw = random.Random(number)
        size = default_env().world.size
        spec, kind, keys = (draw.choice(list(each)) for each in (self.specs, BUILDERS, self.configs))
        data_type = draw.choice([DataType.FP32, DataType.FP32, DataType.BF16, DataType.FP16])
        update = draw.choice(self._updates)
        options = {"spec": spec, "kind": kind, "keys": keys, "data_type": data_type, "update": update}
        side = self.make(f"{folder}/rows", cached=draw.randint(*self._cached) * size, **options)
        plain = self.make(None, **options)
        saved, step = None, 3
        for model in (side, plain):
            self.train(model, range(3), update)
        for turn in range(draw.randint(3, 7)):
            action = draw.choice(["train", "train", "ahead", "evaluate", "save", "load", "move"])
            steps = range(step, step + draw.randint(1, 4))
            step = steps.stop
            if action == "move" and size > 1:
                kind = draw.choice(list(BUILDERS))
            for name, model in (("side", side), ("plain", plain)):
                state = {"model": model, "tables": model.fused_optimizer}
                if action == "ahead":
                    pipeline, feed = TrainPipeline(model, model.fused_optimizer), self.batches(steps)
                    for _ in steps:
                        pipeline.progress(feed)
                elif action == "evaluate":
                    with torch.no_grad():
                        for batch in self.batches(steps):
                            model(batch)
                elif action == "save":
                    pending = checkpoint.async_save(f"{folder}/{name}-{turn}", state)
                    self.train(model, steps, update)
                    pending.wait()
                elif action == "load" and saved is not None:
                    # What one kind of storage saved, the other loads.
                    other = {"side": "plain", "plain": "side"}[name]
                    checkpoint.load(f"{folder}/{other}-{saved}", state)
                elif action == "move" and size > 1:
                    model.reshard(self.plan_of(kind, keys, size))
                self.train(model, steps, update)
            if action == "save":
                saved = turn
        return same(whole(side), whole(plain))


def whole(model):
    """Return all weights and optimizer state, as whole tensors."""
    found = {name: full(value) for name, value in model.state_dict().items()}
    for name, slots in model.fused_optimizer.state_dict()["state"].items():
        found |= {f"{name}.{slot}": full(value) for slot, value in slots.items()}
    return found


def full(value):
    if not isinstance(value, torch.Tensor):
        return torch.as_tensor(value)
    return value.full_tensor() if hasattr(value, "full_tensor") else value.clone()


def same(one, other):
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])] == []


def tables_of(model):
    return [table for shards in model.module.ebc.built.shards.values() for table in shards.tables]


SIZES = {"t0": (400, 8), "t1": (90, 64), "t2": (50, 12)}


def _rows(lengths, generator):
    drawn = [
        (rows * torch.rand(int(own.sum()), generator=generator) ** 2).long()
        for (rows, _), own in zip(SIZES.values(), lengths, strict=True)
    ]
    return torch.cat(drawn)


FIXED = FileTables(
    {"fixed": {name: {"num_embeddings": rows, "embedding_dim": dim} for name, (rows, dim) in SIZES.items()}},
    _rows,
    {
        "rowwise": RowWiseAdagrad(lr=0.1),
        "adam": Adam(lr=0.1),
        "sgd": SGD(lr=0.1),
        "lamb": PartialRowWiseLAMB(lr=0.1),
    },
    longest=3,
    cached=(65, 100),
)

_DIMS = {"t": 8, "u": 64, "v": 12}
_KEYS = {
    "lru": Hashed(max_rows=120, evict=LRU()),
    "all": Hashed(max_rows=2000),
    "count": Hashed(max_rows=150, admit=MinCount(2), evict=LFU(half_life=3)),
    "sketch": Hashed(max_rows=130, admit=MinCountSketch(2, bytes=4000), evict=TTL(steps=4)),
    "norm": Hashed(max_rows=140, admit=Probability(0.6), evict=LowestNorm()),
}


def _raw_ids(lengths, generator):
    drawn = torch.rand(int(lengths.sum()), generator=generator) ** 2
    return (300 * drawn).long() * 7_919_777_777 - 2**40  # 300 IDs in all


HASHED = FileTables(
    {
        kind: {name: {"embedding_dim": dim, "keys": keys} for name, dim in _DIMS.items()}
        for kind, keys in _KEYS.items()
    },
    _raw_ids,
    {"adam": Adam(lr=0.1), "rowwise": RowWiseAdagrad(lr=0.1), "sgd": SGD(lr=0.1)},
    longest=4,
    cached=(50, 90),
    updates=("in_backward", "in_backward", "on_step"),
)
KINDS = {"fixed": FIXED, "hashed": HASHED}


def drawn_program(kind, folder, number):
    return KINDS[kind].drawn_program(folder, number)


def check_drawn_programs(pool, kind, folder, count):
    """Run drawn programs on the ranks of a pool; MESHREC_SEED is the number of the first."""
    first = int(os.environ.get("MESHREC_SEED", "0"))
    for number in range(first, first + count):
        own = folder / str(number)
        own.mkdir()
        found = pool.run(drawn_program, kind, str(own), number)
        assert found == [True] * len(found), number
    assert not list(folder.glob("*/rows/*.log-*"))


def too_small(folder):
    model = FIXED.make(folder, kind="rows", cached=4)
    FIXED.train(model, range(1))


def fails_on_one_rank(folder):
    model = FIXED.make(folder, kind="rows", cached=60)
    FIXED.train(model, range(2))
    if default_env().world.rank == 1:
        for table in tables_of(model):
            table._transfers._error = RowFileError("the disk is gone")
            table._transfers.start_read(None, [])
    found = []
    pipeline, feed = TrainPipeline(model, model.fused_optimizer), FIXED.batches(range(2, 6))
    for _ in range(4):
        try:
            pipeline.progress(feed)
        except RowFileError as error:
            found.append(str(error))
    return found
