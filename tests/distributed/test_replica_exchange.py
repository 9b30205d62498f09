import torch

from meshrec.distributed.lookup_batch import LookupIds
from meshrec.distributed.replicas import ReplicaSizes, pack_routes, reduce_bytes
from meshrec.ops import operators


def test_bytes_of_a_sum():
    assert reduce_bytes([(10, 3), (2, 7)], 2) == 4 * (40 + 16)
    assert reduce_bytes([(10, 3)], 4) == 2 * 3 * 4 * 40 // 4


def lookup_ids(bags, wide, weighted, seed=0):
    """Two messages of three routes."""
    generator = torch.Generator().manual_seed(seed)
    segments = torch.tensor([0, *bags]).cumsum(0)
    offsets = torch.cat(
        [torch.zeros(1).long(), torch.randint(0, 3, (sum(bags),), generator=generator).cumsum(0)]
    )
    num_ids = int(offsets[-1])
    values = torch.randint(0, 9, (num_ids,), generator=generator).to(torch.int64 if wide else torch.int32)
    weights = torch.rand(num_ids, generator=generator) if weighted else None
    return LookupIds(values, offsets, weights, segments, [], False)


def check_packed(bags, wide, weighted):
    ids, routes = lookup_ids(bags, wide, weighted), [0, 2]
    shape = 1, 2, 3
    num_ids = ids.offsets[ids.segments].diff().view(shape)
    sizes = ReplicaSizes(torch.zeros(1, 2, 4), torch.tensor(bags).view(shape), num_ids)
    header = sizes.headers_of(routes, (2 if wide else 1) + weighted)[0]
    message = pack_routes(ids, routes, header)
    values, offsets, weights, segments = operators.unpack_ids(
        message.words, message.header, [0, 1], 2, weighted, wide
    )
    kept = [0, 2, 3, 5]
    assert segments.diff().tolist() == [bags[i] for i in kept]
    slices = [slice(*ids.offsets[ids.segments[i : i + 2]].tolist()) for i in kept]
    assert torch.equal(values, torch.cat([ids.values[each] for each in slices]))
    lengths = [ids.offsets.diff()[ids.segments[i] : ids.segments[i + 1]] for i in kept]
    assert torch.equal(offsets.diff(), torch.cat(lengths))
    if weighted:
        assert torch.equal(weights, torch.cat([ids.weights[each] for each in slices]))
    return header[:, 3].tolist()


def test_some_routes_of_a_message_are_a_message():
    assert check_packed([2, 2, 2, 3, 3, 3], wide=False, weighted=False) == [2, 3]
    assert check_packed([2, 1, 2, 3, 3, 4], wide=True, weighted=True) == [2, -1]
    assert check_packed([0, 1, 2, 3, 3, 4], wide=False, weighted=True) == [-1, -1]
