"""Passes over marked scores: the kernels equal the reference."""

import pytest
import torch

from meshrec.ops import operators
from meshrec.ops.index import marked
from meshrec.ops.library import has_kernels

pytestmark = pytest.mark.skipif(not has_kernels, reason="no kernels are built")
LEAST, MOST = -(2**63), 2**63 - 1
GENERATOR = torch.Generator().manual_seed(0)


def drawn(low, high, count=70_000, dtype=torch.int64):
    return torch.randint(low, high, (count,), generator=GENERATOR, dtype=dtype)


VALUES = {
    "few": drawn(0, 3),
    "words": torch.cat([drawn(LEAST, MOST), torch.tensor([LEAST, MOST, 0, -1])]),
    "steps": drawn(0, 5000, dtype=torch.int32),
    "negative": drawn(-(2**31), 2**31 - 1, dtype=torch.int32),
    "one": torch.tensor([7]),
    "none": torch.tensor([], dtype=torch.int64),
}


@pytest.mark.parametrize("share", [None, 0.0, 0.4])
@pytest.mark.parametrize("case", VALUES)
def test_the_kernels_equal_the_reference(case, share):
    values = VALUES[case]
    marks = None if share is None else torch.rand(len(values), generator=GENERATOR) < share
    spread = operators.marked_range(values, marks)
    assert torch.equal(spread, marked.marked_range(values, marks))
    base = int(values.min()) if len(values) else 0
    for shift, size, start in [
        (0, 4096, base),
        (3, 17, base),
        (52, 4096, base),
        (40, 100, base // 3),
        (63, 2, base),
    ]:
        counts = operators.marked_histogram(values, marks, start, shift, size)
        assert torch.equal(counts, marked.marked_histogram(values, marks, start, shift, size))
    for least, greatest in [(LEAST, MOST), (1, 1), (-(2**40), 2**40), (5, 4), (MOST, MOST)]:
        found = operators.marked_between(values, marks, least, greatest)
        assert torch.equal(found, marked.marked_between(values, marks, least, greatest))


def test_ops_have_the_right_schemas():
    values, marks = drawn(0, 50, 300), torch.rand(300) < 0.5
    torch.library.opcheck(torch.ops.meshrec.marked_range, (values, marks))
    torch.library.opcheck(torch.ops.meshrec.marked_histogram, (values, None, 3, 1, 20))
    torch.library.opcheck(torch.ops.meshrec.marked_between, (values, marks, 3, 20))


def test_other_tensors_are_refused():
    with pytest.raises(ValueError, match=r"int32.*int64"):
        operators.marked_range(torch.zeros(3), None)
    with pytest.raises(ValueError, match="3 values"):
        operators.marked_between(torch.zeros(3, dtype=torch.int64), torch.ones(2) > 0, 0, 1)
    with pytest.raises(ValueError, match=r"shift.*\[0, 63\]"):
        operators.marked_histogram(torch.zeros(3, dtype=torch.int64), None, 0, 64, 4)
