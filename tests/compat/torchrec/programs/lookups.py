"""Embedding collections: what they give, learn, save and print."""

import json
import sys
from pathlib import Path

import torch
import torchrec
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

found = {}
torch.manual_seed(0)

ebc = torchrec.EmbeddingBagCollection(
    device="cpu",
    tables=[
        torchrec.EmbeddingBagConfig(
            name="product_table",
            embedding_dim=8,
            num_embeddings=64,
            feature_names=["product"],
            pooling=torchrec.PoolingType.SUM,
        ),
        torchrec.EmbeddingBagConfig(
            name="user_table",
            embedding_dim=8,
            num_embeddings=64,
            feature_names=["user"],
            pooling=torchrec.PoolingType.MEAN,
        ),
    ],
)
mb = KeyedJaggedTensor(
    keys=["product", "user"],
    values=torch.tensor([1, 2, 3, 4, 5, 6]),
    lengths=torch.tensor([2, 0, 1, 3]),
)
pooled = ebc(mb)
found["pooled"] = [
    str(ebc),
    list(ebc.state_dict()),
    pooled.keys(),
    pooled.offset_per_key(),
    pooled.values().tolist(),
    pooled["user"].tolist(),
    [config.name for config in ebc.embedding_bag_configs()],
    ebc.is_weighted(),
    str(ebc.device),
]
pooled.values().square().sum().backward()
found["gradient"] = ebc.embedding_bags["user_table"].weight.grad[:7].tolist()

shared = EmbeddingBagCollection(
    tables=[
        EmbeddingBagConfig(10, 4, "t1", feature_names=["f1", "f2"]),
        EmbeddingBagConfig(num_embeddings=10, embedding_dim=2, name="t2", feature_names=["f1"]),
        EmbeddingBagConfig(num_embeddings=5, embedding_dim=2, name="f3", pooling=PoolingType.SUM),
    ],
    is_weighted=True,
)
features = KeyedJaggedTensor.from_lengths_sync(
    keys=["f3", "f2", "f1", "unused"],
    values=torch.tensor([1, 2, 3, 4, 0, 9]),
    lengths=torch.tensor([1, 1, 2, 0, 0, 1, 1, 0]),
    weights=torch.tensor([0.5, 1.0, 1.5, 2.0, 2.5, 3.0]),
)
pooled = shared(features)
found["shared"] = [pooled.keys(), pooled.values()[:, :10].tolist(), pooled.length_per_key()]

ec = EmbeddingCollection(
    tables=[
        EmbeddingConfig(num_embeddings=10, embedding_dim=3, name="t1", feature_names=["f1", "f2"]),
        EmbeddingConfig(num_embeddings=10, embedding_dim=3, name="t2", feature_names=["f3"]),
    ]
)
sequences = ec(features)
found["sequences"] = [
    str(ec),
    list(ec.state_dict()),
    {
        name: [bags.values().tolist(), bags.lengths().tolist(), bags.offsets().tolist()]
        for name, bags in sequences.items()
    },
]
meta = EmbeddingBagCollection(
    tables=[EmbeddingBagConfig(num_embeddings=10, embedding_dim=4, name="t", feature_names=["f"])],
    device=torch.device("meta"),
)
found["meta"] = [str(meta.embedding_bags["t"].weight.device), list(meta.embedding_bags["t"].weight.shape)]
Path(sys.argv[1]).write_text(json.dumps(found))
