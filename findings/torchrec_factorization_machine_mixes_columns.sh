#!/usr/bin/env bash
# TorchRec 1.8.0: FactorizationMachine, "the FM part" of the DeepFM paper, which its docstring names.
# Guess: the sum of the dot products of all pairs of embeddings: of (1, 2) and (3, 4), 1 * 3 + 2 * 4 = 11.
# Seen: 35. It sums the products of all pairs of elements: those within one embedding (1 * 2 + 3 * 4) and those of
# different columns (1 * 4 + 2 * 3), too. So one embedding alone has interactions, and a rotation of all embeddings,
# which keeps every dot product, changes the value. The docstring says that embeddings may differ in size, and its
# figure shows them flattened; neither says that the products are others than the paper's.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6 fbgemm-gpu-cpu==1.8.0 tensordict==0.15.3 torchmetrics==1.0.3 tqdm==4.70.1 \
    pyre-extensions==0.0.32 iopath==0.1.10
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check --no-deps torchrec==1.8.0
cd "$folder"
venv/bin/python -W ignore - <<'PY'
import torch
from torchrec.modules.deepfm import FactorizationMachine

machine = FactorizationMachine()
first, second = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0]])
seen = machine([first, second]).item()
rotation = torch.tensor([[0.6, -0.8], [0.8, 0.6]])
rotated = machine([first @ rotation, second @ rotation]).item()
dots = [(first * second).sum().item(), ((first @ rotation) * (second @ rotation)).sum().item()]
alone = machine([first]).item()
print("seen", seen, "after a rotation", rotated, "dot products", dots, "one embedding alone", alone)
assert seen == 35 and abs(rotated - seen) > 1 and alone == 2
assert abs(dots[0] - 11) < 1e-5 and abs(dots[1] - 11) < 1e-5
PY
