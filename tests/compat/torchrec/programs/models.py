"""DLRM, DLRM_DCN and DeepFM on random batches."""

import json
import sys
from pathlib import Path

import torch
from torchrec.datasets.random import RandomRecDataset
from torchrec.distributed.train_pipeline import TrainPipelineBase
from torchrec.models.deepfm import SimpleDeepFMNN
from torchrec.models.dlrm import DLRM, DLRM_DCN, DLRMTrain
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

KEYS = ["f1", "f2", "f3"]
found = {}


def collection() -> EmbeddingBagCollection:
    return EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(name=f"t_{key}", embedding_dim=8, num_embeddings=20, feature_names=[key])
            for key in KEYS
        ]
    )


def dataset(**options: object) -> RandomRecDataset:
    return RandomRecDataset(
        keys=KEYS, batch_size=6, hash_size=20, ids_per_feature=3, num_dense=5, manual_seed=1, **options
    )


batch = next(iter(dataset(num_batches=1)))
found["batch"] = [
    batch.sparse_features.values().tolist(),
    batch.sparse_features.lengths().tolist(),
    batch.dense_features.tolist(),
    batch.labels.tolist(),
    len(dataset(num_batches=7)),
]
other = list(dataset(num_batches=4, num_generated_batches=2, min_ids_per_feature=0))
found["other batches"] = [each.sparse_features.lengths().tolist() for each in other]

for name, make in {
    "dlrm": lambda: DLRM(collection(), 5, [16, 8], [16, 1]),
    "dcn": lambda: DLRM_DCN(collection(), 5, [16, 8], [16, 1], dcn_num_layers=2, dcn_low_rank_dim=3),
}.items():
    torch.manual_seed(0)
    train = DLRMTrain(make())
    optimizer = torch.optim.Adagrad(train.parameters(), lr=0.05)
    losses = []
    for batch in dataset(num_batches=6):
        optimizer.zero_grad()
        loss, (detached, logits, labels) = train(batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    found[name] = [losses, sorted(train.state_dict()), logits.tolist(), labels.tolist()]

torch.manual_seed(0)
train = DLRMTrain(DLRM(collection(), 5, [16, 8], [16, 1]))
pipeline = TrainPipelineBase(
    model=train,
    optimizer=torch.optim.SGD(train.parameters(), lr=0.5),
    device=torch.device("cpu"),
)
batches = iter(dataset(num_batches=4))
losses = []
while True:
    try:
        loss, logits, labels = pipeline.progress(batches)
    except StopIteration:
        break
    losses.append(loss.item())
found["pipeline"] = losses

torch.manual_seed(0)
deepfm = SimpleDeepFMNN(5, collection(), hidden_layer_size=7, deep_fm_dimension=4)
batch = next(iter(dataset(num_batches=1)))
found["deepfm"] = [deepfm(batch.dense_features, batch.sparse_features).tolist(), sorted(deepfm.state_dict())]
Path(sys.argv[1]).write_text(json.dumps(found))
