#!/usr/bin/env bash
# TorchRec 1.8.0: NDCGMetric multiplies the NDCG of a session by its largest sample weight, and divides by the number
# of sessions.
# Guess: a weighted mean, so equal weights change nothing and a perfect ranking is 1, as for the other metrics.
# Seen: a perfect ranking has 1 with weights of 1, 2 with weights of 2 and 0.3 with weights of 0.3; as the default
# report is 1 - NDCG before the product, it is 0 for all three. Of two sessions, a perfect one and one of no label above
# 0 (NDCG 0), weights move the value from 1/2 to 1. A comment in its source calls the product production logic.
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
from torchrec.metrics.metrics_config import DefaultTaskInfo
from torchrec.metrics.ndcg import NDCGMetric

NAME = DefaultTaskInfo.name


def ndcg(labels, weights, decreasing=False):
    metric = NDCGMetric(
        world_size=1,
        my_rank=0,
        batch_size=4,
        tasks=[DefaultTaskInfo],
        session_key="session",
        report_ndcg_as_decreasing_curve=decreasing,
    )
    metric.update(
        predictions={NAME: torch.tensor([0.2, 0.8, 0.2, 0.8])},
        labels={NAME: torch.tensor(labels)},
        weights={NAME: torch.tensor(weights)},
        required_inputs={"session": torch.tensor([1, 1, 2, 2])},
    )
    return round(metric.compute()[f"ndcg-{NAME}|lifetime_ndcg"].item(), 6)


perfect = [0.0, 1.0, 0.0, 1.0]
seen = [ndcg(perfect, [weight] * 4) for weight in (1.0, 2.0, 0.3)]
default = [ndcg(perfect, [weight] * 4, decreasing=True) for weight in (1.0, 2.0, 0.3)]
mixed = [ndcg([0.0, 1.0, 0.0, 0.0], weights) for weights in ([1.0] * 4, [2.0, 2.0, 1.0, 1.0])]
print("weights 1, 2, 0.3:", seen, "1 - NDCG:", default, "a session without a click:", mixed)
assert seen == [1.0, 2.0, 0.3] and default == [0.0, 0.0, 0.0] and mixed == [0.5, 1.0]
PY
