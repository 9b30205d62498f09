"""Hashed tables in files train, are saved, moved and resumed as hashed tables in memory are: to the bit."""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
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
from meshrec.optim import SGD, Adam, RowWiseAdagrad
from meshrec.pipeline import TrainPipeline
from meshrec.tables.hashed_keys import LFU, LRU, TTL, LowestNorm, MinCount, MinCountSketch, Probability

DIMS = {"t": 8, "u": 64, "v": 12}
SPECS = {"rowwise": RowWiseAdagrad(lr=0.1), "adam": Adam(lr=0.1), "sgd": SGD(lr=0.1)}
BUILDERS = {
    "one": (lambda: md.table_wise(rank=0), md.data_parallel, lambda: md.table_wise(rank=0)),
    "rows": (md.row_wise, md.row_wise, md.row_wise),
    "columns": (lambda: md.column_wise(ranks=[0, 1]), lambda: md.table_wise(rank=1), md.column_wise),
    "grid": (md.grid_shard, md.data_parallel, md.row_wise),
}
KEYS = {
    "all": Hashed(max_rows=2000),
    "lru": Hashed(max_rows=120, evict=LRU()),
    "count": Hashed(max_rows=150, admit=MinCount(2), evict=LFU(half_life=3)),
    "sketch": Hashed(max_rows=130, admit=MinCountSketch(2, bytes=4000), evict=TTL(steps=4)),
    "norm": Hashed(max_rows=140, admit=Probability(0.6), evict=LowestNorm()),
}


class Model(torch.nn.Module):
    def __init__(self, folder, cached, data_type, keys):
        super().__init__()
        torch.manual_seed(0)
        self.ebc = EmbeddingBagCollection(
            [
                EmbeddingBagConfig(
                    name=name,
                    embedding_dim=dim,
                    feature_names=[f"f_{name}"],
                    data_type=data_type,
                    keys=KEYS[keys],
                    storage=None if folder is None else FileRows(path=folder, cache_rows=cached),
                )
                for name, dim in DIMS.items()
            ],
            device="meta",
        )

    def forward(self, features):
        loss = self.ebc(features).values().square().sum()
        return loss, loss.detach()


def plan_of(kind, keys, world_size):
    kind = "one" if world_size == 1 else kind
    builders = dict(zip(DIMS, [builder() for builder in BUILDERS[kind]], strict=True))
    ebc = Model(None, 1, DataType.FP32, keys).ebc
    made = md.construct_module_sharding_plan(ebc, builders, world_size=world_size, local_size=1)
    return md.ShardingPlan({"ebc": made})


def make(
    folder,
    spec="adam",
    kind="one",
    keys="lru",
    cached=70,
    data_type=DataType.FP32,
    update="in_backward",
    env=None,
):
    env = env or default_env()
    return DistributedModelParallel(
        Model(folder, cached, data_type, keys),
        env,
        plan=plan_of(kind, keys, env.shard.size),
        sharders=[md.EmbeddingBagCollectionSharder(SPECS[spec], update=update)],
        init_data_parallel=False,
    )


def alone(folder, **options):
    return make(folder, env=md.ShardingEnv.single_process(), **options)


def batches(steps, rank=None):
    rank = default_env().world.rank if rank is None else rank
    for step in steps:
        generator = torch.Generator().manual_seed(100 * step + rank)
        lengths = torch.randint(0, 5, (3, 5), generator=generator)
        drawn = torch.rand(int(lengths.sum()), generator=generator) ** 2
        ids = (300 * drawn).long() * 7_919_777_777 - 2**40  # 300 IDs in all
        yield KeyedJaggedTensor([f"f_{name}" for name in DIMS], ids, lengths=lengths.view(-1))


def train(model, steps, update="in_backward"):
    for batch in batches(steps):
        model(batch)[0].backward()
        if update == "on_step":
            model.fused_optimizer.step()
            model.fused_optimizer.zero_grad()


def full(value):
    if not isinstance(value, torch.Tensor):
        return torch.as_tensor(value)
    return value.full_tensor() if hasattr(value, "full_tensor") else value.clone()


def whole(model):
    found = {name: full(value) for name, value in model.state_dict().items()}
    for name, slots in model.fused_optimizer.state_dict()["state"].items():
        found |= {f"{name}.{slot}": full(value) for slot, value in slots.items()}
    return found


def same(one, other):
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])] == []


def tables_of(model):
    return [table for shards in model.module.ebc.built.shards.values() for table in shards.tables]


