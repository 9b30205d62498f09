import copy
import copyreg
import pickle

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from meshrec.comms.mesh import default_env
from meshrec.distributed.split_tensor import LocalRectangles, SplitTensor, region
from meshrec.tables.table import Rectangle

SIZE = (6, 5)
PINWHEEL = [
    [Rectangle(0, 0, 4, 0, 2), Rectangle(0, 2, 6, 3, 5)],
    [Rectangle(0, 0, 2, 2, 5), Rectangle(0, 4, 6, 0, 3), Rectangle(0, 2, 4, 2, 3)],
]
COLUMNS = [[Rectangle(0, 0, 6, 0, 2), Rectangle(0, 0, 6, 4, 5)], [Rectangle(0, 0, 6, 2, 4)]]
ONE = [[], [Rectangle(0, 0, 6, 0, 5)]]


def split(whole, holders):
    env = default_env()
    own = holders[env.shard.rank]
    parts = [region(whole, rectangle).clone() for rectangle in own]
    local = LocalRectangles(parts, own, torch.empty(0, dtype=whole.dtype), whole.shape)
    return SplitTensor.of(local, holders, env.shard_mesh)


def whole_again(holders, dtype, per_row):
    whole = torch.arange(30).view(SIZE).to(dtype)
    whole = whole[:, 0].clone() if per_row else whole
    table = split(whole, holders)
    assert (table.dtype, table.shape, table.device.type) == (dtype, whole.shape, "cpu")
    assert torch.equal(table.full_tensor(), whole)
    again = table.redistribute(placements=[Replicate()])
    assert type(again.to_local()) is torch.Tensor
    assert torch.equal(again.to_local(), whole)
    other = copy.deepcopy(table)
    assert torch.equal(other, table)
    other.copy_(whole + 1)
    assert not torch.equal(other, table) or not table.to_local().local_shards()
    assert torch.equal(other.full_tensor(), whole + 1)
    assert torch.equal(table.copy_(other).full_tensor(), whole + 1)
    assert torch.equal(table.copy_(again).full_tensor(), whole)
    assert torch.equal(table.to(torch.float64).full_tensor(), whole.double())
    assert torch.zeros_like(table).full_tensor().sum() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("holders", "per_row"), [(PINWHEEL, False), (COLUMNS, False), (COLUMNS, True), (ONE, False), (ONE, True)]
)
def test_the_whole_is_there_on_every_rank(ranks, holders, dtype, per_row):
    ranks(2).run(whole_again, holders, dtype, per_row)


def words():
    table = split(torch.zeros(SIZE), ONE)
    return repr(table), repr(table.to_local())


def test_printing_tells_what_is_here(ranks):
    first, second = ranks(2).run(words)
    assert first == (
        "SplitTensor([6, 5], torch.float32, here: nothing)",
        "LocalRectangles(nothing of [6, 5])",
    )
    assert second[0] == "SplitTensor([6, 5], torch.float32, here: [0:6, 0:5])"


def refusals():
    # A test of the bridge, which pickles by rank, may have run in these processes.
    copyreg.dispatch_table.pop(SplitTensor, None)
    table = split(torch.zeros(SIZE), COLUMNS)
    for attempt, match in (
        (lambda: table + 1, "aten.add.Tensor is not for a table that is split over ranks"),
        (lambda: torch.ones(SIZE).copy_(table), r"Take the whole with full_tensor\(\)"),
        (lambda: table.to_local().sum(), "aten.sum.default is not for a table"),
        (lambda: pickle.dumps(table), r"cannot be pickled: a rank has only its rectangles\. Take"),
        (lambda: table.redistribute(placements=[Shard(0)]), r"redistributed to Replicate\(\) only"),
        (lambda: table.copy_(torch.ones(6, 4)), r"of shape \[6, 5\] cannot take one of shape \[6, 4\]"),
        (lambda: table.copy_(split(torch.ones(SIZE), PINWHEEL)), "holds other rectangles of the table"),
    ):
        with pytest.raises(ValueError, match=match):
            pytest.fail(f"{match!r} was not raised: got {attempt()}")
    return bool((table.full_tensor() == 0).all())


def test_what_needs_the_whole_says_so(ranks):
    assert ranks(2).run(refusals) == [True, True]
