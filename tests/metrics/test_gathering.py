import pytest
import torch
import torch.distributed as dist

from meshrec.metrics import binary_metrics, class_metrics, query_metrics, rank_metrics, regression_metrics
from meshrec.metrics.gathering import encode_ids, gather_columns, id_column, normalize_samples, stack_columns


def columns():
    generator = torch.Generator().manual_seed(0)
    scores = torch.randint(-4, 5, (60,), generator=generator).double()
    labels = torch.randint(0, 2, (60,), generator=generator).double()
    weights = torch.rand(60, generator=generator) * torch.randint(0, 2, (60,), generator=generator)
    return scores, labels, torch.randint(0, 8, (60,), generator=generator) + 2**60, weights


def all_metrics(part):
    scores, labels, queries, weights = (column[part] for column in columns())
    return [
        binary_metrics(scores, labels, weights),
        regression_metrics(scores, labels, weights),
        class_metrics(torch.stack([scores, -scores], 1), labels, weights),
        query_metrics(scores, labels, queries, weights),
        rank_metrics(scores, scores.abs(), weights, labels * (scores.abs() > 1)),
    ]


def of_rank():
    """Rank 1 has 13 samples in the first case and none in the others; rank 0 has none in the last."""
    cases = [(slice(0, 47), slice(47, 60)), (slice(0, 60), slice(0, 0)), (slice(0, 0), slice(0, 0))]
    return [all_metrics(case[dist.get_rank()]) for case in cases]


def errors_of_rank():
    bad = torch.tensor([0.0, -3.0 * dist.get_rank()])
    with pytest.raises(ValueError) as raised:  # noqa: PT011  # the message is compared
        binary_metrics(torch.zeros(2), torch.zeros(2), bad)
    return str(raised.value)


def test_metrics_do_not_depend_on_the_ranks_that_have_the_samples(ranks):
    whole = all_metrics(slice(0, 60))
    for cases in ranks(2).run(of_rank):
        assert cases.pop() == [{}] * 5
        for case in cases:
            for found, expected in zip(case, whole, strict=True):
                assert found == pytest.approx(expected, abs=1e-12)


def test_every_rank_refuses_the_weight_of_one(ranks):
    first, second = ranks(2).run(errors_of_rank)
    assert first == second
    assert "weights[3] is -3.0" in first


def test_alone_the_columns_stay():
    given = stack_columns(torch.tensor([1.0, 2.0]), torch.tensor([[3], [4]]), weights=None)
    assert gather_columns(given, None).tolist() == [[1, 2], [3, 4], [1, 1]]


def test_sizes_must_agree():
    with pytest.raises(ValueError, match=r"\[3, 2, 3\]"):
        stack_columns(torch.ones(3), torch.ones(2), weights=torch.ones(3))


def test_samples_without_weight_are_left_out_and_the_largest_weight_is_1():
    given = torch.tensor([[1.0, 2.0, 3.0], [5.0, 6.0, 7.0], [0.0, 2.0, 4.0]])
    allowed = torch.tensor([False, True, True])
    assert normalize_samples(given, allowed, "good").tolist() == [[2.0, 3.0], [6.0, 7.0], [0.5, 1.0]]
    with pytest.raises(ValueError, match=r"labels\[2\].*7.0"):
        normalize_samples(given, torch.tensor([True, True, False]), "good")


def test_codes_tell_large_integers_apart_and_signed_zeros_not():
    large = id_column(torch.tensor([2**60 + 1, 2**60, 2**60 + 1]))
    assert encode_ids(large, "queries", is_floating=False).tolist() == [1, 0, 1]
    zeros = id_column(torch.tensor([0.0, -0.0, 2.5]))
    assert encode_ids(zeros, "queries", is_floating=True).tolist() == [0, 0, 1]
