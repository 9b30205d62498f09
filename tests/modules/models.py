"""Collections that several tests share, and what they look up."""

import torch

from meshrec import (
    DataType,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    PoolingType,
)

BATCH = 5


# Odd widths, two features in one table, "b" read by two tables.
TABLES = {"t0": (20, 7, ["a", "b"]), "t1": (9, 16, ["c"]), "t2": (13, 33, ["b"])}


NAMES = ["a", "b@t0", "c", "b@t2"]
READS = [("t0", "a"), ("t0", "b"), ("t1", "c"), ("t2", "b")]


def make_bags(pooling=PoolingType.SUM, data_type=DataType.FP32, **options):
    torch.manual_seed(0)
    tables = [
        EmbeddingBagConfig(
            name=name,
            num_embeddings=rows,
            embedding_dim=dim,
            feature_names=features,
            pooling=pooling,
            data_type=data_type,
        )
        for name, (rows, dim, features) in TABLES.items()
    ]
    return EmbeddingBagCollection(tables, **options)


def make_sequences(data_type=DataType.FP32, **options):
    torch.manual_seed(0)
    tables = [
        EmbeddingConfig(
            name=name, num_embeddings=rows, embedding_dim=dim, feature_names=features, data_type=data_type
        )
        for name, (rows, dim, features) in TABLES.items()
    ]
    return EmbeddingCollection(tables, **options)


def make_input(keys=("a", "b", "c"), *, weighted=False, dtype=torch.int64, batch=BATCH, seed=0):
    """Bags of 0 to 6 ids below 9, the smallest table."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 7, (len(keys) * batch,), generator=generator, dtype=dtype)
    num_ids = int(lengths.sum())
    values = torch.randint(0, 9, (num_ids,), generator=generator, dtype=dtype)
    weights = torch.randn(num_ids, generator=generator) if weighted else None
    return KeyedJaggedTensor(list(keys), values, weights, lengths=lengths)


def gradients(module, loss):
    return torch.autograd.grad(loss, list(module.parameters()))


def trained(module, steps=2, forward=None):
    for seed in range(steps):
        result = (module if forward is None else forward)(make_input(seed=seed))
        values = [jt.values() for jt in result.values()] if isinstance(result, dict) else [result.values()]
        sum((value * value).sum() for value in values).backward()
    return module


def same_weights(one, other):
    pairs = zip(one.state_dict().items(), other.state_dict().items(), strict=True)
    return all(a == b and torch.equal(x, y) for (a, x), (b, y) in pairs)
