"""bf16 dense layers against the same layers in fp32, and the copies of their weights."""

import copy

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from meshrec.models import DLRM, DLRM_DCN, InterestPooling
from meshrec.models.attention_block import AttentionBlock
from meshrec.modules import (
    MLP,
    CrossNet,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    HSTUBlock,
    LowRankCrossNet,
    MemberMLP,
    NumberEmbedding,
    linear,
    precision,
)
from meshrec.modules.linear import Linear, LogitLinear
from meshrec.modules.precision import as_activations, cast_weights_once
from meshrec.sparse import JaggedTensor, KeyedJaggedTensor

needs_bf16_products = pytest.mark.skipif(
    not linear._has_bf16_linear(), reason="oneDNN has no bf16 products on this CPU"
)


def bf16():
    return torch.autocast("cpu", torch.bfloat16)


def sparse_inputs(seed=1):
    torch.manual_seed(seed)
    return KeyedJaggedTensor(["f", "g"], torch.randint(0, 20, (24,)), lengths=torch.full((12,), 2))


def tables():
    configs = [
        EmbeddingBagConfig(name=name, num_embeddings=20, embedding_dim=8, feature_names=[name])
        for name in "fg"
    ]
    return EmbeddingBagCollection(configs)


def click_model(kind, *options):
    model = kind(tables(), 3, [16, 8], [32, 1], *options)
    return model, lambda: (torch.rand(6, 3), sparse_inputs())


def pooling():
    history = JaggedTensor(torch.randn(9, 8), lengths=torch.tensor([4, 0, 5]))
    return InterestPooling(8, [16]), lambda: (history, torch.randn(3, 8))


def hstu():
    block = HSTUBlock(8, max_length=5, num_time_buckets=0, dropout=0.0)
    return block, lambda: (torch.randn(9, 8), torch.tensor([0, 4, 9]))


LAYERS = {
    "linear": lambda: (Linear(33, 17), lambda: (torch.randn(20, 33),)),
    "linear without bias": lambda: (Linear(33, 17, bias=False), lambda: (torch.randn(20, 33),)),
    "three dimensions": lambda: (Linear(33, 17), lambda: (torch.randn(4, 5, 33),)),
    "empty batch": lambda: (MLP(5, [4, 3]), lambda: (torch.randn(0, 5),)),
    "mlp": lambda: (MLP(13, [32, 16]), lambda: (torch.randn(20, 13),)),
    "mlp with sigmoid": lambda: (MLP(13, [32, 16], activation="sigmoid"), lambda: (torch.randn(20, 13),)),
    "crossnet": lambda: (CrossNet(12, 3), lambda: (torch.randn(20, 12),)),
    "low-rank crossnet": lambda: (LowRankCrossNet(12, 3, 4), lambda: (torch.randn(20, 12),)),
    "members": lambda: (MemberMLP(12, [16, 8], 1, 3), lambda: (torch.randn(20, 12),)),
    "attention": lambda: (AttentionBlock(8, 2, 0.0), lambda: (torch.randn(3, 4, 8),)),
    "hstu": hstu,
    "din": pooling,
    "dlrm": lambda: click_model(DLRM),
    "dcn": lambda: click_model(DLRM_DCN, 2, 4),
}


def values_and_gradients(layer, inputs):
    out = layer(*inputs)
    weights = torch.linspace(-1, 1, out.numel()).view(out.shape)
    (out.float() * weights).sum().backward()
    gradients = {name: parameter.grad for name, parameter in layer.named_parameters()}
    return out.detach().float(), gradients


def relative_error(value, expected):
    return float((value - expected).norm() / expected.norm().clamp(min=1e-6))


@pytest.mark.parametrize("name", LAYERS)
def test_values_and_gradients_are_near_those_of_fp32(name):
    torch.manual_seed(0)
    layer, make_inputs = LAYERS[name]()
    inputs, exact = make_inputs(), copy.deepcopy(layer)
    expected, expected_gradients = values_and_gradients(exact, inputs)
    with bf16():
        out, gradients = values_and_gradients(layer, inputs)
    # bf16 has 8 bits: a relative error of 2**-9 per rounding, and a few roundings in a row.
    assert relative_error(out, expected) < 0.02
    for parameter, gradient in gradients.items():
        if expected_gradients[parameter] is None:
            assert gradient is None
            continue
        assert gradient.dtype == torch.float32
        expected_gradient = expected_gradients[parameter]
        errors = (gradient - expected_gradient).abs().flatten()
        # Not all elements: where a ReLU's input is near 0, rounding switches a sample's gradient on or off.
        assert errors.quantile(0.8) < 0.05 * expected_gradient.abs().max().clamp(min=1e-6), parameter


