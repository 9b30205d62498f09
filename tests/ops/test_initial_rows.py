"""First rows: the kernel equals the reference, and each row is a function of its ID alone."""

import pytest
import torch

from meshrec.ops import initial_rows, operators
from meshrec.ops.library import has_kernels

IDS = torch.tensor([-1, 0, 1, 2**63 - 1, -(2**63), 2**62, 5, 5])


@pytest.mark.parametrize(("low", "high"), [(-0.1, 0.1), (0.3, 7.0), (-5.0, -4.9)])
@pytest.mark.parametrize("columns", [(0, 7), (3, 4), (2, 2)])
def test_the_kernel_equals_the_reference(low, high, columns):
    if not has_kernels:
        pytest.skip("the kernels are not compiled")
    step = torch.tensor((high - low) * 2.0**-24, dtype=torch.float32).item()
    found = operators.first_rows(IDS, 12345, low, step, *columns)
    assert torch.equal(found, initial_rows.first_rows(IDS, 12345, low, step, *columns))


@pytest.mark.parametrize("width", [1, 7, 64])
def test_rows_are_written_where_they_lie(width):
    slots = torch.tensor([3, 0, 11, 5, 6, 7, 9, 1])
    rows, expected = torch.zeros(12, width), torch.zeros(12, width)
    initial_rows.write_uniform_rows(rows, slots, IDS, seed=4, low=-0.1, high=0.1, column=2)
    step = initial_rows.value_spacing(-0.1, 0.1)
    initial_rows.begin_rows(expected, slots, IDS, 4, -0.1, step, 2)
    assert torch.equal(rows, expected)
    assert torch.equal(
        rows[slots], initial_rows.uniform_rows(IDS, seed=4, low=-0.1, high=0.1, columns=(2, 2 + width))
    )
    torch.library.opcheck(torch.ops.meshrec.begin_rows, (rows, slots, IDS, 4, -0.1, step, 2))
    if has_kernels:
        with pytest.raises(ValueError, match=r"slot 12.*\[0.*12"):
            initial_rows.write_uniform_rows(rows, slots + 1, IDS, seed=4, low=-0.1, high=0.1, column=2)


def test_rows_are_functions_of_seed_id_and_column():
    rows = initial_rows.uniform_rows(IDS, seed=1, low=-1.0, high=1.0, columns=(0, 64))
    assert torch.equal(rows[6], rows[7])
    assert torch.equal(
        rows[2:3], initial_rows.uniform_rows(IDS[2:3], seed=1, low=-1.0, high=1.0, columns=(0, 64))
    )
    assert torch.equal(
        rows[:, 3:9], initial_rows.uniform_rows(IDS, seed=1, low=-1.0, high=1.0, columns=(3, 9))
    )
    other = initial_rows.uniform_rows(IDS, seed=2, low=-1.0, high=1.0, columns=(0, 64))
    assert not (rows == other).any()


def test_values_are_uniform():
    rows = initial_rows.uniform_rows(torch.arange(2000), seed=0, low=0.0, high=1.0, columns=(0, 50))
    assert rows.min() >= 0
    assert rows.max() < 1.0
    assert torch.allclose(rows.mean(0), torch.full((50,), 0.5), atol=0.04)
    assert torch.allclose(rows.var(0), torch.full((50,), 1 / 12), atol=0.01)
    counts = torch.histc(rows, bins=16, min=0, max=1)
    assert (counts / counts.sum() - 1 / 16).abs().max() < 0.003
