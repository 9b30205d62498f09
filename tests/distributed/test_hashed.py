"""Hashed tables under every plan equal a fixed table with the same first rows, and keep the same IDs."""

import dataclasses
import os

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from meshrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    Hashed,
    KeyedJaggedTensor,
    checkpoint,
)
from meshrec import distributed as md
from meshrec.comms.mesh import default_env
from meshrec.model_parallel import DistributedModelParallel
from meshrec.modules.table_lookup import storage_of
from meshrec.optim import Adam, OptimizerSpec, RowWiseAdagrad
from meshrec.pipeline import TrainPipeline
from meshrec.tables.hashed.keys import (
    LFU,
    LRU,
    TTL,
    LowestNorm,
    MinCount,
    MinCountSketch,
    Probability,
    bucket_of,
    first_keys,
    key_at,
)

IDS = torch.tensor([-1, 0, 2**63 - 1, -(2**63), 5, 6, 7, 8, 9, 10, 123456789, -77, -5, 2**62, 3, 4])
BUILDERS = {
    "rows": (md.row_wise, md.row_wise),
    "columns": (lambda: md.column_wise(ranks=[0, 1]), lambda: md.table_wise(rank=1)),
    "grid": (md.grid_shard, md.data_parallel),
    "one": (lambda: md.table_wise(rank=0), md.row_wise),
    "everywhere": (md.data_parallel, md.data_parallel),
}


def plan_of(kind, module):
    builders = dict(zip("tu", [builder() for builder in BUILDERS[kind]], strict=True))
    size = default_env().shard.size
    return md.ShardingPlan(
        {"ebc": md.construct_module_sharding_plan(module, builders, world_size=size, local_size=1)}
    )


def unsharded(keys, sequence=False):
    """``keys``: None for the fixed twin, whose rows are the first ones of ``IDS``."""
    config = EmbeddingConfig if sequence else EmbeddingBagConfig
    twin = config(name="t", embedding_dim=8, feature_names=["a", "b"], keys=keys or Hashed(max_rows=16))
    fixed = config(name="t", embedding_dim=8, feature_names=["a", "b"], num_embeddings=16)
    other = config(name="u", embedding_dim=4, feature_names=["c"], num_embeddings=30)
    made = (EmbeddingCollection if sequence else EmbeddingBagCollection)([twin if keys else fixed, other])
    weights = dict(made.named_parameters())
    prefix = "embeddings" if sequence else "embedding_bags"
    with torch.no_grad():
        weights[f"{prefix}.u.weight"].copy_(torch.arange(120.0).view(30, 4) / 100)
        if keys is None:
            weights[f"{prefix}.t.weight"].copy_(storage_of(twin).initial.values(IDS))
    return made


class Model(torch.nn.Module):
    def __init__(self, tables):
        super().__init__()
        self.ebc = tables

    def forward(self, features):
        values = self.ebc(features).values()
        is_tensor = isinstance(values, torch.Tensor)
        flat = values if is_tensor else torch.cat([each.values().flatten() for each in values])
        return flat.square().sum(), flat.detach()


def make(kind, keys, spec, update="in_backward", sequence=False):
    tables = unsharded(keys, sequence)
    sharder = md.EmbeddingCollectionSharder if sequence else md.EmbeddingBagCollectionSharder
    return DistributedModelParallel(
        Model(tables),
        default_env(),
        plan=plan_of(kind, tables),
        sharders=[sharder(spec, update=update)],
        init_data_parallel=False,
    )


def batch(step, *, hashed=True, rank=None):
    """Bags have one ID at most: the parts of larger ones would be added in another order."""
    rank = default_env().world.rank if rank is None else rank
    generator = torch.Generator().manual_seed(10 * step + rank)
    lengths = torch.randint(0, 2, (18,), generator=generator)
    rows = torch.randint(0, 16, (int(lengths[:12].sum()),), generator=generator)
    others = torch.randint(0, 30, (int(lengths[12:].sum()),), generator=generator)
    values = torch.cat([IDS[rows] if hashed else rows, others])
    return KeyedJaggedTensor(["a", "b", "c"], values, lengths=lengths)


def train(model, steps):
    for step in steps:
        model(batch(step))[0].backward()


def full(value):
    return value.full_tensor() if hasattr(value, "full_tensor") else torch.as_tensor(value).clone()


def whole(model):
    found = {name: full(value) for name, value in model.state_dict().items()}
    for name, slots in model.fused_optimizer.state_dict()["state"].items():
        found |= {f"{name}.{slot}": full(value) for slot, value in slots.items()}
    return found


def differences(one, other):
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


SPECS = {"rowwise": RowWiseAdagrad(lr=0.1), "adam": Adam(lr=0.1)}
SPECS |= {kind.__name__: kind(lr=0.1) for kind in OptimizerSpec.__subclasses__()}


