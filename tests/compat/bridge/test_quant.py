import pytest
import torch
from torch import nn
from torch.ao.quantization import PlaceholderObserver

from meshrec import DataType, KeyedJaggedTensor
from meshrec.compat.bridge import embeddings, quant
from meshrec.compat.bridge.quant import QuantConfig


def tables():
    return [
        embeddings.EmbeddingBagConfig(
            num_embeddings=20, embedding_dim=8, name=name, feature_names=[f"f{name}"]
        )
        for name in ("t0", "t1")
    ]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.ebc = embeddings.EmbeddingBagCollection(tables())

    def forward(self, features):
        return self.ebc(features).values()


def batch():
    return KeyedJaggedTensor(["ft0", "ft1"], torch.tensor([1, 19, 7]), lengths=torch.tensor([2, 0, 0, 1]))


def observer(dtype):
    return PlaceholderObserver.with_args(dtype=dtype)


def types_of(module):
    return [config.data_type for config in module.embedding_bag_configs()]


def test_from_float_as_torchrecs_introduction_does():
    ebc = embeddings.EmbeddingBagCollection(tables())
    ebc.qconfig = QuantConfig(
        activation=observer(torch.float),
        weight=observer(torch.int8),
        per_table_weight_dtype={"t1": torch.quint4x2},
    )
    made = quant.EmbeddingBagCollection.from_float(ebc)
    assert isinstance(made, quant.EmbeddingBagCollection)
    assert types_of(made) == [DataType.INT8, DataType.INT4]
    assert torch.allclose(made(batch()).values(), ebc(batch()).values(), atol=0.03)
    del ebc.qconfig
    with pytest.raises(ValueError, match="no qconfig"):
        quant.EmbeddingBagCollection.from_float(ebc)


def test_models_in_place_and_not():
    model = Model()
    expected = model(batch())
    made = quant.quantize_embeddings(
        model,
        torch.int8,
        False,
        output_dtype=torch.float16,
        per_table_weight_dtype={"t0": torch.half, "x": torch.half},
    )
    assert types_of(made.ebc) == [DataType.FP16, DataType.INT8]
    assert made(batch()).dtype == torch.float16
    assert types_of(model.ebc) == [DataType.FP32] * 2
    assert quant.quantize_inference_model(model, quantization_dtype=torch.int8) is model
    assert types_of(model.ebc) == [DataType.INT8] * 2
    assert torch.allclose(model(batch()), expected, atol=0.01)


def test_constructors_and_refusals():
    made = quant.EmbeddingBagCollection(tables(), False, "cpu", output_dtype=torch.float16)
    assert made(batch()).values().dtype == torch.float16
    with pytest.raises(ValueError, match=r"cannot be quantised to torch\.uint8"):
        quant.quantize_embeddings(Model(), torch.uint8, True)
    with pytest.raises(ValueError, match="fp_weight_dtype the same as"):
        quant.quantize_inference_model(Model(), fp_weight_dtype=torch.half)
