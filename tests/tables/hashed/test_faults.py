"""Faults that tables for raw IDs had elsewhere.

Others stand where their subject is: IDs whose rows go while a batch has them, tables that fill within one
batch (test_policies.py), checkpoints while IDs come, and their loading under another plan
(tests/distributed/test_hashed.py).
"""

import pytest
import torch

from meshrec import EmbeddingBagCollection, EmbeddingBagConfig, Hashed, KeyedJaggedTensor, fuse
from meshrec.optim import SGD
from meshrec.tables import LFU, LRU, MinCount, MinCountSketch


def make(keys, features=("f",)):
    config = EmbeddingBagConfig(name="t", embedding_dim=2, feature_names=list(features), keys=keys)
    module = fuse(EmbeddingBagCollection([config]), optimizer=SGD(lr=0.5))
    return module, module.hashed_tables()["t"]


def read(module, *ids, train=True):
    """Read the IDs of each feature, one a bag; ``train``: with gradients of one."""
    keys = [name for config in module.embedding_bag_configs() for name in config.feature_names]
    values = torch.tensor([each for own in ids for each in own], dtype=torch.int64)
    with torch.set_grad_enabled(train):
        features = KeyedJaggedTensor(keys, values, lengths=torch.ones(len(values)).int())
        out = module(features).values()
    if train:
        out.sum().backward()
    return out.detach()


def test_no_row_is_lost_when_the_index_grows():
    module, table = make(Hashed(max_rows=60_000))
    drawn = torch.randint(-(2**63), 2**63 - 1, (50_000,), generator=torch.Generator().manual_seed(0))
    expected, begin = table.storage.initial.values(drawn), 0
    for size in (1, 6, 1, 50, 500, 9, 5000, 44_433):
        read(module, drawn[begin : begin + size].tolist())
        expected[begin : begin + size] -= 0.5
        begin += size
        some = torch.randint(0, len(drawn), (300,), generator=torch.Generator().manual_seed(begin))
        assert torch.equal(read(module, drawn[some].tolist(), train=False), expected[some])
    assert torch.equal(read(module, drawn.tolist(), train=False), expected)
    assert table.num_alive == len(drawn)


def test_no_id_is_reserved():
    ids = [-1, 0, 2**63 - 1, -(2**63), 2**62, 1]
    module, table = make(Hashed(max_rows=6))
    first = read(module, ids)
    assert torch.equal(first, table.storage.initial.values(torch.tensor(ids)))
    assert torch.equal(read(module, ids, train=False), first - 0.5)
    assert sorted(table.items()[0].tolist()) == sorted(ids)


def test_evaluation_between_the_passes_of_a_batch_leaves_its_new_rows():
    module, table = make(Hashed(max_rows=4))
    first = table.storage.initial.values(torch.tensor([1, 2, 3]))
    out = module(KeyedJaggedTensor(["f"], torch.tensor([1, 2]), lengths=torch.ones(2).int())).values()
    for ids in ([1, 2], [3, 1, 2], [1, 2]):
        assert torch.equal(read(module, ids, train=False), first[torch.tensor(ids) - 1])
    out.sum().backward()
    del out
    assert torch.equal(read(module, [1, 2, 3], train=False), first - torch.tensor([[0.5], [0.5], [0.0]]))
    assert table.num_alive == 2


def test_slots_are_released_after_the_update_even_if_an_output_is_kept():
    module, table = make(Hashed(max_rows=4, admit=MinCount(3)))
    features = KeyedJaggedTensor(["f"], torch.tensor([1, 2]), lengths=torch.ones(2).int())
    kept = module(features).values()
    kept.sum().backward(retain_graph=True)
    table.release()
    assert table.key_index.num_live == len(table.slots.in_flight) == 0  # no ID was admitted
    with pytest.raises(ValueError, match="retain_graph"):
        kept.sum().backward()
    dropped = module(features).values()  # without a backward pass
    assert table.key_index.num_live == 2
    del dropped
    table.release()
    assert table.key_index.num_live == 0


def test_two_features_bring_one_new_id():
    module, table = make(Hashed(max_rows=4), ["a", "b"])
    out = read(module, [7, -1], [-1, 7])
    assert torch.equal(out[0, :2], out[1, 2:])
    assert table.num_alive == table.report.new == 2
    assert torch.equal(read(module, [7, -1], [-1, 7], train=False), out - 1)  # the gradient of both


@pytest.mark.parametrize("times", [200, 255, 256, 300, 1000])
def test_cells_of_a_sketch_stay_full(times):
    """Counts of a byte do not begin anew at 256."""
    module, table = make(Hashed(max_rows=8, admit=MinCountSketch(255, bytes=64)))
    for part in range(0, times, 100):
        read(module, [5] * min(100, times - part))
    assert (table.num_alive == 1) == (times >= 255)
    module, table = make(Hashed(max_rows=8, admit=MinCountSketch(255, bytes=64)))
    read(module, [5] * times)
    assert (table.num_alive == 1) == (times >= 255)


def test_large_counts_keep_their_order():
    module, table = make(Hashed(max_rows=2, evict=LFU(half_life=100)))
    read(module, [1, 2])
    table.memory["uses"][table.key_index.find(table.live_keys()[0])] = (1 << 62) - 1
    read(module, [2])
    read(module, [3])  # 1 goes, read less by one than 2
    assert set(table.items()[0].tolist()) == {2, 3}


def test_an_id_counts_from_nothing_when_it_comes_again():
    module, table = make(Hashed(max_rows=1, admit=MinCount(2), evict=LRU()))
    read(module, [5, 5])
    read(module, [6, 6])
    read(module, [5])
    assert table.items()[0].tolist() == [6]
    read(module, [5])
    assert table.items()[0].tolist() == [5]
