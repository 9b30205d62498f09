import torch

from meshrec.distributed.touched_rows import ids_by_key
from meshrec.ops import tbe


def test_ids_by_route_come_from_all_blocks():
    # Two blocks (ranks that asked) of two routes with two bags each.
    offsets = torch.tensor([0, 1, 2, 2, 4, 5, 6, 8, 8])
    segments = torch.tensor([0, 2, 4, 6, 8])
    lookups = tbe.Lookups(torch.arange(8), offsets, None, segments, 2, [], [], [], False, [])
    assert [values.tolist() for values in ids_by_key(lookups)] == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert ids_by_key(lookups._replace(segments=torch.tensor([0]), num_keys=0)) == []
