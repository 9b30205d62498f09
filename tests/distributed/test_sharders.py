import pytest
import torch

from meshrec.distributed import CommsPrecision, EmbeddingBagCollectionSharder, EmbeddingCollectionSharder
from meshrec.optim import SGD, RowWiseAdagrad


@pytest.mark.parametrize("kind", [EmbeddingBagCollectionSharder, EmbeddingCollectionSharder])
def test_fused_params(kind):
    spec = RowWiseAdagrad(lr=0.02)
    assert kind().optimizer is None
    assert kind(spec).optimizer is spec
    assert kind({"optimizer": spec}).optimizer is spec
    assert kind({"optimizer": RowWiseAdagrad, "learning_rate": 0.02}).optimizer == spec
    assert kind({"optimizer": torch.optim.SGD, "lr": 0.5}).optimizer == SGD(lr=0.5)
    with pytest.raises(ValueError, match=r"fused_params must name an optimizer, got \{'lr': 0.5\}"):
        kind({"lr": 0.5})


def test_precision():
    assert EmbeddingBagCollectionSharder().precision.forward == torch.float32
    half = CommsPrecision(torch.float16, torch.bfloat16)
    assert EmbeddingBagCollectionSharder(precision=half).precision is half
