"""Managed collisions by hash against a model in plain Python."""

import random

import pytest
import torch

from meshrec.compat.bridge import hash_managed_collisions as hmc
from meshrec.compat.bridge.embeddings import EmbeddingBagCollection, EmbeddingBagConfig
from meshrec.compat.bridge.managed_collisions import (
    ManagedCollisionCollection,
    ManagedCollisionEmbeddingBagCollection,
)
from meshrec.compat.bridge.sparse import JaggedTensor, KeyedJaggedTensor

CPU = torch.device("cpu")
TTL, BY_FEATURE, LRU = hmc.HashZchEvictionPolicyName


def module(size=10, policy=None, hours=None, by_feature=None, **more):
    config = hmc.HashZchEvictionConfig(["a", "b"], hours, by_feature)
    return hmc.HashZchManagedCollisionModule(
        size, CPU, 2, eviction_policy_name=policy, eviction_config=config, **more
    )


def rows(collision, ids, weights=None, lengths=None):
    lengths = torch.ones(len(ids), dtype=torch.int64) if lengths is None else torch.tensor(lengths)
    jagged = JaggedTensor(values=torch.tensor(ids, dtype=torch.int64), lengths=lengths, weights=weights)
    return collision({"t": jagged})["t"]


@pytest.fixture
def clock(monkeypatch):
    """``clock(hours)`` sets the time."""
    now = [0]
    monkeypatch.setattr(hmc.time, "time", lambda: 3600.0 * now[0] + 7)

    def to(hours):
        now[0] = hours

    return to


