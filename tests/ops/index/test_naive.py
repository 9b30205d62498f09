"""The mix of IDs, the distinct IDs, and the index over drawn operations, against a few lines of Python."""

import copy
import pickle

import numpy as np
import pytest
import torch

from meshrec.ops.index import HashIndex, mix, unique, unmix

EDGES = [-(2**63), -(2**63) + 1, -2, -1, 0, 1, 2, 2**31, 2**32, 2**62, 2**63 - 2, 2**63 - 1]


def tensor(ids):
    return torch.tensor(ids, dtype=torch.int64)


def draw(generator, size, universe):
    return torch.from_numpy(generator.choice(universe, size))


@pytest.mark.parametrize("seed", [0, 1, -1, 2**64 - 1, 12345678901234567])
def test_mix_is_undone(seed):
    ids = torch.cat([tensor(EDGES), torch.arange(0, 2**20, 97), torch.arange(1000) << 40])
    keys = mix(ids, seed)
    assert len(torch.unique(keys)) == len(torch.unique(ids))
    assert torch.equal(unmix(keys, seed), ids)


def test_mix_is_that_of_the_data_room():
    from meshrec.data.hashing import mix as of_arrays

    ids = tensor(EDGES)
    assert torch.equal(
        mix(ids, 3), torch.from_numpy(of_arrays(ids.numpy().view(np.uint64), 3).view(np.int64))
    )


def test_unique_is_ascending():
    ids = tensor([5, -1, 5, 2**63 - 1, -(2**63), -1, 0])
    distinct, inverse = unique(ids)
    assert distinct.tolist() == [-(2**63), -1, 0, 5, 2**63 - 1]
    assert torch.equal(distinct[inverse], ids)
    assert [len(each) for each in unique(tensor([]))] == [0, 0]


class Model:
    """The index in ten lines."""

    def __init__(self):
        self.slots = {}

    def insert(self, ids):
        taken = set(self.slots.values())
        free = (slot for slot in range(len(taken) + len(ids)) if slot not in taken)
        given = [next(free) for _ in ids]
        self.slots.update(zip(ids, given, strict=True))
        return given

    def remove(self, ids):
        return [self.slots.pop(each) for each in ids]


def operate(index, model, generator, universe, largest):
    ids = draw(generator, int(generator.integers(0, largest)), universe)
    assert index.find(ids).tolist() == [model.slots.get(each, -1) for each in ids.tolist()]
    distinct, _ = unique(ids)
    known = index.find(distinct) >= 0
    if generator.random() < 0.55:
        new = distinct[~known]
        assert index.insert(new).tolist() == model.insert(new.tolist())
    else:
        old = distinct[known][torch.from_numpy(generator.permutation(int(known.sum())))]
        assert index.remove(old).tolist() == model.remove(old.tolist())
    assert index.num_live == len(model.slots)


@pytest.mark.parametrize("seed", range(4))
def test_drawn_operations(seed):
    generator = np.random.default_rng(seed)
    universe = np.concatenate([EDGES, generator.integers(-(2**63), 2**63, 500), np.arange(500) << 50])
    index, model = HashIndex(2000, seed=seed), Model()
    for _ in range(100):
        operate(index, model, generator, universe, 200)
    ids, slots = index.items()
    assert ids.tolist() == sorted(model.slots)
    assert slots.tolist() == [model.slots[each] for each in ids.tolist()]
    assert torch.equal(index.ids_of(slots), ids)
    for other in (copy.deepcopy(index), pickle.loads(pickle.dumps(index))):
        assert all(map(torch.equal, other.items(), index.items()))
        new = tensor([42, 43, 44])
        again = copy.deepcopy(model)
        assert other.insert(new).tolist() == again.insert(new.tolist())


def test_bad_input_changes_nothing():
    index = HashIndex(3, name="table 't0'")
    index.insert(tensor([-1, 0]))
    for call, ids, message in [
        (index.insert, [2, 1], "distinct and ascending"),
        (index.insert, [1, 1], "distinct and ascending"),
        (index.insert, [-1, 7], "ID -1 has a slot"),
        (index.insert, [-1], "ID -1 has a slot"),
        (index.insert, [5, 6], "room for 3"),
        (index.remove, [0, 9], "no ID 9"),
        (index.remove, [0, 0], "distinct"),
        (index.free, [0, 2], "slot 2 is free"),
        (index.free, [1, 0, 1], "distinct"),
        (index.ids_of, [0, 2], "slot 2 is free"),
        (index.ids_of, [-1], "slot -1 is free"),
    ]:
        with pytest.raises(ValueError, match=f"'t0'.*{message}"):
            call(tensor(ids))
    with pytest.raises(ValueError, match="int64"):
        index.find(torch.tensor([1.0]))
    with pytest.raises(ValueError, match="max_slots"):
        HashIndex(0)
    assert index.items()[0].tolist() == [-1, 0]
    assert index.insert(tensor([3])).tolist() == [2]
