"""Two levels: sums or distinct rows across nodes, against one level."""

import itertools
import os

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from meshrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    PoolingType,
)
from meshrec import distributed as md
from meshrec.comms.mesh import default_env
from meshrec.distributed import id_exchange
from meshrec.optim import PartialRowWiseLAMB, RowWiseAdagrad

ROWS = 12
PLANS = {
    "row_wise": (md.row_wise(), md.row_wise()),
    "column_wise": (md.column_wise(ranks=[3, 0]), md.column_wise(ranks=[0, 1])),
    "table_wise": (md.table_wise(rank=2), md.table_wise(rank=1)),
    "grid_shard": (md.grid_shard(), md.row_wise(ranks=[2, 1])),
    "one_rank": (md.table_wise(rank=0), md.table_wise(rank=0)),
    "data_parallel": (md.data_parallel(), md.data_parallel()),
    "mixed": (md.table_row_wise(node=1), md.data_parallel()),
}


def environment(in_nodes):
    if not in_nodes:
        return default_env()
    return md.ShardingEnv.from_mesh(init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "local")))


def collection_of(sequence, weighted):
    torch.manual_seed(0)
    if sequence:
        return EmbeddingCollection(
            tables=[
                EmbeddingConfig(name="t0", num_embeddings=ROWS, embedding_dim=8, feature_names=["a", "b"]),
                EmbeddingConfig(name="t1", num_embeddings=ROWS, embedding_dim=8, feature_names=["c"]),
            ]
        )
    return EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(name="t0", num_embeddings=ROWS, embedding_dim=8, feature_names=["a", "b"]),
            EmbeddingBagConfig(
                name="t1",
                num_embeddings=ROWS,
                embedding_dim=8,
                feature_names=["c"],
                pooling=PoolingType.SUM if weighted else PoolingType.MEAN,
            ),
        ],
        is_weighted=weighted,
    )


def features_of(rank, step, weighted, batch=5):
    generator = torch.Generator().manual_seed(10 * step + rank)
    lengths = torch.randint(0, 4, (3 * batch,), generator=generator)
    size = (int(lengths.sum()),)
    weights = torch.rand(size, generator=generator).requires_grad_() if weighted else None
    ids = torch.randint(0, ROWS, size, generator=generator)
    return KeyedJaggedTensor(["a", "b", "c"], ids, weights, lengths=lengths), weights


def trained(plan, kind, across_nodes, precision=None, optimizer=None):
    """Values, gradients of weights, bytes and final weights of three steps."""
    env, (sequence, weighted) = environment(across_nodes is not None), kind
    collection = collection_of(sequence, weighted)
    builders = dict(zip(("t0", "t1"), PLANS[plan], strict=True))
    made = md.construct_module_sharding_plan(collection, builders, world_size=env.shard.size, local_size=2)
    sharder = md.EmbeddingCollectionSharder if sequence else md.EmbeddingBagCollectionSharder
    module = sharder(
        optimizer or RowWiseAdagrad(lr=0.1),
        precision=precision,
        across_nodes=across_nodes or "sums",
    ).shard(collection, made, env)
    found = []
    with md.measure_traffic() as traffic:
        for step in range(3):
            features, weights = features_of(env.shard.rank, step, weighted)
            output = module(features)
            values = (
                torch.cat([x.values().flatten() for x in output.values()]) if sequence else output.values()
            )
            (values * torch.linspace(0.5, 1.5, values.numel()).view_as(values)).sum().backward()
            found += [values.detach(), weights.grad if weighted else torch.empty(0)]
        with torch.no_grad():
            features, _ = features_of(env.shard.rank, 9, weighted)
            module(features)
    folder = "embeddings" if sequence else "embedding_bags"
    state = module.state_dict()
    for name in ("t0", "t1"):
        weight = state[f"{folder}.{name}.weight"]
        found.append((weight.full_tensor() if hasattr(weight, "full_tensor") else weight).clone())
    return found, dict(traffic)


def packed(packs, plan, kind):
    """``trained`` with the choice whether IDs are packed made beforehand."""
    measured = id_exchange.is_faster
    id_exchange.is_faster = lambda *_: packs
    try:
        return trained(plan, kind, "rows")
    finally:
        id_exchange.is_faster = measured


@pytest.mark.parametrize("kind", [(False, False), (True, False)])
def test_packed_ids_are_the_same_ids(ranks, kind):
    plain, coded = (ranks(4).run(packed, packs, "mixed", kind) for packs in (False, True))
    for (expected, _), (found, _) in zip(plain, coded, strict=True):
        assert all(map(torch.equal, expected, found))
    many, few = (sum(traffic["ids between nodes"] for _, traffic in each) for each in (plain, coded))
    assert few < many


KINDS = [(False, False), (False, True), (True, False)]


# Row-wise tables in every kind of module, other plans in one; with MESHREC_THOROUGH all plans in all kinds.
PLANS_OF_KINDS = [
    (plan, kind)
    for (number, plan), (other, kind) in itertools.product(enumerate(PLANS), enumerate(KINDS))
    if number in (0, other + 1, other + 4) or "MESHREC_THOROUGH" in os.environ
]


