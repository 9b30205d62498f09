"""A feature that hashed tables share with other tables equals copies of it under names of their own."""

import pytest
import torch

from meshrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    Hashed,
    KeyedJaggedTensor,
    fuse,
)
from meshrec import distributed as md
from meshrec.comms.mesh import default_env
from meshrec.model_parallel import DistributedModelParallel
from meshrec.optim import RowWiseAdagrad

SHARED = {"t": ["a", "b"], "v": ["a"], "u": ["b", "c"], "w": ["c"]}
"""The features of each table: ``a`` is read by two hashed tables, ``b`` by a hashed and a fixed one."""
COPIED = {"t": ["a", "b"], "v": ["a2"], "u": ["b2", "c"], "w": ["c2"]}
KEYS = {"t": Hashed(max_rows=40), "v": Hashed(max_rows=40, seed=3)}


def tables_of(features, *, sequence, weighted=False):
    config = EmbeddingConfig if sequence else EmbeddingBagConfig
    configs = [
        config(
            name=name,
            embedding_dim=4,
            feature_names=features[name],
            init_fn=lambda weight: torch.nn.init.constant_(weight, 0.5),
            **({"keys": KEYS[name]} if name in KEYS else {"num_embeddings": 30}),
        )
        for name in features
    ]
    if sequence:
        return EmbeddingCollection(configs)
    return EmbeddingBagCollection(configs, is_weighted=weighted)


def batch(seed, *, copied, weights=None, strides=False):
    generator = torch.Generator().manual_seed(seed)
    sizes = [3, 2, 4] if strides else [4, 4, 4]
    lengths = [torch.randint(0, 4, (size,), generator=generator) for size in sizes]
    values = [torch.randint(0, 30, (int(each.sum()),), generator=generator) for each in lengths]
    values[0] = values[0] - 15 + (values[0] == 2) * 2**62
    inverse = [torch.randint(0, size, (4,), generator=generator) for size in sizes]
    order = [0, 1, 2, 0, 1, 2] if copied else [0, 1, 2]
    names = ["a", "b", "c", "a2", "b2", "c2"][: len(order)]
    if weights is not None:
        parts = weights.split(16)
        weights = torch.cat([parts[i][: len(values[i])] for i in order])
    return KeyedJaggedTensor(
        names,
        torch.cat([values[i] for i in order]),
        weights=weights,
        lengths=torch.cat([lengths[i] for i in order]),
        stride_per_key_per_rank=[[sizes[i]] for i in order] if strides else None,
        inverse_indices=(names, torch.stack([inverse[i] for i in order])) if strides else None,
    )


def parts_of(output):
    if isinstance(output, dict):
        return [each.values() for each in output.values()]
    return [output.values()]


def steps(module, *, copied, weighted=False, strides=False, rank=0):
    """Train a few steps; return what was looked up, and the gradients of the weights."""
    found = []
    for step in range(3):
        weights = torch.rand(48, generator=torch.Generator().manual_seed(step)) if weighted else None
        if weighted:
            weights.requires_grad_()
        features = batch(10 * step + rank, copied=copied, weights=weights, strides=strides)
        output = module(features)
        if not isinstance(output, dict) and hasattr(output, "wait"):
            output = output.wait()
        parts = parts_of(output)
        sum((each.square() * (number + 1)).sum() for number, each in enumerate(parts)).backward()
        found += [each.detach().clone() for each in parts]
        found += [weights.grad] if weighted else []
    return found


@pytest.mark.parametrize(
    ("sequence", "weighted", "strides"),
    [(False, False, False), (False, True, False), (False, False, True), (True, False, False)],
)
def test_unsharded_tables_share_a_feature(sequence, weighted, strides):
    found = []
    for features in (SHARED, COPIED):
        module = fuse(
            tables_of(features, sequence=sequence, weighted=weighted), optimizer=RowWiseAdagrad(lr=0.1)
        )
        copied = features is COPIED
        rows = steps(module, copied=copied, weighted=weighted, strides=strides)
        for table in module.hashed_tables().values():
            rows += table.items()[:2]
        found.append(rows)
    assert len(found[0]) == len(found[1])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_names_of_a_shared_feature_say_the_table():
    module = tables_of(SHARED, sequence=False)
    with torch.no_grad():
        names = module(batch(0, copied=False)).keys()
    assert names == ["a@t", "b@t", "a@v", "b@u", "c@u", "c@w"]


def sharded(kind, sequence):
    builder, found = BUILDERS[kind], []
    for features in (SHARED, COPIED):
        module = torch.nn.ModuleDict(
            {"tables": tables_of(features, sequence=sequence, weighted=not sequence)}
        )
        plan = md.construct_module_sharding_plan(
            module["tables"],
            {name: builder() for name in features},
            world_size=default_env().shard.size,
            local_size=1,
        )
        sharder = md.EmbeddingCollectionSharder if sequence else md.EmbeddingBagCollectionSharder
        model = DistributedModelParallel(
            module,
            default_env(),
            plan=md.ShardingPlan({"tables": plan}),
            sharders=[sharder(RowWiseAdagrad(lr=0.1))],
            init_data_parallel=False,
        )
        rows = steps(
            model.module["tables"],
            copied=features is COPIED,
            weighted=not sequence,
            rank=default_env().world.rank,
        )
        state = model.state_dict()
        whole = {name: v.full_tensor() if hasattr(v, "full_tensor") else v for name, v in state.items()}
        found.append(rows + [whole[name] for name in sorted(whole)])
    assert len(found[0]) == len(found[1])
    return [torch.equal(one, other) for one, other in zip(*found, strict=True)]


BUILDERS = {
    "rows": md.row_wise,
    "columns": lambda: md.column_wise(ranks=[0, 1]),
    "everywhere": md.data_parallel,
}


@pytest.mark.parametrize(("plan", "sequence"), [("rows", False), ("columns", True), ("everywhere", False)])
def test_sharded_tables_share_a_feature(ranks, plan, sequence):
    for equal in ranks(2).run(sharded, plan, sequence):
        assert all(equal)
