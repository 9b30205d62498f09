"""The kernels against plain torch, and plain torch against a loop."""

import itertools
import math

import pytest
import torch

from meshrec.ops import library
from meshrec.ops.scores import merge_top_k, naive, rank_scores

NAN, INF = float("nan"), float("inf")


def scores_with_ties(rows, columns, *, seed=0):
    """Return scores with many ties, and masked items."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(-9, 9, (rows, columns), generator=generator) / 4
    scores[torch.rand(rows, columns, generator=generator) < 0.1] = -INF
    return scores


COLUMNS = [0, 1, 15, 16, 63, 64, 200, 4097]


@pytest.mark.parametrize("columns", COLUMNS)
def test_ranks_are_those_of_the_plain_version(columns):
    scores, targets = scores_with_ties(37, columns), torch.randint(-9, 9, (37,)) / 4
    ranked, expected = rank_scores(scores, targets), naive.rank_scores(scores, targets)
    assert torch.equal(ranked.num_above, expected[0])
    assert torch.equal(ranked.num_equal, expected[1])
    torch.testing.assert_close(ranked.log_sums, expected[2], rtol=1e-6, atol=1e-6)


def test_plain_ranks_are_counts():
    scores, targets = scores_with_ties(5, 30), torch.tensor([0.0, 0.25, -1, 2, -2])
    above, equal, log_sums = naive.rank_scores(scores, targets)
    for row, target, num_above, num_equal, log_sum in zip(
        scores, targets, above, equal, log_sums, strict=True
    ):
        assert num_above == sum(score > target for score in row)
        assert num_equal == sum(score == target for score in row)
        assert log_sum == pytest.approx(math.log(sum(math.exp(score) for score in row)), rel=1e-5)


@pytest.mark.parametrize("columns", [5, 100])
@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("target", [NAN, INF, -INF, 0.0])
def test_limits_are_ranked_as_by_the_plain_version(columns, value, target):
    rows = [[value] * columns, [0.0] * (columns - 1) + [value], [value] + [1.0] * (columns - 1), [NAN, INF]]
    rows[-1] += [-INF] * (columns - 2)
    scores, targets = torch.tensor(rows), torch.full((4,), target)
    ranked, expected = rank_scores(scores, targets), naive.rank_scores(scores, targets)
    assert ranked.num_above.tolist() == expected[0].tolist()
    assert ranked.num_equal.tolist() == expected[1].tolist()
    torch.testing.assert_close(ranked.log_sums, expected[2], equal_nan=True)


def test_log_sums_of_large_and_distant_scores():
    scores = torch.tensor([[1000.0, 999.0, -1000.0], [-500.0, -500.0, -INF]])
    expected = torch.tensor([1000 + math.log1p(math.exp(-1)), -500 + math.log(2)])
    torch.testing.assert_close(rank_scores(scores, torch.zeros(2)).log_sums, expected)


def running_top_k(scores, k, size, merge):
    best, ids = torch.full((len(scores), k), -INF), torch.zeros(len(scores), k, dtype=torch.int64)
    all_ids = torch.arange(scores.shape[1]) * 3 - 50
    for columns in torch.arange(scores.shape[1]).split(size):
        merge(scores[:, columns], all_ids[columns], best, ids)
    return best, ids


@pytest.mark.parametrize("merge", [merge_top_k, naive.merge_top_k])
@pytest.mark.parametrize("size", [1, 7, 64, 2000])
@pytest.mark.parametrize("k", [0, 1, 10, 600])
def test_running_top_k_is_that_of_a_stable_sort(merge, size, k):
    scores = scores_with_ties(20, 700)[:, : 700 if size > 1 else 50]
    k = min(k, scores.shape[1] // 2)
    best, ids = running_top_k(scores, k, size, merge)
    expected, index = scores.sort(dim=1, descending=True, stable=True)
    assert torch.equal(best, expected[:, :k])
    assert torch.equal(ids, index[:, :k] * 3 - 50)


@pytest.mark.parametrize("merge", [merge_top_k, naive.merge_top_k])
def test_fewer_scores_than_k_leave_padding(merge):
    best, ids = running_top_k(torch.tensor([[1.0, -INF, 3.0]]), 5, 2, merge)
    assert best.tolist() == [[3, 1, -INF, -INF, -INF]]
    assert ids[0, :2].tolist() == [-44, -50]


@pytest.mark.parametrize("merge", [merge_top_k, naive.merge_top_k])
def test_nan_is_the_largest_score(merge):
    best, ids = running_top_k(torch.tensor([[1.0, NAN, INF, -0.0, NAN, 0.0]]), 4, 2, merge)
    assert best[0].isnan().tolist() == [True, True, False, False]
    assert sorted(ids[0, :2].tolist()) == [-47, -38]
    assert best[0, 2:].tolist() == [INF, 1]
    assert ids[0, 2:].tolist() == [-44, -50]


def test_descending_scores_fill_the_candidates_many_times():
    scores = torch.arange(5000.0)[None]
    best, ids = running_top_k(scores, 3, 5000, merge_top_k)
    assert best.tolist() == [[4999, 4998, 4997]]
    assert ids.tolist() == [[4999 * 3 - 50, 4998 * 3 - 50, 4997 * 3 - 50]]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_types_are_ranked_in_plain_torch(dtype):
    scores = torch.tensor([[3.0, 2.0, 1.0]], dtype=dtype)
    assert rank_scores(scores, torch.tensor([2.0])).num_above.tolist() == [1]
    best, ids = scores.new_zeros(1, 2), torch.zeros(1, 2, dtype=torch.int64)
    merge_top_k(scores, torch.tensor([7, 8, 9]), best, ids)
    assert ids.tolist() == [[7, 8]]


def test_rows_of_other_memory_are_read_as_they_are():
    scores = scores_with_ties(64, 20).T  # not contiguous
    ranked = rank_scores(scores, torch.zeros(20))
    assert torch.equal(ranked.num_above, naive.rank_scores(scores, torch.zeros(20))[0])


@pytest.mark.parametrize(
    ("best", "ids", "column_ids"),
    [
        (torch.zeros(2, 3), torch.zeros(2, 4, dtype=torch.int64), torch.arange(5)),
        (torch.zeros(3, 2).T, torch.zeros(2, 3, dtype=torch.int64), torch.arange(5)),
        (torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.int64), torch.arange(4)),
    ],
)
def test_sizes_that_do_not_fit(best, ids, column_ids):
    with pytest.raises(ValueError, match=r"2, K|\[5\]"):
        merge_top_k(torch.zeros(2, 5), column_ids, best, ids)
    with pytest.raises(ValueError, match=r"\[2\]"):
        rank_scores(torch.zeros(2, 5), torch.zeros(3))


def kernels_agree():
    for columns in COLUMNS:
        test_ranks_are_those_of_the_plain_version(columns)
    for value, target in itertools.product([NAN, INF, -INF], repeat=2):
        test_limits_are_ranked_as_by_the_plain_version(100, value, target)
    test_log_sums_of_large_and_distant_scores()
    test_running_top_k_is_that_of_a_stable_sort(merge_top_k, 64, 10)
    test_nan_is_the_largest_score(merge_top_k)


@pytest.mark.skipif(not library.has_kernels, reason="no kernels are built")
@pytest.mark.parametrize("isa", ["baseline", "avx2"])
def test_kernels_of_other_instruction_sets_agree(run_code, isa):
    code = "import runpy, sys; runpy.run_path(sys.argv[1])['kernels_agree']()"
    run_code(code, __file__, MESHREC_ISA=isa)


@pytest.mark.threads
def test_threads_change_nothing(set_threads):
    scores, targets = scores_with_ties(100, 300), torch.zeros(100)
    one = (*rank_scores(scores, targets), *running_top_k(scores, 10, 64, merge_top_k))
    set_threads(2)
    two = (*rank_scores(scores, targets), *running_top_k(scores, 10, 64, merge_top_k))
    assert all(map(torch.equal, one, two))


def test_opcheck():
    scores, ids = scores_with_ties(3, 9), torch.arange(9)
    torch.library.opcheck(torch.ops.meshrec.rank_scores.default, (scores, torch.zeros(3)))
    best, best_ids = torch.full((3, 2), -INF), torch.zeros(3, 2, dtype=torch.int64)
    torch.library.opcheck(torch.ops.meshrec.merge_top_k.default, (scores, ids, best, best_ids))
