import math

import pytest
import torch

from meshrec import JaggedTensor
from meshrec.models import judge_targets, sampled_softmax
from meshrec.models.next_item import ItemChunk, last_ids

NUM_ITEMS, WIDTH = 40, 6


def chunks(vectors, size):
    return iter([ItemChunk(first, vectors[first : first + size]) for first in range(0, len(vectors), size)])


def test_drawing_every_item_once_is_the_full_softmax():
    torch.manual_seed(0)
    query, items, target = (
        torch.randn(5, WIDTH),
        torch.randn(NUM_ITEMS, WIDTH),
        torch.tensor([3, 0, 39, 3, 7]),
    )
    drawn = torch.randperm(NUM_ITEMS)
    found = sampled_softmax(
        query,
        items[target],
        items[drawn],
        target_T=target,
        drawn_N=drawn,
        log_expected_N=0.0,
        temperature=0.5,
    )
    expected = torch.nn.functional.cross_entropy(query @ items.T / 0.5, target, reduction="none")
    assert torch.allclose(found, expected, atol=1e-5)


def test_the_correction_makes_the_sum_over_drawn_items_unbiased():
    """The mean over many draws of the sum that a loss takes the log of is the sum over all items."""
    torch.manual_seed(0)
    query, items, target = torch.randn(1, WIDTH), torch.randn(NUM_ITEMS, WIDTH), torch.tensor([4])
    own = query @ items[4]
    sums = []
    for _ in range(3000):
        drawn = torch.randint(NUM_ITEMS, (10,))
        loss = sampled_softmax(
            query,
            items[target],
            items[drawn],
            target_T=target,
            drawn_N=drawn,
            log_expected_N=math.log(10 / NUM_ITEMS),
        )
        sums.append((loss + own).exp())
    assert torch.stack(sums).mean() == pytest.approx(float((query @ items.T).exp().sum()), rel=0.05)


@pytest.mark.parametrize("size", [7, 40, 100])
def test_places_and_losses_are_those_among_unseen_items(size):
    torch.manual_seed(0)
    query, items = torch.randn(3, WIDTH), torch.randn(NUM_ITEMS, WIDTH)
    target = torch.tensor([5, -1, 11])
    seen = [[1, 2, 39], [4], [11, 0]]
    bags = JaggedTensor(torch.tensor([1, 2, 39, 4, 11, 0]), lengths=torch.tensor([len(bag) for bag in seen]))
    found = judge_targets(query, items[target], target, chunks(items, size), seen=bags)
    for sample in (0, 2):
        left = [item for item in range(NUM_ITEMS) if item not in seen[sample] or item == target[sample]]
        products = items[left] @ query[sample]
        own = items[target[sample]] @ query[sample]
        assert found[sample, 1] == 1 + (products > own + 1e-6).sum()
        assert found[sample, 0] == pytest.approx(float(products.logsumexp(0) - own), abs=1e-5)
    assert found[1].tolist() == [0, 0]


def test_equal_products_share_their_mean_place():
    items = torch.ones(9, 2)
    found = judge_targets(torch.ones(1, 2), items[:1], torch.tensor([0]), chunks(items, 4))
    assert found[0, 1] == 5


def test_products_that_are_no_numbers_come_last():
    items = torch.randn(9, 2)
    found = judge_targets(torch.full((1, 2), float("nan")), items[:1], torch.tensor([0]), chunks(items, 4))
    assert found[0, 1] >= 9


def test_last_ids():
    bags = JaggedTensor(torch.tensor([4, 5, 6]), lengths=torch.tensor([2, 0, 1]))
    assert last_ids(bags).tolist() == [5, -1, 6]
    none = torch.zeros(2, dtype=torch.int64)
    assert last_ids(JaggedTensor(none[:0], lengths=none)).tolist() == [-1, -1]