@pytest.mark.parametrize(("plan", "kind"), PLANS_OF_KINDS)
def test_two_levels_equal_one(ranks, plan, kind):
    pool = ranks(4)
    one = pool.run(trained, plan, kind, None)
    rows = pool.run(trained, plan, kind, "rows")
    for (expected, _), (found, _) in zip(one, rows, strict=True):
        for x, y in zip(expected, found, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("across_nodes", ["sums", "rows"])
def test_row_sums_of_split_columns_cross_nodes(ranks, across_nodes):
    optimizer = PartialRowWiseLAMB(lr=0.1)
    pool, kind = ranks(4), (False, False)
    one = pool.run(trained, "column_wise", kind, None, None, optimizer)
    two = pool.run(trained, "column_wise", kind, across_nodes, None, optimizer)
    for (expected, _), (found, _) in zip(one, two, strict=True):
        for x, y in zip(expected, found, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", [(False, False), (True, False)])
@pytest.mark.parametrize("format", ["bf16", "int8", "int8+stochastic+feedback"])
def test_rows_between_nodes_have_wire_formats(ranks, kind, format):
    precision = md.CommsPrecision(format.removesuffix("+feedback"), format)
    pool = ranks(4)
    exact = pool.run(trained, "row_wise", kind, "rows")
    coded = pool.run(trained, "row_wise", kind, "rows", precision)
    for (expected, full), (found, traffic) in zip(exact, coded, strict=True):
        for x, y in zip(expected, found, strict=True):
            torch.testing.assert_close(x, y, rtol=0.05, atol=0.05)
        for name in ("embeddings between nodes", "gradients between nodes"):
            assert traffic[name] == full[name] // 2  # 8 columns: 8 codes and 8 bytes
        assert traffic["embeddings"] == full["embeddings"]  # inside a node: fp32


def crossing(across_nodes):
    """The bytes that one step of many bags with few distinct IDs sends between nodes."""
    env = environment(True)
    collection = collection_of(False, False)
    made = md.construct_module_sharding_plan(
        collection, {"t0": md.row_wise(), "t1": md.row_wise()}, world_size=4, local_size=2
    )
    sharder = md.EmbeddingBagCollectionSharder(RowWiseAdagrad(lr=0.1), across_nodes=across_nodes)
    module = sharder.shard(collection, made, env)
    with md.measure_traffic() as traffic:
        module(features_of(env.shard.rank, 0, False, batch=64)[0]).values().sum().backward()
    return sum(count for name, count in traffic.items() if name.endswith("between nodes"))


def test_hot_rows_cross_once(ranks):
    sums, rows = sum(ranks(4).run(crossing, "sums")), sum(ranks(4).run(crossing, "rows"))
    assert rows < sums / 5


def refused():
    collection = collection_of(False, False)
    made = md.construct_module_sharding_plan(
        collection, {"t0": md.row_wise(), "t1": md.row_wise()}, world_size=2
    )
    with pytest.raises(ValueError, match="needs"):
        md.EmbeddingBagCollectionSharder(across_nodes="rows").shard(collection, made)
    return True


def test_rows_need_nodes(ranks):
    assert ranks(2).run(refused) == [True, True]
    with pytest.raises(ValueError, match=r"across_nodes.*'sums'.*'rows'"):
        md.EmbeddingBagCollectionSharder(across_nodes="bags")


def refused_batches(packs, kind):
    """The errors of a bad first batch and of a bad batch after a good one, and what good batches gave."""
    measured = id_exchange.is_faster
    id_exchange.is_faster = lambda *_: packs
    try:
        env, (sequence, _) = environment(True), kind
        collection = collection_of(sequence, False)
        plan = md.construct_module_sharding_plan(
            collection, {"t0": md.row_wise(), "t1": md.row_wise()}, world_size=4, local_size=2
        )
        sharder = md.EmbeddingCollectionSharder if sequence else md.EmbeddingBagCollectionSharder
        module = sharder(RowWiseAdagrad(lr=0.1), across_nodes="rows").shard(collection, plan, env)
        errors, good = [], []
        for step in range(2):
            features, _ = features_of(env.shard.rank, step, False)
            bad = features
            if env.shard.rank == 2:
                bad = KeyedJaggedTensor(["a", "b", "c"], features.values() + ROWS, lengths=features.lengths())
            try:
                module(bad)
            except ValueError as error:
                errors.append(str(error))
            output = module(features)
            good.append(torch.cat([x.values() for x in output.values()]) if sequence else output.values())
        return errors, [each.detach() for each in good]
    finally:
        id_exchange.is_faster = measured


@pytest.mark.parametrize("packs", [False, True])
@pytest.mark.parametrize("kind", [(False, False), (True, False)])
def test_every_rank_raises_the_same_error_and_goes_on(ranks, kind, packs):
    found = ranks(4).run(refused_batches, packs, kind)
    errors = found[0][0]
    assert len(errors) == 2
    assert all("rank 2" in error and f"{ROWS}" in error for error in errors)
    assert all(each == errors for each, _ in found)
    for (_, good), (_, plain) in zip(found, ranks(4).run(refused_batches, False, kind), strict=True):
        assert all(map(torch.equal, good, plain))