def twins(kinds, spec, update, sequence):
    for kind in kinds:
        hashed = make(kind, Hashed(max_rows=16), SPECS[spec], update, sequence)
        fixed = make(kind, None, SPECS[spec], update, sequence)
        for number in range(3):
            found = []
            for model in (hashed, fixed):
                loss, out = model(batch(number, hashed=model is hashed))
                loss.backward()
                if update == "on_step":
                    model.fused_optimizer.step()
                    model.fused_optimizer.zero_grad()
                found.append(out)
            assert torch.equal(*found), (kind, number)
        one, other = whole(hashed), whole(fixed)
        prefix = "ebc.embeddings.t." if sequence else "ebc.embedding_bags.t."
        places = [int((each == IDS).nonzero()) for each in one.pop(f"{prefix}ids")]
        rows = {name: v[places] if ".t." in name and v.dim() else v for name, v in other.items()}
        assert differences(one, rows) == [], kind
    return True


@pytest.mark.parametrize(
    ("spec", "update", "sequence"),
    [("rowwise", "in_backward", False), ("adam", "on_step", True), ("rowwise", "on_step", False)],
)
def test_a_hashed_table_equals_a_fixed_one_with_the_same_first_rows(ranks, spec, update, sequence):
    assert all(ranks(2).run(twins, list(BUILDERS), spec, update, sequence))


def with_optimizers(names):
    return all(twins(["grid"], name, "in_backward", False) for name in names)


@pytest.mark.parametrize("world_size", [2, 4])
def test_every_optimizer_gives_the_bits_of_a_fixed_table(ranks, world_size):
    """On four ranks a third of them, and with MESHREC_THOROUGH all."""
    names = [*SPECS] if world_size == 2 or "MESHREC_THOROUGH" in os.environ else [*SPECS][::3]
    assert all(ranks(world_size).run(with_optimizers, names))


CHOICES = {
    "all": Hashed(max_rows=20),
    "lru": Hashed(max_rows=13, evict=LRU()),  # a batch of two ranks has up to 13 distinct IDs
    "count": Hashed(max_rows=10, admit=MinCount(3), evict=LFU(half_life=3)),
    "sketch": Hashed(max_rows=10, admit=MinCountSketch(2, bytes=160), evict=TTL(steps=3)),
    "norm": Hashed(max_rows=9, admit=Probability(0.5), evict=LowestNorm()),
}


def life(folder, choice, kinds):
    """Every plan keeps the same IDs alive; what one saves, all load; tables move; all go on alike."""
    spec, keys = SPECS["adam"], CHOICES[choice]
    first = make(kinds[0], keys, spec)
    train(first, range(3))
    expected = whole(first)
    state = {"model": first, "tables": first.fused_optimizer}
    pending = checkpoint.async_save(f"{folder}/saved", state)
    train(first, range(3, 5))
    pending.wait()
    after = whole(first)
    moving = make(kinds[0], keys, spec)
    train(moving, range(3))
    for kind in kinds[1:]:
        model = make(kind, keys, spec)
        train(model, range(3))
        assert differences(expected, whole(model)) == [], ("trained", kind)
        loaded = make(kind, keys, spec)
        train(loaded, range(20, 21))
        checkpoint.load(f"{folder}/saved", {"model": loaded, "tables": loaded.fused_optimizer})
        assert differences(expected, whole(loaded)) == [], ("loaded", kind)
        moving.reshard(plan_of(kind, unsharded(keys)))
        assert differences(expected, whole(moving)) == [], ("moved", kind)
        for each in (model, loaded):
            train(each, range(3, 5))
            assert differences(after, whole(each)) == [], ("went on", kind)
    train(moving, range(3, 5))
    assert differences(after, whole(moving)) == []
    return True


@pytest.mark.parametrize("choice", CHOICES)
def test_the_ids_alive_do_not_depend_on_the_plan(ranks, tmp_path, choice):
    kinds = ["rows", "columns", "everywhere"] if choice in ("count", "lru") else ["one", "grid"]
    assert all(ranks(2).run(life, str(tmp_path), choice, kinds))


def young(folder):
    """Save tables without a row, or with IDs that wait; load them under another plan."""
    keys, found = dataclasses.replace(CHOICES["count"], max_rows=16), []
    for kind, num_steps in (("rows", 0), ("columns", 1), ("everywhere", 0), ("everywhere", 1)):
        model, other = make(kind, keys, SPECS["adam"]), make("grid", keys, SPECS["adam"])
        train(model, range(num_steps))
        train(other, range(3, 5))
        name = f"{folder}/{kind}{num_steps}"
        checkpoint.save(name, {"model": model, "tables": model.fused_optimizer})
        checkpoint.load(name, {"model": other, "tables": other.fused_optimizer})
        found += differences(whole(model), whole(other))
        train(model, range(1, 3))
        train(other, range(1, 3))
        found += differences(whole(model), whole(other))
    return found


