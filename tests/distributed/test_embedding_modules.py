"""The equality matrix: sharded training equals unsharded training, by real processes."""

import functools
import os
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from meshrec import distributed as md
from meshrec.comms.mesh import default_env
from meshrec.modules import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    PoolingType,
)
from meshrec.optim import (
    LAMB,
    LARS,
    SGD,
    Adagrad,
    Adam,
    PartialRowWiseAdam,
    PartialRowWiseLAMB,
    RowWiseAdagrad,
)
from meshrec.sparse import KeyedJaggedTensor
from meshrec.testing import assert_equal_to_unsharded

OPTIMIZERS = {
    "none": None,
    "sgd": SGD(lr=0.1),
    "adagrad": Adagrad(lr=0.1),
    "rowwise_adagrad": RowWiseAdagrad(lr=0.1, weight_decay=0.01),
    "adam": Adam(lr=0.01, weight_decay=0.01, decoupled_weight_decay=True),
    "partial_rowwise_adam": PartialRowWiseAdam(lr=0.01),
    "lamb": LAMB(lr=0.01, weight_decay=0.01),
    "partial_rowwise_lamb": PartialRowWiseLAMB(lr=0.01),
    "lars": LARS(lr=0.1, weight_decay=0.01),
}
# Rows and columns that do not divide; features shared by tables, tables shared by features.
TABLES = [
    ("t0", 10, 8, ["a", "b"], "SUM"),
    ("t1", 7, 5, ["b"], "MEAN"),
    ("t2", 30, 4, ["c"], "SUM"),
    ("t3", 1, 6, ["a"], "MEAN"),
]
KINDS = [
    "table_wise",
    "column_wise",
    "row_wise",
    "table_row_wise",
    "table_column_wise",
    "grid",
    "data_parallel",
]
MIXED = ("row_wise", "grid", "data_parallel", "table_wise")
BATCH_SIZES = [3, 4, 0, 5]
THOROUGH = "MESHREC_THOROUGH" in os.environ
STEPS = 10 if THOROUGH else 4
NUM_MIXES = 6 if THOROUGH else 3


def make_collection(sequence=False, weighted=False, device=None):
    if sequence:
        return EmbeddingCollection(
            tables=[
                EmbeddingConfig(name=name, num_embeddings=rows, embedding_dim=dim, feature_names=features)
                for name, rows, dim, features, _ in TABLES
            ],
            device=device,
        )
    return EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=name,
                num_embeddings=rows,
                embedding_dim=dim,
                feature_names=features,
                pooling=PoolingType[pooling],
            )
            for name, rows, dim, features, pooling in TABLES
        ],
        is_weighted=bool(weighted),
        device=device,
    )


class Model(nn.Module):
    def __init__(self, sequence=False, weighted=False):
        super().__init__()
        self.collection = make_collection(sequence, weighted)
        self.sequence = sequence
        self.over = nn.Linear(3, 2)
        self.gain = nn.Parameter(torch.rand(5)) if weighted == "learned" else None

    def forward(self, dense, features):
        if self.gain is not None:
            weights = features.weights() * self.gain[features.values() % 5]
            features = KeyedJaggedTensor(
                features.keys(), features.values(), weights, lengths=features.lengths()
            )
        embeddings = self.collection(features)
        gate = self.over(dense).mean()
        if self.sequence:
            return [jagged.values() * gate for jagged in embeddings.values()]
        return [embeddings.values() * gate]


def make_model(sequence, weighted):
    torch.manual_seed(11)
    return Model(sequence, weighted)


def loss(outputs):
    return sum((output.square().sum() for output in outputs), torch.zeros(()))


def make_features(seed, batch, weighted=False):
    generator = torch.Generator().manual_seed(seed)
    keys = ["c", "unused", "a", "b"]
    lengths = torch.randint(0, 4, (len(keys), batch), generator=generator)
    rows = {"c": 30, "unused": 1000, "a": 1, "b": 7}
    values = [
        torch.randint(0, rows[key], (int(n.sum()),), generator=generator)
        for key, n in zip(keys, lengths, strict=True)
    ]
    ids = torch.cat(values)
    weights = torch.rand(ids.numel(), generator=generator) if weighted else None
    return KeyedJaggedTensor(keys, ids, weights, lengths=lengths.view(-1))


