"""The samples of a step, gathered over ranks that have different numbers of them."""

import pytest
import torch
import torch.distributed as dist

from meshrec.comms.mesh import default_env
from meshrec.models.step_samples import StepSamples


def rows_of(sizes):
    """Return the IDs and vectors of all ranks."""
    ids = torch.arange(sum(sizes))
    return ids, torch.stack([ids.float() ** 2, ids.float() + 0.5], dim=1)


def gathered(sizes):
    """Return what this rank gathers, and the gradient of its own rows for a loss that differs by rank."""
    ids, vectors = (each.split(sizes)[dist.get_rank()].clone() for each in rows_of(sizes))
    samples = StepSamples()
    samples.join(default_env().world)
    found = samples(vectors.requires_grad_(), ids)
    (found.rows[0] * (1 + dist.get_rank())).sin().sum().backward()
    return found.rows[1], found.rows[0].detach(), found.first, vectors.grad


@pytest.mark.parametrize("sizes", [[3, 2], [0, 4], [2, 0], [0, 0]])
def test_rows_of_all_ranks_and_their_gradients(sizes, ranks):
    ids, vectors = rows_of(sizes)
    vectors.requires_grad_()
    sum((vectors * (1 + rank)).sin().sum() for rank in range(2)).backward()
    for rank, (all_ids, all_vectors, first, grad) in enumerate(ranks(2).run(gathered, sizes)):
        assert torch.equal(all_ids, ids)
        assert torch.equal(all_vectors, vectors)
        assert first == sum(sizes[:rank])
        torch.testing.assert_close(grad, vectors.grad.split(sizes)[rank])


def test_one_rank_gathers_nothing():
    own = torch.ones(2, 3)
    found = StepSamples()(own)
    assert (found.rows[0] is own, found.first) == (True, 0)
