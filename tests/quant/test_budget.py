import math

import pytest
import torch

from meshrec import DataType, EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from meshrec.quant import choose_precision
from meshrec.quant.page import html_page, summary

ROWS, SAMPLES = 200, 3000


@pytest.fixture
def scored():
    """Labels drawn from the model itself: "steep" decides them, "flat" hardly matters."""
    torch.manual_seed(0)
    model = EmbeddingBagCollection(
        [
            EmbeddingBagConfig(name=name, num_embeddings=ROWS, embedding_dim=16, feature_names=[name])
            for name in ("steep", "flat")
        ]
    )
    for name, size in (("steep", 1.0), ("flat", 1e-3)):
        torch.nn.init.normal_(model.embedding_bags[name].weight, std=size)
    ids = torch.randint(0, ROWS, (2 * SAMPLES,))
    features = KeyedJaggedTensor(["steep", "flat"], ids, lengths=torch.ones(2 * SAMPLES, dtype=torch.int64))
    over = torch.randn(32) / 4
    calls = []

    def logits(each):
        return each(features).values() @ over

    labels = torch.bernoulli(torch.sigmoid(logits(model).detach()))

    @torch.no_grad()
    def losses(each):
        calls.append(each)
        return torch.nn.functional.binary_cross_entropy_with_logits(logits(each), labels, reduction="none")

    return model, losses, calls


def test_tables_that_matter_keep_more_bits(scored):
    model, losses, calls = scored
    choice = choose_precision(model, losses, max_loss=2e-3)
    assert choice.types["flat"] is DataType.INT2
    assert choice.num_bytes["steep"][choice.types["steep"]] > choice.num_bytes["flat"][DataType.INT2]
    assert choice.rise.bound <= 2e-3
    assert choice.num_evaluations == len(calls) <= 3 * 2 + 2
    assert set(choice.rises["steep"]) <= {DataType.INT8, DataType.INT4, DataType.INT2}
    assert "upper bound" in html_page(choice, "<title>")
    assert "&lt;title&gt;" in html_page(choice, "<title>")
    assert "budget 0.2000%" in summary(choice)


def test_budgets_from_none_to_plenty(scored):
    model, losses, _ = scored
    sizes = []
    for budget in (1e-9, 1e-4, 1e-2, 0.9):
        choice = choose_precision(model, losses, max_loss=budget)
        sizes.append(sum(choice.num_bytes[name][each] for name, each in choice.types.items()))
        assert choice.rise.bound <= budget
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] == 2 * ROWS * 8
    assert sizes[0] > sizes[-1]


def test_refusals(scored):
    model, losses, _ = scored
    with pytest.raises(ValueError, match=r"max_loss.*2.*between 0.*1"):
        choose_precision(model, losses, max_loss=2)
    with pytest.raises(ValueError, match="validation"):
        choose_precision(model, lambda each: torch.zeros(1), max_loss=0.1)
    for loss in (0.0, math.nan, math.inf):
        with pytest.raises(ValueError, match=f"loss is {loss}"):
            choose_precision(model, lambda each, loss=loss: torch.full((3,), loss), max_loss=0.1)