def builder(kind, number, env):
    ranks, nodes = env.shard.size, env.shard.size // env.local_size
    return {
        "table_wise": md.table_wise(rank=number % ranks),
        "column_wise": md.column_wise(),
        "column_wise_twice": md.column_wise(ranks=[0, ranks - 1, 0]),
        "row_wise": md.row_wise(),
        "table_row_wise": md.table_row_wise(node=number % nodes),
        "table_column_wise": md.table_column_wise(node=number % nodes),
        "grid": md.grid_shard(),
        "data_parallel": md.data_parallel(),
    }[kind]


def make_plan(collection, kinds, env):
    builders = {
        name: builder(kind, i, env) for i, ((name, *_), kind) in enumerate(zip(TABLES, kinds, strict=True))
    }
    return md.construct_module_sharding_plan(
        collection, builders, world_size=env.shard.size, local_size=env.local_size
    )


@functools.cache
def environment(mesh):
    if mesh == "flat":
        return default_env()
    axes = {
        "replicated": ((2, 2), ("replicate", "shard")),
        "nodes": ((2, 2), ("node", "local")),
        "replicated_nodes": ((2, 1, 2), ("replicate", "node", "local")),
    }[mesh]
    return md.ShardingEnv.from_mesh(init_device_mesh("cpu", axes[0], mesh_dim_names=axes[1]))


def check(
    kinds, optimizer, sequence=False, weighted=False, mesh="flat", dense="ddp", steps=STEPS, update=None
):
    env = environment(mesh)
    kind = md.EmbeddingCollectionSharder if sequence else md.EmbeddingBagCollectionSharder
    plan = make_plan(make_collection(sequence, weighted, "meta"), kinds, env)
    batches = [
        [
            (
                torch.rand(4, 3, generator=torch.Generator().manual_seed(step)),
                make_features(10 * step + rank, BATCH_SIZES[rank], weighted),
            )
            for rank in range(env.world.size)
        ]
        for step in range(steps)
    ]
    assert_equal_to_unsharded(
        functools.partial(make_model, sequence, weighted),
        md.ShardingPlan({"collection": plan}),
        batches,
        loss=loss,
        sharders=[kind(OPTIMIZERS[optimizer], update=update)],
        env=env,
        dense=dense,
        dense_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        rtol=1e-5,
        atol=2e-6,
    )


@pytest.mark.parametrize(
    ("sequence", "weighted"),
    [(False, False), (False, "learned"), (True, False)],
    ids=["pooled", "learned weights", "sequence"],
)
@pytest.mark.parametrize("kind", [*KINDS, "column_wise_twice"])
def test_every_sharding_type(ranks, kind, sequence, weighted):
    ranks(2).run(check, (kind,) * 4, "rowwise_adagrad", sequence, weighted)


@pytest.mark.parametrize("kind", [*KINDS, "column_wise_twice"])
def test_every_sharding_type_on_step(ranks, kind):
    ranks(2).run(check, (kind,) * 4, "rowwise_adagrad", False, "learned", "flat", "ddp", STEPS, "on_step")


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("kinds", [MIXED, ("column_wise",) * 4], ids=["mixed", "columns"])
def test_every_optimizer(ranks, kinds, optimizer):
    ranks(2).run(check, kinds, optimizer, False, True)


@pytest.mark.parametrize("mesh", ["flat", "replicated", "nodes", "replicated_nodes"])
@pytest.mark.parametrize("dense", ["ddp", "fsdp2"])
def test_every_mesh(ranks, mesh, dense):
    ranks(4).run(check, MIXED, "rowwise_adagrad", False, "learned", mesh, dense)
    ranks(4).run(check, MIXED, "lamb", True, False, mesh, dense, STEPS, "on_step")


