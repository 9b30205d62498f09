#!/usr/bin/env bash
# TorchRec 1.8.0: the AUC metric of tied predictions depends on the order of the rows.
# Guess: 0.5 for a constant model, as scikit-learn gives.
# Seen: 1.0 when the positive rows come first, 0.0 when they come last. Predictions of quantized or collapsed models
# have many ties, and batches sorted by label are usual in offline evaluation.
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
from torchrec.metrics.auc import compute_auc

predictions, weights = torch.full((1, 4), 0.5), torch.ones(1, 4)
first, last = torch.tensor([[1.0, 1.0, 0.0, 0.0]]), torch.tensor([[0.0, 0.0, 1.0, 1.0]])
values = [compute_auc(1, [predictions], [labels], [weights]).item() for labels in (first, last)]
print(values)
assert values == [1.0, 0.0]
PY
