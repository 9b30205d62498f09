"""Virtual tables become tables with hashed keys."""

import logging

import pytest
import torch

from meshrec import KeyedJaggedTensor, fuse
from meshrec.compat.bridge import virtual_tables as vt
from meshrec.compat.bridge.embeddings import EmbeddingBagCollection, EmbeddingBagConfig
from meshrec.optim import SGD
from meshrec.tables import LFU, TTL, Hashed, LowestNorm, set_event_time


def table(policy, num_embeddings=1 << 50, **more):
    return EmbeddingBagConfig(
        num_embeddings=num_embeddings,
        embedding_dim=4,
        name="t",
        feature_names=["f"],
        use_virtual_table=True,
        virtual_table_eviction_policy=policy,
        **more,
    )


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (vt.CountBasedEvictionPolicy(100), LFU(half_life=69)),
        (vt.CountBasedEvictionPolicy(100, decay_rate=1.0), LFU()),
        (vt.CountBasedEvictionPolicy(100, eviction_threshold=0), None),
        (vt.TimestampBasedEvictionPolicy(100, eviction_ttl_mins=2), TTL(seconds=120)),
        (vt.TimestampBasedEvictionPolicy(100, eviction_ttl_mins=0), None),
        (vt.FeatureL2NormBasedEvictionPolicy(100, 0.5), LowestNorm()),
        (vt.FeatureL2NormBasedEvictionPolicy(100), None),
    ],
)
def test_policies_become_those_of_hashed_tables(policy, expected, caplog):
    with caplog.at_level(logging.WARNING):
        assert table(policy).keys == Hashed(max_rows=100, evict=expected)
    assert ("has no effect" in caplog.text) == (expected is not None and not isinstance(expected, TTL))


def test_a_virtual_table_trains():
    assert table(None, 50).keys == table(vt.NoEvictionPolicy(), 50).keys == Hashed(max_rows=50)
    policy = vt.TimestampBasedEvictionPolicy(3, eviction_ttl_mins=1)
    module = fuse(EmbeddingBagCollection(tables=[table(policy)]), optimizer=SGD(lr=0.1))
    for seconds, ids in ((1000, [2**60, -7]), (1100, [5])):
        set_event_time(module, seconds)
        features = KeyedJaggedTensor(["f"], torch.tensor(ids), lengths=torch.ones(len(ids)).int())
        module(features).values().sum().backward()
    assert module.hashed_tables()["t"].items()[0].tolist() == [5]


def test_what_has_no_counterpart_is_said():
    with pytest.raises(ValueError, match=r"a virtual table of 1,125,\S+ rows needs a budget"):
        table(None)
    with pytest.raises(ValueError, match="counterpart"):
        table("lru", 10)
    with pytest.raises(ValueError, match=r"decay_rate.*0.*1.*2"):
        table(vt.CountBasedEvictionPolicy(9, decay_rate=2))
    with pytest.raises(ValueError, match="virtual_table_eviction_policy"):
        EmbeddingBagConfig(10, 4, "t", virtual_table_eviction_policy=vt.NoEvictionPolicy())
