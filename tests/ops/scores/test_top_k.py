import pytest
import torch

from meshrec.ops.scores.top_k import top_k


@pytest.mark.parametrize("num_values", [1, 3, 40])
def test_equal_scores_stand_in_order_of_position(num_values):
    torch.manual_seed(num_values)
    scores = torch.randint(num_values, (50, 64)).float()
    scores[:, ::7] = float("-inf")
    for k in (0, 1, 5, 54):
        best, index = top_k(scores, k)
        ordered, expected = scores.sort(dim=1, descending=True, stable=True)
        torch.testing.assert_close(best, ordered[:, :k], rtol=0, atol=0)
        torch.testing.assert_close(index, expected[:, :k], rtol=0, atol=0)


def test_fewer_finite_scores_than_asked_for():
    scores = torch.tensor([[1.0, float("-inf"), 1.0, float("-inf")]])
    best, index = top_k(scores, 3)
    assert best.tolist() == [[1.0, 1.0, float("-inf")]]
    assert index[0, :2].tolist() == [0, 2]
