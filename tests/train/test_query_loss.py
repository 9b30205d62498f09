import pytest
import torch

from meshrec.train import Ranking


def drawn(seed=0, num=40):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(num, generator=generator, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, 3, (num,), generator=generator).double()
    queries = torch.randint(0, 7, (num,), generator=generator).double()
    return scores, labels, queries


def by_query(scores, labels, queries):
    for query in queries.unique():
        at = queries == query
        yield scores[at], labels[at]


def test_pairs_are_those_of_a_query():
    scores, labels, queries = drawn()
    expected = 0.0
    for said, truth in by_query(scores, labels, queries):
        pairs = [
            torch.log1p(torch.exp(said[j] - said[i]))
            for i in range(len(said))
            for j in range(len(said))
            if truth[i] > truth[j]
        ]
        expected = expected + (torch.stack(pairs).mean() if pairs else 0.0)
    found = Ranking(kind="pairwise").sum(scores, torch.stack([labels, queries], 1), None)
    assert torch.allclose(found, expected)


def test_lists_are_queries():
    scores, labels, queries = drawn(1)
    expected = 0.0
    for said, truth in by_query(scores, labels, queries):
        if truth.sum() > 0:
            expected = expected - (truth / truth.sum() * torch.log_softmax(said, 0)).sum()
    loss = Ranking(kind="listwise").sum(scores, torch.stack([labels, queries], 1), None)
    assert torch.allclose(loss, expected)
    (gradient,) = torch.autograd.grad(loss, scores)
    (wanted,) = torch.autograd.grad(expected, scores)
    assert torch.allclose(gradient, wanted)


@pytest.mark.parametrize("kind", ["pairwise", "listwise"])
def test_queries_that_teach_nothing_are_no_error(kind):
    scores = torch.randn(4, requires_grad=True)
    labels = torch.tensor([[0.0, 1.0], [0.0, 1.0], [0.0, 2.0], [0.0, 3.0]])
    loss = Ranking(kind=kind).sum(scores, labels, None)
    loss.backward()
    assert float(loss.detach()) == 0
    assert scores.grad is None or not scores.grad.any()


def test_errors_say_what_is_allowed():
    with pytest.raises(ValueError, match=r"'pairwise'.*'listwise'"):
        Ranking(kind="best")
    with pytest.raises(ValueError, match=r"loss\.ks"):
        Ranking(ks=())
    with pytest.raises(ValueError, match="'query'"):
        Ranking().sum(torch.zeros(3), torch.zeros(3), None)
