"""Trained models of hashed tables beside fixed ones, drawn at random, and batches of every kind of ID."""

import random

import torch
from torch import nn

import meshrec
from meshrec import DataType, KeyedJaggedTensor, PoolingType
from meshrec.optim import Adam, RowWiseAdagrad
from meshrec.tables import LFU, LRU, MinCount

EDGES = [-1, 0, (1 << 63) - 1, -(1 << 63)]
FEATURES = ["bag", "mean", "fixed", "more", "sequence"]
NUM_DENSE, NUM_ROWS, LONGEST = 2, 30, 3


class Lookups(nn.Module):
    """Gives what its tables give, in one vector per sample: nothing is rounded on the way."""

    def __init__(self, bags, sequences):
        super().__init__()
        self.bags, self.sequences = bags, sequences

    def forward(self, dense, sparse):
        sequence = self.sequences(sparse)["sequence"].to_padded_dense(LONGEST)
        return torch.cat([dense, self.bags(sparse).values().float(), sequence.flatten(1).float()], 1)


class Scores(nn.Module):
    """One number for each sample."""

    def __init__(self, lookups, width):
        super().__init__()
        self.lookups, self.over = lookups, nn.Linear(width, 1)

    def forward(self, dense, sparse):
        return self.over(self.lookups(dense, sparse))


TYPES = (DataType.FP32, DataType.FP16, DataType.BF16)


def drawn_model(seed, types=TYPES, widths=(4, 6, 16, 33), **keys):
    """A model that is not trained: hashed tables of drawn types, widths and policies, and a fixed one."""
    draw = random.Random(seed)
    torch.manual_seed(seed)

    def hashed(name):
        policy = draw.choice([None, LRU(), LFU(half_life=3)])
        options = {"max_rows": 40 if policy else 4000, "evict": policy, "seed": draw.randrange(1 << 40)}
        options["admit"] = draw.choice([None, MinCount(2)])
        return {
            "name": name,
            "keys": meshrec.Hashed(**{**options, **keys}),
            "data_type": draw.choice(types),
            "embedding_dim": draw.choice(widths),
        }

    bags = meshrec.EmbeddingBagCollection(
        [
            meshrec.EmbeddingBagConfig(**hashed("h0"), feature_names=["bag"]),
            meshrec.EmbeddingBagConfig(
                **hashed("h1"), feature_names=["mean", "more", "bag"], pooling=PoolingType.MEAN
            ),
            meshrec.EmbeddingBagConfig(
                name="f", num_embeddings=NUM_ROWS, embedding_dim=8, feature_names=["fixed"]
            ),
        ]
    )
    sequences = meshrec.EmbeddingCollection(
        [meshrec.EmbeddingConfig(**hashed("h2"), feature_names=["sequence"])]
    )
    return Lookups(bags, sequences)


def with_scores(model):
    """The model with one score for each sample."""
    width = NUM_DENSE + sum(
        config.embedding_dim * len(config.feature_names) for config in model.bags.embedding_bag_configs()
    )
    width += LONGEST * model.sequences.embedding_configs()[0].embedding_dim
    return Scores(model, width)


def drawn_batch(seed, ids, batch=20):
    """Dense values, and by feature the IDs and their numbers: of each sample up to LONGEST from ``ids``."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.as_tensor(ids)
    lengths = {f: torch.randint(0, LONGEST + 1, (batch,), generator=generator) for f in FEATURES}
    values = {
        f: ids[torch.randint(len(ids), (int(own.sum()),), generator=generator)] for f, own in lengths.items()
    }
    values["fixed"] = torch.randint(NUM_ROWS, (len(values["fixed"]),), generator=generator)
    return torch.randn(batch, NUM_DENSE, generator=generator), values, lengths


def as_sparse(values, lengths):
    """The KeyedJaggedTensor of a batch."""
    return KeyedJaggedTensor(
        FEATURES, torch.cat([values[f] for f in FEATURES]), lengths=torch.cat([lengths[f] for f in FEATURES])
    )


def trained(model, seed, steps=6):
    """Train a model on IDs that come and go; give the IDs that it has seen."""
    generator, seen = torch.Generator().manual_seed(seed), [torch.tensor(EDGES)]
    for module in (model.bags, model.sequences):
        if not module.is_fused:
            optimizer = (Adam(lr=0.1), RowWiseAdagrad(lr=0.1))[seed % 2]
            meshrec.fuse(module, optimizer=optimizer)
    for step in range(steps):
        low = 15 * step
        ids = torch.randint(low, low + 25, (20,), generator=generator) * 0x5851F42D4C957F2D
        seen.append(ids)
        dense, values, lengths = drawn_batch(seed + step, torch.cat([ids, torch.tensor(EDGES)]))
        for _ in range(2):
            model(dense, as_sparse(values, lengths)).square().sum().backward()
    return torch.cat(seen).unique()


def drawn_ids(seed, seen):
    """IDs that are known, evicted and never seen, and those at the ends of int64."""
    generator = torch.Generator().manual_seed(seed)
    new = torch.randint(-(1 << 62), 1 << 62, (30,), generator=generator)
    return torch.cat([seen, new, torch.tensor(EDGES)])


def evaluated(model, dense, values, lengths):
    """What the model itself gives, in evaluation."""
    with torch.no_grad():
        return model(dense, as_sparse(values, lengths))


def contents(model):
    """The IDs and rows of all hashed tables, and what was counted."""
    tables = model.bags.hashed_tables() | model.sequences.hashed_tables()
    return {name: (*table.items()[:2], vars(table.report).copy()) for name, table in tables.items()}


def same(found, expected):
    """Whether `contents` gave the same twice."""
    return all(
        torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]) and a[2] == b[2]
        for a, b in zip(found.values(), expected.values(), strict=True)
    )
