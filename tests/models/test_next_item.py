import math
from dataclasses import replace

import pytest
import torch

from meshrec import JaggedTensor
from meshrec.models import (
    DotProduct,
    MixtureOfLogits,
    SampledSoftmax,
    evaluate_targets,
    sampled_softmax,
    top_items,
)
from meshrec.models.next_item import (
    NO_ITEM,
    ItemChunk,
    NegativeSampler,
    NewUsers,
    NewUserScores,
    last_ids,
)
from meshrec.models.repeats import RepeatedItems
from meshrec.models.trends import TrendScores

NUM_ITEMS, WIDTH = 40, 6


def chunks(vectors, size):
    ids = torch.arange(len(vectors))
    return map(ItemChunk, ids.split(size), vectors.split(size))


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
        similarity=DotProduct(temperature=0.5),
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
    target = torch.tensor([5, NO_ITEM, 11])
    seen = [[1, 2, 39], [4], [11, 0]]
    bags = JaggedTensor(torch.tensor([1, 2, 39, 4, 11, 0]), lengths=torch.tensor([len(bag) for bag in seen]))
    found = evaluate_targets(query, items[target.clamp(min=0)], target, chunks(items, size), seen=bags)
    for sample in (0, 2):
        left = [item for item in range(NUM_ITEMS) if item not in seen[sample] or item == target[sample]]
        products = items[left] @ query[sample]
        own = items[target[sample]] @ query[sample]
        assert found[sample, 1] == 1 + (products > own + 1e-6).sum()
        assert found[sample, 0] == pytest.approx(float(products.logsumexp(0) - own), abs=1e-5)
    assert found[1].tolist() == [0, 0, 0]
    assert found[:, 2].tolist() == [0, 0, 0]


def test_equal_products_share_their_mean_place():
    items = torch.ones(9, 2)
    found = evaluate_targets(torch.ones(1, 2), items[:1], torch.tensor([0]), chunks(items, 4))
    assert found[0, 1:].tolist() == [5, 8]


def test_products_that_are_no_numbers_come_last():
    items = torch.randn(9, 2)
    found = evaluate_targets(torch.full((1, 2), float("nan")), items[:1], torch.tensor([0]), chunks(items, 4))
    assert found[0, 1] >= 9


def test_last_ids():
    bags = JaggedTensor(torch.tensor([4, 5, 6]), lengths=torch.tensor([2, 0, 1]))
    assert last_ids(bags).tolist() == [5, NO_ITEM, 6]
    none = torch.zeros(2, dtype=torch.int64)
    assert last_ids(JaggedTensor(none[:0], lengths=none)).tolist() == [NO_ITEM, NO_ITEM]


def test_queries_that_require_gradients_are_ranked():
    items = torch.randn(9, 2, generator=torch.Generator().manual_seed(0))
    query = items[:1].clone().requires_grad_()
    plain = evaluate_targets(query.detach(), items[:1], torch.tensor([0]), chunks(items, 4))
    found = evaluate_targets(query, items[:1], torch.tensor([0]), chunks(items, 4))
    assert torch.equal(found, plain)
    assert not found.requires_grad


@pytest.mark.parametrize("size", [3, 40])
def test_top_items_are_those_of_a_full_sort(size):
    torch.manual_seed(0)
    query, items = torch.randn(4, WIDTH), torch.randn(NUM_ITEMS, WIDTH)
    ids = torch.arange(NUM_ITEMS) * 7 - 100  # as a table with hashed keys has them
    seen = JaggedTensor(ids[[3, 4, 5, 9]], lengths=torch.tensor([1, 0, 3, 0]))
    chunks = map(ItemChunk, ids.split(size), items.split(size))
    found = top_items(query, chunks, 6, seen=seen)
    scores = query @ items.T
    scores[0, 3] = scores[2, 4] = scores[2, 5] = scores[2, 9] = float("-inf")
    expected = scores.sort(dim=1, descending=True)
    assert torch.allclose(found.scores_BK, expected.values[:, :6], atol=1e-6)
    assert torch.equal(found.ids_BK, ids[expected.indices[:, :6]])


def test_fewer_items_than_wanted_leave_empty_places():
    found = top_items(torch.ones(1, 2), chunks(torch.ones(2, 2), 4), 3)
    assert found.scores_BK[0].tolist() == [2, 2, float("-inf")]


@pytest.mark.parametrize("similarity", [DotProduct(normalise=True, temperature=0.1), MixtureOfLogits(WIDTH)])
def test_pairs_are_the_diagonal_of_the_table(similarity):
    torch.manual_seed(0)
    query, items = (
        similarity.convert_queries(torch.randn(9, WIDTH)),
        similarity.convert_items(torch.randn(9, WIDTH)),
    )
    assert torch.allclose(
        similarity.score_pairs(query, items), similarity.score_matrix(query, items).diagonal(), atol=1e-4
    )


def test_a_mixture_is_a_weighted_mean_of_the_cosines_of_components():
    torch.manual_seed(0)
    mixture = MixtureOfLogits(WIDTH, num_query=2, num_item=3, component=4, temperature=0.5)
    one, other = torch.randn(1, WIDTH), torch.randn(1, WIDTH)
    of_query = mixture.query_components(one).view(2, 4)
    of_item = mixture.item_components(other).view(3, 4)
    cosines = torch.nn.functional.cosine_similarity(of_query[:, None], of_item[None], dim=2).flatten()
    gate = mixture.query_gate(one)[0] + mixture.item_gate(other)[0] + mixture.pair_gate(cosines)
    expected = (gate.softmax(0) * cosines).sum() / 0.5
    found = mixture.score_matrix(mixture.convert_queries(one), mixture.convert_items(other))
    assert found.item() == pytest.approx(expected.item(), abs=1e-5)