@pytest.mark.parametrize("policy", [None, LRU, TTL])
def test_the_ids_with_rows_are_those_of_a_plain_model(clock, policy):
    draw, size, hours = random.Random(0), 20, 3
    collision, until = module(size, policy, hours), {}
    rows_before = collision._hash_zch_identities.clone()
    for step in range(200):
        clock(step)
        ids = [draw.choice([-1, 0, 2**63 - 1, -(2**63), *range(step // 4, step // 4 + 30)]) for _ in range(9)]
        found = rows(collision, ids).values().tolist()
        new = sorted(set(ids) - until.keys())
        free = size - len(until)
        if len(new) > free and policy is not None:
            due = [each for each in until if each not in ids and (policy is LRU or until[each] < step)]
            by_row = {int(i): r for r, i in enumerate(rows_before[:, 0])}
            due.sort(key=lambda each: (until[each], by_row[each]))
            for each in due[: len(new) - free]:
                del until[each]
            evicted = collision.evict()
            assert (0 if evicted is None else len(evicted)) == len(due[: len(new) - free])
        for each in new[: size - len(until)]:
            until[each] = 0
        for each in set(ids) & until.keys():
            until[each] = step + (hours if policy is not None else 0)
        rows_before = collision._hash_zch_identities.clone()
        row_of = {each: row for each, row in zip(ids, found, strict=True) if each in until}
        assert len(set(row_of.values())) == len(row_of)
        assert all(int(rows_before[row]) == each for each, row in row_of.items())
        assert int(collision.open_slots()) == size - len(until)
        assert all(0 <= row < size for row in found)
    before = {name: each.clone() for name, each in collision.state_dict().items()}
    found = rows(collision.eval(), [*until, 10**9]).values()
    assert all(torch.equal(before[name], each) for name, each in collision.state_dict().items())
    other = module(size, policy, hours).eval()
    other.load_state_dict(before)
    assert torch.equal(rows(other, [*until, 10**9]).values(), found)


def test_hours_of_each_feature(clock):
    collision = module(4, BY_FEATURE, by_feature=[1, 10])
    rows(collision, [1, 2, 3, 4], weights=torch.tensor([2, 2]))
    clock(5)
    rows(collision, [7], weights=torch.tensor([0, 1]))
    assert int(collision.open_slots()) == 0
    kept = set(collision._hash_zch_identities[:, 0].tolist())
    assert kept == {7, 3, 4, 2}
    with pytest.raises(ValueError, match=r"2 features.*3"):
        rows(collision, [7], weights=torch.tensor([0, 1, 0]))


def test_ids_without_a_row_are_left_out_where_that_is_asked():
    collision = module(2, disable_fallback=True)
    found = rows(collision, [5, 6, 5, 7], lengths=[1, 3, 0])
    assert found.values().tolist() == [0, 1, 0]
    assert found.lengths().tolist() == [1, 2, 0]
    readonly = collision({"t_readonly": JaggedTensor(values=torch.tensor([9]), lengths=torch.tensor([1]))})
    assert readonly["t_readonly"].values().tolist() == []


def test_dropped_ids_take_their_weights_along():
    tables = [
        EmbeddingBagConfig(num_embeddings=4, embedding_dim=4, name=name, feature_names=[name])
        for name in "tu"
    ]
    modules = {"t": module(4, disable_fallback=True), "u": module(4)}
    features = KeyedJaggedTensor(
        ["u", "t"],
        torch.tensor([8, 11, 12, 13, 14, 15, 16]),
        lengths=torch.tensor([0, 1, 4, 2]),
        weights=torch.tensor([8.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0]),
    )
    remapped = ManagedCollisionCollection(modules, tables)(features)
    assert remapped.lengths().tolist() == [4, 0, 0, 1]
    assert remapped["t"].weights().tolist() == [1.0, 2.0, 3.0, 4.0]
    assert remapped["u"].weights().tolist() == [8.0]


def test_a_collection_trains_behind_it(clock):
    tables = [EmbeddingBagConfig(num_embeddings=10, embedding_dim=4, name="t", feature_names=["a", "b"])]
    collision = ManagedCollisionCollection({"t": module(10, BY_FEATURE, by_feature=[1, 2])}, tables)
    model = ManagedCollisionEmbeddingBagCollection(
        EmbeddingBagCollection(tables=tables), collision, return_remapped_features=True
    )
    features = KeyedJaggedTensor(
        ["a", "b"], torch.tensor([10**12, -5, 10**12]), lengths=torch.tensor([1, 0, 1, 1])
    )
    values, remapped = model(features)
    assert values.values().shape == (2, 8)
    assert remapped.values().tolist() == [1, 0, 1]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"opt_in_prob": 50}, "opt_in_prob.*50"),
        ({"track_id_freq": True}, "track_id_freq"),
        ({"policy": LRU}, "LRU_EVICTION.*eviction_config.*single_ttl"),
        (
            {"policy": BY_FEATURE, "by_feature": [1]},
            "eviction_config.*per_feature_ttl",
        ),
        ({"size": 3}, "zch_size.*total_num_buckets.*3.*2"),
    ],
)
def test_what_is_not_supported_is_said(options, match):
    with pytest.raises(ValueError, match=match):
        module(**options)
    with pytest.raises(TypeError, match="'colour'"):
        module(colour="red")


def test_inference_mode_keeps_the_rows_in_training_too():
    collision = module(4)
    known = rows(collision, [7, 8]).values()
    collision.reset_inference_mode()
    rows(collision, [1, 2, 3, 4, 5])
    assert torch.equal(rows(collision, [7, 8]).values(), known)
    assert collision.open_slots().item() == 2


def test_a_module_made_for_inference_keeps_its_rows():
    collision = module(4, is_inference=True)
    rows(collision, [1, 2])
    assert collision.open_slots().item() == 4
    assert not collision.is_sharded


def test_the_number_of_buckets_can_be_left_out_of_state_dicts():
    parent = torch.nn.Sequential(module())
    assert "0._hash_zch_bucket" in parent.state_dict()
    assert hmc.make_hash_zch_buckets_non_persistent(parent) == 1
    assert "0._hash_zch_bucket" not in parent.state_dict()
    assert hmc.make_hash_zch_buckets_non_persistent(parent) == 0
