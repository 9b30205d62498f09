"""Managed collisions against a few lines by hand, and against TorchRec on drawn streams."""

import logging

import numpy as np
import pytest
import torch

from meshrec.compat.bridge import eviction, managed_collisions
from meshrec.compat.bridge.embeddings import EmbeddingBagCollection, EmbeddingBagConfig
from meshrec.compat.bridge.sparse import JaggedTensor, KeyedJaggedTensor

CPU = torch.device("cpu")
POLICIES = {
    "lfu": lambda room, func: room.LFU_EvictionPolicy(func),
    "lru": lambda room, func: room.LRU_EvictionPolicy(1.0, func),
    "lru, decay": lambda room, func: room.LRU_EvictionPolicy(0.5, func),
    "distance": lambda room, func: room.DistanceLFU_EvictionPolicy(1.0, func),
    "distance, decay": lambda room, func: room.DistanceLFU_EvictionPolicy(2.0, func),
}
FILTERS = [None, "average_threshold_filter", "dynamic_threshold_filter", "probabilistic_threshold_filter"]


def module(room=managed_collisions, policies=eviction, name="lfu", func=None, size=12, interval=2):
    policy = POLICIES[name](policies, func and getattr(policies, func))
    return room.MCHManagedCollisionModule(size, CPU, policy, interval)


def rows(collision, ids, jagged=JaggedTensor):
    ids = torch.tensor(ids) if isinstance(ids, list) else ids
    return collision({"t": jagged(values=ids, lengths=torch.ones(len(ids), dtype=torch.int64))})["t"].values()


def test_frequent_ids_get_rows_and_others_share_the_last():
    collision = module(size=3, interval=1)
    rows(collision, [7, 7, 8, 8, 8, 9])
    found = rows(collision.eval(), [7, 8, 9, 10]).tolist()
    assert found[2:] == [2, 2]
    assert sorted(found[:2]) == [0, 1]
    assert collision.open_slots().tolist() == [0]
    evicted = collision.evict()
    assert evicted is not None
    assert collision.evict() is None
    before = {name: each.clone() for name, each in collision.state_dict().items()}
    rows(collision, [100, 100])  # evaluation changes nothing
    assert all(torch.equal(before[name], each) for name, each in collision.state_dict().items())


def test_state_is_saved_and_sizes_must_agree():
    collision, other = module(size=5, interval=1), module(size=5, interval=1)
    rows(collision, [3, 3, 1, -4])
    other.load_state_dict(collision.state_dict())
    assert torch.equal(rows(other.eval(), [3, 1, -4, 9]), rows(collision.eval(), [3, 1, -4, 9]))
    with pytest.raises(ValueError, match="1"):
        module(size=0)


def test_a_full_history_is_said_once(caplog):
    collision = module(size=5, interval=3)
    with caplog.at_level(logging.WARNING):
        rows(collision, [1, 2])
        for _ in range(4):
            rows(collision, list(range(30)))
    assert [record.message.split(":")[0] for record in caplog.records] == [
        "25 of a batch's 30 IDs are not counted"
    ]


def collection(mc=None, embeddings=None, configs=None, kind=EmbeddingBagCollection):
    configs = configs or [
        EmbeddingBagConfig(name="a", embedding_dim=4, num_embeddings=12, feature_names=["f", "g"]),
        EmbeddingBagConfig(name="b", embedding_dim=4, num_embeddings=6, feature_names=["h"]),
    ]
    room = mc or managed_collisions
    mcc = room.ManagedCollisionCollection({"b": module(size=6), "a": module(size=12)}, configs)
    torch.manual_seed(0)
    return (embeddings or managed_collisions).ManagedCollisionEmbeddingBagCollection(
        kind(tables=configs, device=CPU), mcc, return_remapped_features=True
    )


def batch(rng, keys=("h", "f", "g"), kind=KeyedJaggedTensor):
    lengths = torch.from_numpy(rng.integers(0, 4, 3 * 5))
    values = torch.from_numpy(rng.zipf(1.3, int(lengths.sum())) % 40)
    return kind(keys=list(keys), values=values, lengths=lengths)