@pytest.mark.parametrize("kind", ["uniform", "popular"])
def test_draws_follow_their_shares_and_change_with_the_step(kind):
    ids, counts = torch.arange(5) * 10, torch.tensor([1, 2, 3, 4, 0])
    draws = NegativeSampler(ids, SampledSoftmax(negatives=kind, num_negatives=50_000), counts_I=counts)
    first, second = draws(torch.zeros(0)), draws(torch.zeros(0))
    assert not torch.equal(first.ids_N, second.ids_N)
    shares = torch.bincount(first.ids_N // 10, minlength=5) / 50_000
    expected = torch.full((5,), 0.2) if kind == "uniform" else counts / 10
    assert torch.allclose(shares, expected, atol=0.01)
    at = first.ids_N // 10
    known = expected[at] > 0  # an item without a count is drawn once in a while
    assert torch.allclose(first.log_expected_N.exp()[known], expected[at][known] * 50_000, rtol=0.01)


def test_negatives_in_the_batch_are_its_targets():
    ids, targets = torch.arange(5) * 10, torch.tensor([30, 0, 10, 20, 30, 0])
    counts = torch.tensor([2, 1, 1, 2, 0])
    softmax = SampledSoftmax(negatives="in_batch", num_negatives=3)
    draws = NegativeSampler(ids, softmax, counts_I=counts)
    times = torch.zeros(5)
    for _ in range(2000):
        found = draws(targets)
        times += torch.bincount(found.ids_N // 10, minlength=5)
        assert len(found.ids_N) == 3
        assert torch.allclose(found.log_expected_N.exp(), counts[found.ids_N // 10] / 2, rtol=1e-2)
    assert torch.allclose(times / 2000, counts / 2, atol=0.03)
    every = NegativeSampler(ids, replace(softmax, num_negatives=9), counts_I=counts)(targets)
    assert every.ids_N.tolist() == targets.sort().values.tolist()
    assert not len(draws(targets[:0]).ids_N)
    with pytest.raises(ValueError, match=r"'in_batch'.*Dataset.item_counts"):
        NegativeSampler(ids, softmax)
    with pytest.raises(ValueError, match=r"temperature 0.0.*above 0"):
        SampledSoftmax(temperature=0.0)


def exact_case():
    """Integers, whose dot products are exact in any order, with many ties; samples for three blocks."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randint(-2, 3, (300, 4), generator=generator).float()
    items = torch.randint(-2, 3, (NUM_ITEMS, 4), generator=generator).float()
    ids = torch.arange(NUM_ITEMS) * 7 - 100
    lengths = torch.randint(0, 5, (300,), generator=generator)
    seen = torch.cat([torch.randperm(NUM_ITEMS, generator=generator)[: int(length)] for length in lengths])
    target = torch.randint(NUM_ITEMS, (300,), generator=generator)
    is_new = torch.rand(300, generator=generator) < 0.2
    trends = TrendScores(ids, torch.randint(-2, 3, (NUM_ITEMS,), generator=generator).float(), 0.5)
    popular = NewUserScores(ids, torch.randint(-9, 0, (NUM_ITEMS,), generator=generator).float())
    # For every third sample, the first two items are repeated: 1.5 times the similarity, plus 1.
    sample = torch.arange(0, 300, 3).repeat_interleave(2)
    repeated = RepeatedItems(sample, ids[:2].repeat(100), torch.ones(200), torch.tensor(1.5))
    bags = JaggedTensor(ids[seen], lengths=lengths)
    options = {"seen": bags, "new_users": NewUsers(is_new, popular), "repeated": repeated, "trends": trends}
    # The plain version: a matrix of all scores in float64.
    scores = query.double() @ items.double().T + trends(ids)
    scores[is_new] = popular.scores_I.double()
    scores[::3, :2] = scores[::3, :2] * 1.5 + 1
    masked = scores.clone()
    masked[torch.repeat_interleave(torch.arange(300), lengths), seen] = float("-inf")
    return query, items, ids, target, options, scores, masked


@pytest.mark.parametrize("size", [7, NUM_ITEMS])
def test_ranks_and_ties_equal_those_of_the_whole_matrix(size):
    query, items, ids, target, options, scores, masked = exact_case()
    chunks = map(ItemChunk, ids.split(size), items.split(size))
    found = evaluate_targets(query, items[target], ids[target], chunks, **options)
    own = scores[torch.arange(300), target]
    masked[torch.arange(300), target] = float("-inf")  # ranked even if seen, and not against itself
    ties = (masked == own[:, None]).sum(1)
    assert ties.max() > 3
    assert found[:, 2].tolist() == ties.tolist()
    assert found[:, 1].tolist() == (1 + (masked > own[:, None]).sum(1) + ties / 2).tolist()
    masked[torch.arange(300), target] = own
    torch.testing.assert_close(found[:, 0].double(), masked.logsumexp(1) - own, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", [7, NUM_ITEMS])
def test_top_items_and_ties_equal_those_of_the_whole_matrix(size):
    query, items, ids, _, options, _, masked = exact_case()
    chunks = map(ItemChunk, ids.split(size), items.split(size))
    found = top_items(query, chunks, 10, **options)
    expected, index = masked.sort(dim=1, descending=True, stable=True)
    assert found.scores_BK.double().tolist() == expected[:, :10].tolist()
    assert torch.equal(found.ids_BK, ids[index[:, :10]])
