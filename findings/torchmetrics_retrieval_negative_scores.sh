#!/bin/sh
# torchmetrics 1.9.0: MRR, MAP, recall@k and precision@k of logits take every relevant item with a score of at most 0
# as irrelevant; NDCG and hit rate of the same call do not.
#
# Guess: the relevant item is ranked first of three, so MRR = MAP = recall@2 = 1 and precision@2 = 1/2, whatever number
# is added to all scores.
# Behavior: with scores -1, -2, -3 the four metrics are 0, while NDCG and hit rate are 1. Negative logits are what a
# click model gives for most items. `torch.where(preds > 0, target, 0)` comes before the ranking.
# Output seen:
#   scores 3 2 1:    mrr 1.0 map 1.0 recall@2 1.0 precision@2 0.5 ndcg 1.0 hit_rate@2 1.0
#   scores -1 -2 -3: mrr 0.0 map 0.0 recall@2 0.0 precision@2 0.0 ndcg 1.0 hit_rate@2 1.0
# Exits with 1 if that changes. PYTHON names the interpreter; its torch is used if it has one.
set -e
PYTHON=${PYTHON:-python3}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$PYTHON" -c 'import torch, numpy, packaging' 2>/dev/null ||
    "$PYTHON" -m pip install --quiet --target "$folder" torch==2.10.0 numpy==2.2.6 packaging==25.0
"$PYTHON" -m pip install --quiet --no-deps --target "$folder" torchmetrics==1.9.0 lightning-utilities==0.15.2
cd "$folder"
PYTHONPATH="$folder" "$PYTHON" - <<'PYEOF'
import sys

import torch
import torchmetrics
from torchmetrics.functional import retrieval

print("torchmetrics", torchmetrics.__version__, "torch", torch.__version__)
target = torch.tensor([True, False, False])


def metrics(scores):
    return {
        "mrr": retrieval.retrieval_reciprocal_rank(scores, target),
        "map": retrieval.retrieval_average_precision(scores, target),
        "recall@2": retrieval.retrieval_recall(scores, target, top_k=2),
        "precision@2": retrieval.retrieval_precision(scores, target, top_k=2),
        "ndcg": retrieval.retrieval_normalized_dcg(scores, target),
        "hit_rate@2": retrieval.retrieval_hit_rate(scores, target, top_k=2),
    }


positive, negative = (torch.tensor(scores) for scores in ([3.0, 2.0, 1.0], [-1.0, -2.0, -3.0]))
for scores in (positive, negative):
    said = " ".join(f"{name} {float(value)}" for name, value in metrics(scores).items())
    print("scores", *map(int, scores.tolist()), "-", said)
same = [float(value) for value in metrics(positive).values()] == [1, 1, 1, 0.5, 1, 1]
sys.exit(not (same and [float(value) for value in metrics(negative).values()] == [0, 0, 0, 0, 1, 1]))
PYEOF
