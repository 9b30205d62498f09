import torch

from benchmarks import quant_auc as bench
from meshrec import DataType, EmbeddingBagCollection, EmbeddingBagConfig
from meshrec.quant import quantize


def test_bars_and_errors_of_rows() -> None:
    torch.manual_seed(0)
    config = EmbeddingBagConfig(name="t", num_embeddings=300, embedding_dim=32, feature_names=["f"])
    model = EmbeddingBagCollection([config])
    model.embedding_bags["t"].weight.data.normal_()
    found = {
        name: {
            "moved": 5e-5,
            "squared_error": bench.squared_errors(
                model, quantize(model, DataType[data_type], rounding=rounding)
            ),
        }
        for name, (data_type, rounding) in bench.WAYS.items()
    }
    assert found["int8"]["squared_error"] < found["int4"]["squared_error"] / 100
    bars = bench.bars_of("r", found)
    assert [bar.met for bar in bars] == [True, True, True]
    assert bars[-1].figure < 0.9
