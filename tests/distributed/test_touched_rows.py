import torch

from meshrec.distributed.input_dist import LookupIds
from meshrec.distributed.touched_rows import _by_route


def test_ids_by_route_come_from_all_blocks():
    # Two blocks (ranks that asked) of two routes with two bags each.
    offsets = torch.tensor([0, 1, 2, 2, 4, 5, 6, 8, 8])
    ids = LookupIds(torch.arange(8), offsets, None, torch.tensor([0, 2, 4, 6, 8]), [2, 2], False)
    assert [values.tolist() for values in _by_route(ids, 2)] == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert list(_by_route(ids._replace(segments=torch.tensor([0])), 0)) == []
