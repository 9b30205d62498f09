#!/usr/bin/env bash
# TorchRec 1.8.0 with FBGEMM 1.8.0: quantize_embeddings(int8) gives NaN for rows with finite values above 65504.
# Guess: a row-wise scale fits any finite row; the error is (max - min) / 255.
# Seen: [-1e5, 0, 1, 1e5] is looked up as four NaN: scale and offset are stored in fp16, where -1e5 is -inf.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6 fbgemm-gpu-cpu==1.8.0 tensordict==0.15.3 torchmetrics==1.0.3 tqdm==4.70.1 \
    pyre-extensions==0.0.32 iopath==0.1.10
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check --no-deps torchrec==1.8.0
cd "$folder"
venv/bin/python - <<'PY'
import copy

import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.inference.modules import quantize_embeddings


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        config = EmbeddingBagConfig(name="t", embedding_dim=4, num_embeddings=2, feature_names=["f"])
        self.ebc = EmbeddingBagCollection(tables=[config])

    def forward(self, features):
        return self.ebc(features).values()


model = Model()
model.ebc.embedding_bags["t"].weight.data.copy_(torch.tensor([[-1e5, 0.0, 1.0, 1e5], [-6e4, 0.0, 1.0, 6e4]]))
quantized = quantize_embeddings(copy.deepcopy(model), torch.qint8, inplace=True)
rows = quantized(KeyedJaggedTensor.from_lengths_sync(["f"], torch.tensor([0, 1]), torch.tensor([1, 1])))
print(rows)
assert rows[0].isnan().all() and rows[1].isfinite().all()
PY
