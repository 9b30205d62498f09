import torch

from meshrec.optim.parts import mark_part, part_of


def test_parts_are_recorded_on_parameters():
    parameter, group = torch.nn.Parameter(torch.zeros(1)), object()
    assert part_of(parameter) is None
    mark_part(parameter, group, counts=True)
    assert part_of(parameter) == (group, True)