def test_tables_without_rows_are_saved(ranks, tmp_path):
    assert ranks(2).run(young, str(tmp_path)) == [[], []]


def replicated(choice):
    """2 x 2 ranks keep the same rows as 4: replicas count the IDs of each other."""
    keys, found = dataclasses.replace(CHOICES[choice], max_rows=15), []
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for env in (default_env(), md.ShardingEnv.from_mesh(mesh)):
        tables = unsharded(keys)
        builders = {"t": md.row_wise(), "u": md.row_wise()}
        plan = md.construct_module_sharding_plan(tables, builders, world_size=env.shard.size, local_size=1)
        model = DistributedModelParallel(
            Model(tables),
            env,
            plan=md.ShardingPlan({"ebc": plan}),
            sharders=[md.EmbeddingBagCollectionSharder(SPECS["adam"])],
            init_data_parallel=False,
        )
        train(model, range(4))
        found.append(whole(model))
    return differences(*found)


@pytest.mark.parametrize("choice", ["lru", "count"])
def test_replicas_keep_the_same_ids_alive(ranks, choice):
    assert ranks(4).run(replicated, choice) == [[]] * 4


def ahead(choice):
    found = []
    for pipelined in (False, True):
        model = make("rows", dataclasses.replace(CHOICES[choice], max_rows=13), SPECS["adam"])
        if pipelined:
            pipeline, feed = TrainPipeline(model, model.fused_optimizer), (batch(step) for step in range(6))
            for _ in range(6):
                pipeline.progress(feed)
        else:
            train(model, range(6))
        found.append(whole(model))
    return differences(*found)


@pytest.mark.parametrize("choice", ["lru", "count"])
def test_a_pipeline_keeps_the_same_ids_alive(ranks, choice):
    assert ranks(2).run(ahead, choice) == [[], []]


def from_fixed(folder):
    fixed = make("rows", None, SPECS["adam"])
    for step in range(2):
        fixed(batch(step, hashed=False))[0].backward()
    checkpoint.save(f"{folder}/fixed", {"model": fixed, "tables": fixed.fused_optimizer})
    hashed = make("columns", Hashed(max_rows=20), SPECS["adam"])
    checkpoint.load(f"{folder}/fixed", {"model": hashed, "tables": hashed.fused_optimizer})
    one, other = whole(hashed), whole(fixed)
    ids = one.pop("ebc.embedding_bags.t.ids")
    rows = {name: v[ids] if ".t." in name and v.dim() else v for name, v in other.items()}
    small = make("rows", Hashed(max_rows=15), SPECS["adam"])
    with pytest.raises(ValueError, match=r"16 rows.*max_rows.*'t'.*15"):
        checkpoint.load(f"{folder}/fixed", {"model": small, "tables": small.fused_optimizer})
    return differences(one, rows), sorted(ids.tolist())


def test_a_fixed_table_is_loaded_into_a_hashed_one(ranks, tmp_path):
    assert ranks(2).run(from_fixed, str(tmp_path)) == [([], list(range(16)))] * 2


def test_buckets_and_their_first_keys_agree():
    for max_rows in (1, 2, 3, 7, 64, 1000, 2**31 - 1, 2**31, 2**32 + 7, 2**40 + 11, 2**48 - 1):
        rows = torch.tensor(sorted({0, 1 % max_rows, max_rows // 2, max_rows - 1}))
        firsts = first_keys(rows, max_rows)
        assert firsts.tolist() == [key_at(int(row), max_rows) for row in rows]
        assert torch.equal(bucket_of(firsts, max_rows), rows)
        before = rows[rows > 0]
        assert torch.equal(bucket_of(first_keys(before, max_rows) - 1, max_rows), before - 1)
        assert key_at(max_rows, max_rows) == 2**63


def test_float_ids_are_refused():
    tables = unsharded(Hashed(max_rows=20))
    features = KeyedJaggedTensor(["a", "b", "c"], torch.rand(3), lengths=torch.ones(3).int())
    with torch.no_grad(), pytest.raises(ValueError, match=r"IDs.*int32.*int64.*torch\.float32"):
        tables(features)


def test_a_table_without_a_fused_optimizer_is_not_trained():
    tables = unsharded(Hashed(max_rows=20))
    features = KeyedJaggedTensor(["a", "b", "c"], torch.arange(3), lengths=torch.ones(3).int())
    with pytest.raises(ValueError, match="'t'"):
        tables(features)
