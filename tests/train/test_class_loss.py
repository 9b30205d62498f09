import pytest
import torch

from meshrec.train import Softmax


def test_it_is_torchs_cross_entropy():
    torch.manual_seed(0)
    logits, labels, weights = torch.randn(6, 3), torch.tensor([0.0, 2, 1, 1, 0, 2]), torch.rand(6)
    loss = Softmax(classes=("a", "b", "c"))
    each = torch.nn.functional.cross_entropy(logits, labels.long(), reduction="none")
    assert torch.allclose(loss.sum(logits, labels, None), each.sum())
    assert torch.allclose(loss.sum(logits, labels, weights), (each * weights).sum())
    assert torch.allclose(loss.scores(logits).sum(1), torch.ones(6))
    assert loss.score_names() == ("score_a", "score_b", "score_c")
    assert loss.metrics(logits, labels, gather=False)["accuracy"] >= 0


def test_errors_say_what_is_allowed():
    with pytest.raises(ValueError, match="different"):
        Softmax(classes=("a", "a"))
    with pytest.raises(ValueError, match="output"):
        Softmax(classes=("a", "b")).sum(torch.zeros(3), torch.zeros(3), None)