def drawn_program(folder, number):
    """Trains, evaluates, loads, moves, saves in the background; beside it the same in memory."""
    draw = random.Random(number)
    size = default_env().world.size
    spec, kind, keys = draw.choice(list(SPECS)), draw.choice(list(BUILDERS)), draw.choice(list(KEYS))
    data_type = draw.choice([DataType.FP32, DataType.FP32, DataType.BF16, DataType.FP16])
    update = draw.choice(["in_backward", "in_backward", "on_step"])
    options = {"spec": spec, "kind": kind, "keys": keys, "data_type": data_type, "update": update}
    side = make(f"{folder}/rows", cached=draw.randint(50, 90) * size, **options)
    plain = make(None, **options)
    saved, step = None, 3
    for model in (side, plain):
        train(model, range(3), update)
    for turn in range(draw.randint(3, 7)):
        action = draw.choice(["train", "train", "ahead", "evaluate", "save", "load", "move"])
        steps = range(step, step + draw.randint(1, 4))
        step = steps.stop
        if action == "move" and size > 1:
            kind = draw.choice(list(BUILDERS))
        for name, model in (("side", side), ("plain", plain)):
            state = {"model": model, "tables": model.fused_optimizer}
            if action == "ahead":
                pipeline, feed = TrainPipeline(model, model.fused_optimizer), batches(steps)
                for _ in steps:
                    pipeline.progress(feed)
            elif action == "evaluate":
                with torch.no_grad():
                    for batch in batches(steps):
                        model(batch)
            elif action == "save":
                pending = checkpoint.async_save(f"{folder}/{name}-{turn}", state)
                train(model, steps, update)
                pending.wait()
            elif action == "load" and saved is not None:
                # What one kind of storage saved, the other loads.
                other = {"side": "plain", "plain": "side"}[name]
                checkpoint.load(f"{folder}/{other}-{saved}", state)
            elif action == "move" and size > 1:
                model.reshard(plan_of(kind, keys, size))
            train(model, steps, update)
        if action == "save":
            saved = turn
    return same(whole(side), whole(plain))


DRAWS = int(os.environ.get("MESHREC_DRAWS", "12"))


@pytest.mark.parametrize("world_size", [1, 2])
def test_drawn_programs_give_the_bits_of_memory(ranks, tmp_path, world_size):
    pool = ranks(world_size)
    for number in range(DRAWS // 2):
        folder = tmp_path / str(number)
        folder.mkdir()
        assert pool.run(drawn_program, str(folder), number) == [True] * world_size, number
    assert not list(tmp_path.glob("*/rows/*.log-*"))


def test_ids_that_nobody_trains_leave_no_rows(tmp_path):
    model = alone(tmp_path)
    train(model, range(3))
    before = whole(model)
    written = [table.file.table.counts.num_written for table in tables_of(model)]
    with torch.no_grad():
        for batch in batches(range(20, 24)):
            model(batch)
    assert same(whole(model), before)
    assert [len(table.file.table._born.keys) for table in tables_of(model)] == [0, 0, 0]
    assert sum(t.file.table.counts.num_written for t in tables_of(model)) - sum(written) < 100


def test_a_snapshot_stays_while_rows_go_and_slots_get_others(tmp_path):
    model = alone(tmp_path, cached=60)
    train(model, range(6))
    before = whole(model)
    table = tables_of(model)[0]
    snapshot = table.snapshot()
    train(model, range(6, 20))
    assert table.report.evicted > 0
    rows = [block.parts["weight"].clone() for block in snapshot.stream()]
    snapshot.close()
    assert torch.equal(torch.cat(rows), before["ebc.embedding_bags.t.weight"])
    assert not list(Path(tmp_path).glob("*.log-*"))


def test_an_unsharded_module_is_refused_outside_of_meta(tmp_path):
    with pytest.raises(ValueError, match=r"table 't' has storage=FileRows.*device='meta' and shard it"):
        EmbeddingBagCollection(
            [
                EmbeddingBagConfig(
                    name="t",
                    embedding_dim=8,
                    feature_names=["f"],
                    keys=Hashed(max_rows=10),
                    storage=FileRows(path=tmp_path, cache_rows=4),
                )
            ]
        )


def test_runs_that_are_killed_end_as_if_they_had_not_been(tmp_path):
    program = Path(__file__).with_name("killed_file_rows.py")
    kills = os.environ.get("MESHREC_KILLS", "3")
    found = subprocess.run(
        [sys.executable, str(program), str(tmp_path), kills, "2", "test_file_hashed"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr[-2000:]
    assert f"{kills} kills" in found.stdout
