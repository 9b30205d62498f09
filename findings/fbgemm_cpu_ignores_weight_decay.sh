#!/usr/bin/env bash
# FBGEMM 1.8.0 on CPU: row-wise Adagrad takes weight_decay and weight_decay_mode, and applies neither.
# Guess: with lr 0.1, decay 0.5 and gradient 1, a weight of 1 becomes 0.85 when decoupled, and under L2 the state is
# 1.5^2 = 2.25.
# Seen: weight 0.9 and state 1.0 in both modes, as without decay; no warning.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6 fbgemm-gpu-cpu==1.8.0
cd "$folder"
venv/bin/python - <<'PY'
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode, EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
    WeightDecayMode,
)


def table(**options):
    module = SplitTableBatchedEmbeddingBagsCodegen(
        [(10, 4, EmbeddingLocation.HOST, ComputeDevice.CPU)], output_dtype=SparseType.FP32, **options
    )
    module.init_embedding_weights_uniform(1.0, 1.0)
    return module


def updated(mode, decay):
    module = table(
        optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        learning_rate=0.1,
        eps=0.0,
        weight_decay=decay,
        weight_decay_mode=mode,
    )
    module(torch.tensor([1]), torch.tensor([0, 1])).sum().backward()
    weight, sum_of_squares = module.split_embedding_weights()[0][1, 0], module.split_optimizer_states()[0][0][1]
    return round(weight.item(), 6), round(sum_of_squares.item(), 6)


for mode in (WeightDecayMode.L2, WeightDecayMode.DECOUPLE):
    without, with_decay = updated(mode, 0.0), updated(mode, 0.5)
    print(mode, without, with_decay)
    assert without == with_decay == (0.9, 1.0)
PY
