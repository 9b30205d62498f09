"""A storage whose slots are not its keys: looked up and trained as if the IDs had been mapped before."""

import dataclasses

import pytest
import torch

from meshrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, fuse
from meshrec import distributed as md
from meshrec.comms.mesh import default_env
from meshrec.distributed.lookup_batch import Stage
from meshrec.modules import table_lookup
from meshrec.optim import RowWiseAdagrad
from meshrec.pipeline.in_flight import LookupInFlight
from meshrec.tables.dense.rows import DenseRows
from meshrec.tables.index import FeatureRows, Resolved, replace_ids_by_slots

ROWS = 5


class Modulo:
    """The slot of a key is the remainder of its division by ROWS."""

    num_calls, slot_keys = 0, None

    def __init__(self, first_row):
        self.first_row = first_row

    def resolve(self, keys, *, train):
        Modulo.num_calls += 1
        return Resolved(keys % ROWS - self.first_row)

    def keys_at(self, slots):
        return slots + self.first_row


@dataclasses.dataclass(frozen=True)
class ModuloRows(DenseRows):
    def index(self, first_row, num_rows):
        return Modulo(first_row)


def make(indexed):
    torch.manual_seed(0)
    tables = [
        EmbeddingBagConfig(name=name, num_embeddings=20, embedding_dim=4, feature_names=features)
        for name, features in (("t0", ["a", "b"]), ("t1", ["c"]))
    ]
    with pytest.MonkeyPatch.context() as patch:
        if indexed:
            patch.setattr(table_lookup, "storage_for", lambda data_type: ModuloRows(data_type.dtype))
        return EmbeddingBagCollection(tables)


def batches(mapped):
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(0, 4, (9,), generator=generator)
        ids = torch.randint(0, 20, (int(lengths.sum()),), generator=generator)
        yield KeyedJaggedTensor(["a", "b", "c"], ids % ROWS if mapped else ids, lengths=lengths)


def trained(module, mapped):
    for batch in batches(mapped):
        module(batch).values().tanh().sum().backward()
    return torch.cat([value.detach().reshape(-1) for value in module.parameters()])


def sharded(indexed, builder, env):
    module = make(indexed)
    plan = md.construct_module_sharding_plan(
        module, {"t0": builder(), "t1": md.data_parallel()}, world_size=env.shard.size
    )
    with pytest.MonkeyPatch.context() as patch:
        if indexed:
            patch.setattr(table_lookup, "storage_for", lambda data_type: ModuloRows(data_type.dtype))
        return md.EmbeddingBagCollectionSharder(RowWiseAdagrad(lr=0.1)).shard(module, plan, env)


def test_an_unsharded_module_trains_as_on_mapped_ids():
    with_index, without = (fuse(make(i), optimizer=RowWiseAdagrad(lr=0.1)) for i in (True, False))
    assert torch.equal(trained(with_index, False), trained(without, True))


def on_ranks(name):
    env = default_env()
    builder = {"column_wise": md.column_wise, "table_wise": lambda: md.table_wise(rank=0)}[name]
    return torch.equal(
        trained(sharded(True, builder, env), False), trained(sharded(False, builder, env), True)
    )


@pytest.mark.parametrize("name", ["column_wise", "table_wise"])
def test_sharded_modules_train_as_on_mapped_ids(ranks, name):
    assert ranks(2).run(on_ranks, name) == [True, True]


def test_a_batch_is_resolved_once_and_fixed_tables_never():
    env = md.ShardingEnv.single_process()
    module, plain = (sharded(i, lambda: md.table_wise(rank=0), env) for i in (True, False))
    batch = next(batches(False))
    lookup = LookupInFlight(module, batch)
    Modulo.num_calls = 0
    lookup.advance(Stage.RESOLVED)  # one batch ahead
    assert Modulo.num_calls == 2  # one call for each table
    first = lookup.send_embeddings()
    module.tables.num_changes += 1
    assert lookup.send_embeddings() is not first  # looked up again
    assert Modulo.num_calls == 2
    assert not plain.tables.needs_resolve
    plain(batch).wait()
    assert Modulo.num_calls == 2


def test_slots_of_features_of_several_blocks():
    """Two blocks of two features; only the second has an index."""
    values = torch.tensor([7, 8, 9, 6, 5])
    found, _ = replace_ids_by_slots(
        values, [0, 1, 3, 4, 5], {1: FeatureRows([Modulo(0)], 1)}, num_keys=2, train=False
    )
    assert found.tolist() == [7, 4, 0, 6, 1]


def test_a_feature_of_two_tables_with_an_index_is_read_in_both():
    def made(features):
        torch.manual_seed(0)
        tables = [
            EmbeddingBagConfig(name=name, num_embeddings=20, embedding_dim=4, feature_names=[feature])
            for name, feature in zip(("t0", "t1"), features, strict=True)
        ]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(table_lookup, "storage_for", lambda data_type: ModuloRows(data_type.dtype))
            return EmbeddingBagCollection(tables)

    ids, lengths = torch.tensor([7, 19, 0, 12]), torch.tensor([1, 3])
    out = made(["a", "a"])(KeyedJaggedTensor(["a"], ids, lengths=lengths)).values()
    copied = KeyedJaggedTensor(["a", "b"], ids.repeat(2), lengths=lengths.repeat(2))
    assert torch.equal(out, made(["a", "b"])(copied).values())