@needs_bf16_products
def test_relu_is_fused_into_the_product_and_activations_stay_bf16(monkeypatch):
    calls, layers = [], MLP(13, [32, 16, 8])
    apply = linear._BF16Linear.apply
    monkeypatch.setattr(
        linear._BF16Linear,
        "apply",
        lambda x, w, b, relu: calls.append((x.dtype, relu)) or apply(x, w, b, relu),
    )
    with bf16():
        assert layers(torch.randn(4, 13)).dtype == torch.bfloat16
    assert calls == [(torch.bfloat16, True)] * 3


@needs_bf16_products
def test_second_derivatives():
    torch.manual_seed(0)
    layer = Linear(6, 4)
    x = torch.randn(5, 6, requires_grad=True)
    results = []
    for scope in (torch.enable_grad, bf16):
        layer.zero_grad()
        with scope():
            out = layer(x, relu=True).float()
        (first,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        first.square().sum().backward()
        results.append(layer.weight.grad)
    assert relative_error(results[1], results[0]) < 0.05


def test_logits_are_computed_in_fp32():
    layer = LogitLinear(16, 1)
    x = torch.randn(64, 16).bfloat16()
    with bf16():
        out = layer(x)
    assert out.dtype == torch.float32
    assert_close(out, nn.functional.linear(x.float(), layer.weight, layer.bias))


def test_number_embeddings_stay_fp32():
    numbers = NumberEmbedding([(0.0, 0.5, 1.0), ()], 4)
    x = torch.rand(5, 2)
    with bf16():
        out = numbers(x)
    assert torch.equal(out, numbers(x))


def test_logits_of_meta_tensors_have_a_shape():
    layer = LogitLinear(16, 1, device="meta")
    assert layer(torch.empty(3, 16, device="meta")).shape == (3, 1)


def test_without_bf16_products_torch_multiplies(monkeypatch):
    monkeypatch.setattr(linear, "_has_bf16_linear", lambda: False)
    monkeypatch.setattr(linear, "_BF16Linear", None)
    layer = Linear(7, 5)
    with bf16():
        out = layer(torch.randn(2, 7), relu=True)
    assert out.dtype == torch.bfloat16
    assert out.min() >= 0


def count_casts(monkeypatch):
    """Count the weights copied to bf16."""
    casts, make = [], precision._Copy
    monkeypatch.setattr(precision, "_Copy", lambda *fields: casts.append(1) or make(*fields))
    return casts


@needs_bf16_products
def test_each_weight_is_cast_once_in_a_step_and_again_after_an_update(monkeypatch):
    casts, layer, x = count_casts(monkeypatch), Linear(4, 3), torch.ones(2, 4)
    with cast_weights_once(), bf16():
        first = layer(x)
        assert torch.equal(layer(x), first)
        assert len(casts) == 2  # weight and bias
        with torch.no_grad():
            layer.weight.add_(1)
        assert not torch.equal(layer(x), first)
        assert len(casts) == 3
    with cast_weights_once(), bf16():
        layer(x)
    assert len(casts) == 5


@needs_bf16_products
def test_copies_do_not_outlive_the_step():
    layer, x = Linear(4, 3), torch.ones(2, 4)
    with cast_weights_once(), bf16():
        first = layer(x)
    layer.weight.data.add_(1)  # does not change the version
    with cast_weights_once(), bf16():
        assert not torch.equal(layer(x), first)


def test_updates_below_bf16_resolution_accumulate():
    """bf16 cannot tell 1 from 1 + 2**-12; the fp32 weight can."""
    layer = Linear(1, 1, bias=False)
    nn.init.ones_(layer.weight)
    optimizer = torch.optim.SGD(layer.parameters(), lr=2.0**-12)
    for _ in range(64):
        optimizer.zero_grad()
        with cast_weights_once(), bf16():
            (-layer(torch.ones(1, 1))).sum().backward()
        optimizer.step()
    assert layer.weight.item() == 1 + 64 * 2.0**-12
    with bf16():
        assert layer(torch.ones(1, 1)).item() == 1 + 64 * 2.0**-12


def test_activations_are_cast_only_under_bf16_autocast():
    x = torch.ones(2)
    assert as_activations(x) is x
    with torch.autocast("cpu", torch.float16):
        assert as_activations(x) is x
    with bf16():
        assert as_activations(x).dtype == torch.bfloat16
        assert as_activations(x.double()).dtype == torch.float64
