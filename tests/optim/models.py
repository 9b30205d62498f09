"""Collections that tests of the fused optimizers train, and what they are trained on."""

import pytest
import torch

from meshrec import (
    DataType,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
)
from meshrec.optim.optimizers import SPECS

KINDS = SPECS
TABLES = {"t0": (12, 5, ["a", "b"]), "t1": (7, 16, ["b"])}
UPDATES = pytest.mark.parametrize("update", ["in_backward", "on_step"])


def make_configs(config, data_type=DataType.FP32):
    return [
        config(name=name, num_embeddings=rows, embedding_dim=dim, feature_names=features, data_type=data_type)
        for name, (rows, dim, features) in TABLES.items()
    ]


def make_bags(data_type=DataType.FP32, **options):
    torch.manual_seed(0)
    return EmbeddingBagCollection(make_configs(EmbeddingBagConfig, data_type), **options)


def make_sequences():
    torch.manual_seed(0)
    return EmbeddingCollection(make_configs(EmbeddingConfig))


def make_input(seed=0, *, batch=6, all_rows=False):
    generator = torch.Generator().manual_seed(seed)
    if all_rows:
        ids = [torch.arange(12) % 7, torch.arange(12)[:7], torch.arange(7, 12), torch.arange(7)]
        return KeyedJaggedTensor(
            ["a", "b"], torch.cat([torch.arange(12), ids[1]]), lengths=torch.tensor([5, 7, 3, 4])
        )
    lengths = torch.randint(0, 5, (2 * batch,), generator=generator)
    values = torch.randint(0, 7, (int(lengths.sum()),), generator=generator)
    return KeyedJaggedTensor(["a", "b"], values, lengths=lengths)


def loss_of(module, features):
    """Not linear in the rows, so that a wrong update changes the next gradient, too."""
    result = module(features)
    values = [jt.values() for jt in result.values()] if isinstance(result, dict) else [result.values()]
    return sum((value.float().tanh() * torch.linspace(-1, 2, value.shape[1])).sum() for value in values)


def train(module, steps=3, seed=0, optimizer=None, **options):
    for step in range(steps):
        if optimizer is not None:
            optimizer.zero_grad()
        loss_of(module, make_input(seed + step, **options)).backward()
        if optimizer is not None:
            optimizer.step()
    return module


def weights_of(module):
    return [weight.detach() for weight in module.parameters()]


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def close(one, other):
    for a, b in zip(weights_of(one), weights_of(other), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=2e-6)