def test_collections_look_remapped_ids_up():
    wrapped, rng = collection(), np.random.default_rng(0)
    for _ in range(6):
        features = batch(rng)
        found, remapped = wrapped(features)
        assert remapped.keys() == ["f", "g", "h"]
        assert torch.equal(found.values(), wrapped._embedding_module(remapped).values())
    assert set(wrapped._managed_collision_collection.open_slots()) == {"a", "b"}


def test_mistakes_are_named():
    wrapped = collection()
    wrapped._embedding_module = torch.nn.Identity()  # as a sharder would replace it
    with pytest.raises(ValueError, match=r"meshrec\.Hashed"):
        wrapped(batch(np.random.default_rng(0)))
    config = EmbeddingBagConfig(name="a", embedding_dim=4, num_embeddings=9, feature_names=["f"])
    with pytest.raises(ValueError, match=r"'a'.*9 rows.*gives 12"):
        managed_collisions.ManagedCollisionCollection({"a": module()}, [config])
    with pytest.raises(ValueError, match="present"):
        managed_collisions.ManagedCollisionCollection({}, [config])


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("func", FILTERS)
@pytest.mark.parametrize("interval", [1, 3])
def test_torchrec_gives_the_same_numbers(name, func, interval):
    theirs_room = pytest.importorskip("torchrec.modules.mc_modules", reason="`make parity` installs it")
    from torchrec import JaggedTensor as Theirs

    ours = module(name=name, func=func, interval=interval)
    theirs = module(theirs_room, theirs_room, name, func, interval=interval)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    rng = np.random.default_rng(interval)
    for step in range(40):
        if step % 10 == 9:
            ours.train(step % 20 == 9), theirs.train(step % 20 == 9)
        ids = torch.from_numpy(rng.zipf(1.2, 60) % 100 + step // 3)
        torch.manual_seed(step)
        mine = rows(ours, ids)
        torch.manual_seed(step)
        assert torch.equal(mine, rows(theirs, ids, Theirs)), step
        for key, value in ours.state_dict().items():
            assert torch.equal(value, theirs.state_dict()[key]), (step, key)
        gone, expected = ours.evict(), theirs.evict()
        assert (gone is None) == (expected is None)
        assert gone is None or gone.tolist() == expected.tolist()
        assert ours.open_slots().tolist() == theirs.open_slots().tolist()


def test_the_read_only_suffix_is_told():
    assert module().read_only_suffix == "_readonly"


def test_lengths_of_remapped_features_are_a_mask():
    features = KeyedJaggedTensor(["f"], torch.tensor([3, 1]), lengths=torch.tensor([2, 0]))
    assert managed_collisions.return_remapped_lengths_as_mask(features).tolist() == [True, False]
    lengths = features.lengths()
    assert managed_collisions.return_custom_metadata(lengths) is lengths


def two_tables():
    configs = [
        EmbeddingBagConfig(6, 4, name, feature_names=features)
        for name, features in (("t", ["a", "b"]), ("u", ["c"]))
    ]
    modules = {"t": module(size=6, interval=1), "u": module(size=6, interval=1)}
    return managed_collisions.ManagedCollisionCollection(modules, configs)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
@pytest.mark.filterwarnings("ignore:The TorchScript type system:UserWarning")
def test_evaluation_in_graphs_and_script_is_that_of_python():
    collisions = two_tables()
    values = torch.tensor([7, 7, 3, 5, 9, 9])
    features = KeyedJaggedTensor(["c", "a", "b"], values, lengths=torch.tensor([1, 1, 2, 0, 1, 1]))
    collisions(features)
    expected = collisions.eval()(features)
    graph = torch.fx.symbolic_trace(collisions)
    for program in (graph, torch.jit.script(graph)):
        remapped = program(features)
        assert remapped.keys() == ["a", "b", "c"]
        assert torch.equal(remapped.values(), expected.values())
        assert torch.equal(remapped.lengths(), expected.lengths())
