import torch

from meshrec.optim.parts import mark_shard, shard_info_of


def test_parts_are_recorded_on_parameters():
    parameter, group = torch.nn.Parameter(torch.zeros(1)), object()
    assert shard_info_of(parameter) is None
    mark_shard(parameter, group, is_sharded=True)
    assert shard_info_of(parameter) == (group, True)
