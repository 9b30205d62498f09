"""Scores for repeated items, against a plain computation item by item."""

import math

import pytest
import torch

from meshrec import JaggedTensor
from meshrec.models import ItemCatalogue
from meshrec.models.repeats import RepeatScores, prefix_items, repeated_items
from tests.models.test_history_models import DENSE, MODELS, NUM_ITEMS, features, make_model

HISTORIES = [[5, 7, 5, 5, 9], [], [7], [3, 3, 8, 3, 8, 2]]


def jagged(bags):
    return JaggedTensor(
        torch.tensor([item for bag in bags for item in bag], dtype=torch.int64),
        lengths=torch.tensor([len(bag) for bag in bags]),
    )


def plain(weight_F, prefix):
    """Return the additions of a prefix's items by the formula of [Note: repeated items]."""
    found = {}
    for item in {*prefix}:
        ages = [len(prefix) - 1 - at for at, other in enumerate(prefix) if other == item]
        counts = [math.log(sum(2 ** (-age / half) for age in ages)) for half in (8, 32)]
        values = [1, math.log(len(ages)), *counts, math.log1p(min(ages)), min(ages) == 0]
        found[item] = sum(30 * w * value for w, value in zip(weight_F[1:].tolist(), values, strict=True))
    return found


@pytest.fixture
def weight_F():
    return torch.randn(7, generator=torch.Generator().manual_seed(0))


def test_additions_are_those_of_the_formula(weight_F):
    repeated = repeated_items(weight_F, torch.tensor([0.5, 0.25]), jagged(HISTORIES))
    found = [{} for _ in HISTORIES]
    for sample, item, value in zip(*(tensor.tolist() for tensor in repeated[:3]), strict=True):
        assert item not in found[sample]
        found[sample][item] = value
    for history, values in zip(HISTORIES, found, strict=True):
        expected = {item: value + 0.5 for item, value in plain(weight_F, history).items()}
        assert values == pytest.approx(expected, rel=1e-5, abs=1e-5)


def test_prefixes_have_the_additions_of_shorter_histories(weight_F):
    stops_BP = torch.arange(7).expand(len(HISTORIES), -1)
    items = prefix_items(weight_F, jagged(HISTORIES), stops_BP)
    for sample, history in enumerate(HISTORIES):
        for stop in range(len(history) + 1):
            is_last_L = items.is_last_BPL[sample, stop]
            ids = items.ids_BL[sample][is_last_L].tolist()
            values = items.scores_BPL[sample, stop][is_last_L].tolist()
            expected = plain(weight_F, history[:stop])
            assert dict(zip(ids, values, strict=True)) == pytest.approx(expected, rel=1e-5, abs=1e-5)
            assert len(ids) == len(expected)


def with_repeats(kind="sasrec", similarity="dot", **options):
    options = {"items": ItemCatalogue(torch.arange(1, NUM_ITEMS)), **options}
    model = make_model(kind, similarity=similarity, seen=None, repeats=True, **options)
    torch.nn.init.normal_(model.repeats.weight, generator=torch.Generator().manual_seed(1))
    return model


@pytest.mark.parametrize("similarity", ["dot", "cosine", "mixture"])
@pytest.mark.parametrize("kind", MODELS)
def test_recommendations_and_ranks_have_the_additions(kind, similarity):
    model = with_repeats(kind, similarity).eval()
    given = features(HISTORIES, [[5], [2], [7], [4]])
    best = model.recommend(given, NUM_ITEMS - 1)
    scores_BI = torch.zeros(len(HISTORIES), NUM_ITEMS).scatter(1, best.ids_BK, best.scores_BK)
    for sample, history in enumerate(HISTORIES):
        for item, value in plain(model.repeats.weight, history).items():
            scores_BI[sample, item] = (scores_BI[sample, item] - value) / model.repeats.weight[0]
    plain_scores_BI = model.similarity.score_matrix(model.query_vectors(given), model.item_vectors())
    torch.testing.assert_close(scores_BI[:, 1:], plain_scores_BI, rtol=1e-3, atol=1e-3)
    losses, ranks, _ = model(DENSE, given).detach().T
    for sample, target in enumerate((5, 2, 7, 4)):
        assert ranks[sample] == 1 + best.ids_BK[sample].tolist().index(target)
        logits = best.scores_BK[sample].detach()
        expected = logits.logsumexp(0) - logits[best.ids_BK[sample] == target][0]
        assert float(losses[sample]) == pytest.approx(float(expected), rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("kind", ["sasrec", "hstu"])
def test_training_compares_targets_with_all_items_of_their_histories(kind):
    """With every item drawn, the sampled loss is nearly that of evaluation."""
    model = with_repeats(kind, num_negatives=20_000, max_length=6, dropout=0.0).train()
    losses = model(DENSE, features(HISTORIES, [[5], [2], [7], [4]]))[:, 0]
    expected = model.eval()(DENSE, features(HISTORIES, [[5], [2], [7], [4]]))[:, 0]
    torch.testing.assert_close(losses, expected, rtol=0.02, atol=0.02)
    losses.sum().backward()
    assert bool(model.repeats.weight.grad.abs().min() > 0)


def test_a_step_without_targets_gives_the_weights_a_gradient_of_zero():
    model = with_repeats().train()
    model(DENSE, features(HISTORIES, [[] for _ in HISTORIES]))[:, 0].sum().backward()
    assert model.repeats.weight.grad.tolist() == [0.0] * 7


def test_items_that_are_not_ranked_get_no_additions():
    with pytest.raises(ValueError, match=r"repeats.*'seen'.*exclude_seen"):
        make_model(repeats=True)


def test_at_first_recent_and_frequent_items_lead():
    module = RepeatScores(1000, 10)
    repeated = repeated_items(module.weight, module.chosen, jagged([[1, 2, 1, 3, 1, 2]]))
    order = repeated.additions_N.argsort(descending=True)
    assert repeated.ids_N[order].tolist() == [1, 2, 3]


def test_validation_chooses_local_optima_near_the_last_values():
    module, tried = RepeatScores(10, 10), []

    def quality():
        tried.append(tuple(module.chosen.tolist()))
        return -abs(tried[-1][0] - 3.4) - abs(tried[-1][1] - 0.2)

    module.choose(quality)
    assert module.chosen.tolist() == [4.0, 0.25]
    module.choose(lambda: 0.0)
    assert module.chosen.tolist() == [4.0, 0.25]
