#!/usr/bin/env bash
# FBGEMM 1.8.0 under TorchRec 1.8.0's quantized collection: -1, the mark of a pruned row, counts in MEAN pooling.
# Guess: an ID that is left out of the sum is left out of the count too.
# Seen: rows of ones give 0.5 for the bag [1, -1], so pruning rows shrinks every mean that contained them.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6 fbgemm-gpu-cpu==1.8.0 tensordict==0.15.3 torchmetrics==1.0.3 tqdm==4.70.1 \
    pyre-extensions==0.0.32 iopath==0.1.10
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check --no-deps torchrec==1.8.0
cd "$folder"
venv/bin/python - <<'PY'
import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, PoolingType
from torchrec.inference.modules import quantize_embeddings


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        config = EmbeddingBagConfig(
            name="t", embedding_dim=4, num_embeddings=10, feature_names=["f"], pooling=PoolingType.MEAN
        )
        self.ebc = EmbeddingBagCollection(tables=[config])

    def forward(self, features):
        return self.ebc(features).values()


model = Model()
model.ebc.embedding_bags["t"].weight.data.fill_(1.0)
quantized = quantize_embeddings(model, torch.qint8, inplace=True)
means = quantized(KeyedJaggedTensor.from_lengths_sync(["f"], torch.tensor([1, -1, 1]), torch.tensor([2, 1])))
print(means)
assert means[:, 0].tolist() == [0.5, 1.0]
PY
