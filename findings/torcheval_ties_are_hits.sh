#!/usr/bin/env bash
# torcheval 0.0.7: reciprocal_rank and hit_rate of items whose scores are equal.
# Guess: a model that scores all 1000 items alike has the relevant one among its first 10 in 1 % of the cases, or never.
# Seen: hit rate 1 and reciprocal rank 1. The rank is the number of items with a greater score, so every tie is won by
# the relevant item: a collapsed model, or one with scores in fp8, gets the best metrics. binary_auroc of the same
# package counts ties half.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torcheval==0.0.7 torch==2.13.0 numpy==2.4.6
cd "$folder"
venv/bin/python -W ignore - <<'PY'
import torch
from torcheval.metrics.functional import binary_auroc, hit_rate, reciprocal_rank

scores, relevant = torch.zeros(5, 1000), torch.arange(5) * 200
area = binary_auroc(torch.zeros(4), torch.tensor([1, 1, 0, 0])).item()
print(hit_rate(scores, relevant, k=10).tolist(), reciprocal_rank(scores, relevant).tolist(), area)
assert hit_rate(scores, relevant, k=10).tolist() == reciprocal_rank(scores, relevant).tolist() == [1] * 5
assert area == 0.5
noise = torch.rand(2000, 1000, generator=torch.Generator().manual_seed(0)) * 1e-6
share = hit_rate(noise, torch.zeros(2000, dtype=torch.long), k=10).mean().item()
print("with noise of 1e-6 in place of ties:", share)
assert share < 0.03
PY
