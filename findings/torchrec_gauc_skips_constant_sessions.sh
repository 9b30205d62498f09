#!/usr/bin/env bash
# TorchRec 1.8.0: GAUCMetric leaves out sessions in which all predictions are equal, or equal to the first one or 0.
# Guess: a session with a clicked and an unclicked item counts, with AUC 1/2 if the model gives both the same score, and
# a score of exactly 0 is a score.
# Seen: of two sessions, the first is ranked rightly. With equal scores in the second, GAUC is 1 and not 3/4; with
# scores 0.5 for the unclicked and 0 for the clicked item it is 1, too, and not 1/2: 0 is taken for padding. So items
# without a trained row, which all score alike, cannot lower it. Scores of 1e-30 in place of 0 give 1/2.
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
from torchrec.metrics.gauc import GAUCMetric
from torchrec.metrics.metrics_config import DefaultTaskInfo

NAME = DefaultTaskInfo.name


def gauc(*second_session):
    metric = GAUCMetric(world_size=1, my_rank=0, batch_size=4, tasks=[DefaultTaskInfo])
    metric.update(
        predictions={NAME: torch.tensor([0.2, 0.8, *second_session])},
        labels={NAME: torch.tensor([0.0, 1.0, 0.0, 1.0])},
        weights={NAME: torch.ones(4)},
        num_candidates=torch.tensor([2, 2]),
    )
    values = metric.compute()
    return [round(values[f"gauc-{NAME}|lifetime_{key}"].item(), 4) for key in ("gauc", "gauc_num_samples")]


equal, zero, tiny = gauc(0.5, 0.5), gauc(0.5, 0.0), gauc(0.5, 1e-30)
print("equal:", equal, "0:", zero, "1e-30:", tiny)
assert equal == zero == [1.0, 1.0] and tiny == [0.5, 2.0]
PY
