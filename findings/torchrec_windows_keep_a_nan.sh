#!/usr/bin/env bash
# TorchRec 1.8.0: window metrics after one batch with a NaN prediction.
# Guess: NaN until the batch has left the window of two batches, then the value of the batches in it; that is what the
# window is for, beside the lifetime value.
# Seen: NaN for the rest of the run. A window is a running sum, from which the batch that leaves is subtracted, and
# NaN - NaN is NaN. All metrics that are sums over samples share the class, WindowBuffer. (The lifetime value is NaN
# from then on, too, as one expects.)
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
from torchrec.metrics.calibration import CalibrationMetric
from torchrec.metrics.metrics_config import DefaultTaskInfo
from torchrec.metrics.ne import NEMetric

NAME = DefaultTaskInfo.name
predictions, labels = torch.tensor([0.2, 0.8, 0.2, 0.8]), torch.tensor([0.0, 1.0, 0.0, 1.0])
for metric_class, key in ((NEMetric, "ne"), (CalibrationMetric, "calibration")):
    metric = metric_class(world_size=1, my_rank=0, batch_size=4, tasks=[DefaultTaskInfo], window_size=8)
    values = []
    for step in range(7):
        scores = predictions.clone()
        scores[0] = float("nan") if step == 1 else scores[0]
        metric.update(predictions={NAME: scores}, labels={NAME: labels}, weights={NAME: torch.ones(4)})
        values.append(metric.compute()[f"{key}-{NAME}|window_{key}"])
    print(key, [round(value.item(), 4) for value in values])
    assert values[0].isfinite() and all(value.isnan() for value in values[1:])
PY