@pytest.mark.parametrize("mesh", ["flat", "replicated", "nodes"])
@settings(
    max_examples=NUM_MIXES,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
@given(data=st.data())
def test_random_mixes(ranks, mesh, data):
    kinds = data.draw(st.tuples(*[st.sampled_from([*KINDS, "column_wise_twice"])] * 4))
    optimizer = data.draw(st.sampled_from(list(OPTIMIZERS)))
    sequence = data.draw(st.booleans())
    weighted = not sequence and data.draw(st.sampled_from([False, True, "learned"]))
    update = data.draw(st.sampled_from(["in_backward", "on_step"]))
    ranks(4).run(check, kinds, optimizer, sequence, weighted, mesh, "ddp", 4, update)


def all_on_one_rank(optimizer, sequence):
    env = environment("flat")
    collection = make_collection(sequence)
    plan = md.construct_module_sharding_plan(
        collection, {name: md.table_wise(rank=1) for name, *_ in TABLES}, world_size=env.shard.size
    )
    kind = md.EmbeddingCollectionSharder if sequence else md.EmbeddingBagCollectionSharder
    sharded = kind(OPTIMIZERS[optimizer]).shard(collection, plan, env)
    output = sharded(make_features(0, 3))
    values = (
        torch.cat([jagged.values().view(-1) for jagged in output.values()]) if sequence else output.values()
    )
    values.sum().backward()
    return sum(parameter.numel() for parameter in sharded.parameters()), values.requires_grad


@pytest.mark.parametrize("optimizer", ["sgd", "none"])
@pytest.mark.parametrize("sequence", [False, True])
def test_a_rank_without_rectangles_takes_part_in_the_backward_pass(ranks, sequence, optimizer):
    """No dense parameter makes it: the module itself must."""
    (nothing, trains), (everything, _) = ranks(2).run(all_on_one_rank, optimizer, sequence)
    assert nothing == 0 < everything
    assert trains


def frozen(kinds):
    env = environment("flat")
    torch.manual_seed(0)
    collection = make_collection()
    for name in ("t0", "t2"):
        collection.embedding_bags[name].weight.requires_grad_(False)
    sharded = md.EmbeddingBagCollectionSharder(LAMB(lr=0.1)).shard(
        collection, make_plan(collection, kinds, env), env
    )
    before = {name: parameter.detach().clone() for name, parameter in sharded.named_parameters()}
    sharded(make_features(0, 3)).values().square().sum().backward()
    changed = {
        name.split(".")[1] for name, p in sharded.named_parameters() if not torch.equal(p, before[name])
    }
    for parameter in sharded.parameters():
        parameter.requires_grad_(False)
    return sorted(changed), sharded(make_features(0, 3)).values().requires_grad


@pytest.mark.parametrize("kinds", [("row_wise",) * 4, ("column_wise",) * 4, ("data_parallel",) * 4])
def test_frozen_tables_stay(ranks, kinds):
    found = ranks(2).run(frozen, kinds)
    assert {name for changed, _ in found for name in changed} == {"t1", "t3"}
    assert not any(records for _, records in found)


def one_process():
    env = md.ShardingEnv.single_process()
    for kinds in (("grid",) * 4, MIXED):
        collection = make_collection()
        reference = make_collection()
        reference.load_state_dict(collection.state_dict())
        sharded = md.EmbeddingBagCollectionSharder().shard(collection, make_plan(collection, kinds, env), env)
        features = make_features(0, 4)
        output, expected = sharded(features), reference(features)
        assert list(output.keys()) == list(expected.keys())
        assert torch.equal(output.values(), expected.values())


def test_one_process_needs_no_group_and_is_bit_identical():
    assert not dist.is_initialized()
    one_process()


OURS = str(Path(md.__file__).parents[1])  # a clone's folder may be called meshrec, too


def count_calls(sequence):
    env = environment("flat")
    collection = make_collection(sequence)
    kind = md.EmbeddingCollectionSharder if sequence else md.EmbeddingBagCollectionSharder
    sharded = kind(SGD(lr=0.1)).shard(collection, make_plan(collection, MIXED, env), env)
    features = make_features(0, 4)
    sharded(features).wait()

    def calls_of_a_forward():
        calls = []

        def count(frame, event, argument):
            if event == "call" and frame.f_code.co_filename.startswith(OURS):
                calls.append(
                    frame.f_code.co_qualname if hasattr(frame.f_code, "co_qualname") else frame.f_code.co_name
                )

        sys.setprofile(count)
        try:
            sharded(features).wait()
        finally:
            sys.setprofile(None)
        # Translating an operator's errors takes 0.1 us.
        return [call for call in calls if call != "with_translated_errors.<locals>.call"]

    # The fewest of ten: a slow peer adds checks, and unread messages of earlier tests are skipped.
    return min((calls_of_a_forward() for _ in range(10)), key=len)


@pytest.mark.parametrize("sequence", [False, True])
def test_a_forward_takes_few_python_calls(ranks, sequence):
    calls = ranks(2).run(count_calls, sequence)[0]
    # 3 of them tell the other ranks of an error: [Note: a rank that fails alone].
    assert len(calls) <= 60, calls


def batch_size_per_feature(sequence):
    env = environment("flat")
    torch.manual_seed(0)
    collection = make_collection(sequence)
    kind = md.EmbeddingCollectionSharder if sequence else md.EmbeddingBagCollectionSharder
    sharded = kind().shard(collection, make_plan(collection, MIXED, env), env)
    generator = torch.Generator().manual_seed(env.world.rank)
    strides = [2, 3 + env.world.rank, 1]
    lengths = torch.randint(0, 3, (sum(strides),), generator=generator)
    # Each rank has its own batch, too.
    batch = 4 + 2 * env.world.rank
    inverse = torch.stack([torch.randint(0, n, (batch,), generator=generator) for n in strides])
    ids = torch.zeros(int(lengths.sum()), dtype=torch.long)
    features = KeyedJaggedTensor(
        ["a", "b", "c"],
        ids,
        lengths=lengths,
        stride_per_key=strides,
        inverse_indices=(["a", "b", "c"], inverse),
    )
    found, expected = sharded(features), collection(features)
    if not sequence:
        return torch.allclose(found.values(), expected.values())
    return all(
        torch.allclose(found[name].values(), jagged.values())
        and torch.equal(found[name].lengths().long(), jagged.lengths().long())
        for name, jagged in expected.items()
    )


@pytest.mark.parametrize("sequence", [False, True])
def test_a_batch_size_per_feature(ranks, sequence):
    assert ranks(2).run(batch_size_per_feature, sequence) == [True, True]


def untouched_inputs():
    env = environment("flat")
    collection = make_collection()
    sharded = md.EmbeddingBagCollectionSharder(SGD(lr=0.1)).shard(
        collection, make_plan(collection, MIXED, env), env
    )
    features = make_features(0, 4)
    before = [features.values().clone(), features.offsets().clone()]
    sharded(features).values().sum().backward()
    return all(map(torch.equal, before, [features.values(), features.offsets()]))


def test_inputs_are_not_written_to(ranks):
    assert ranks(2).run(untouched_inputs) == [True, True]


def from_meta(kinds):
    env = environment("flat")
    torch.manual_seed(env.world.rank)  # the first rank's seed is that of all
    sharded = md.EmbeddingBagCollectionSharder().shard(
        make_collection(device="meta"), make_plan(make_collection(device="meta"), kinds, env), env
    )
    return [
        (name, tuple(rectangle), shard.detach().tolist())
        for name, table in sharded.embedding_bags.items()
        for rectangle, shard in zip(table.rectangles, table.shards(), strict=True)
    ]


def test_first_values_from_meta_do_not_depend_on_the_plan(ranks):
    def whole(world_size, kinds):
        tables = {name: torch.full((rows, dim), torch.nan) for name, rows, dim, *_ in TABLES}
        for rank in ranks(world_size).run(from_meta, kinds):
            for name, (_, r0, r1, c0, c1), values in rank:
                tables[name][r0:r1, c0:c1] = torch.tensor(values)
        return tables

    first = whole(2, ("table_wise",) * 4)
    assert all(table.isfinite().all() for table in first.values())
    assert first["t2"].std() > 0
    for other in (whole(4, MIXED), whole(4, ("grid",) * 4)):
        assert all(torch.equal(first[name], other[name]) for name in first)
