#!/usr/bin/env bash
# FBGEMM 1.8.0: forward calls under eval() and no_grad() advance the step count of the table's optimizer.
# Guess: `iter` counts updates, so evaluations between steps do not change what training gives.
# Seen: four steps with an evaluation after each count 8. Row-wise Adagrad with an averaged half (EMAINPLACE, which a
# CPU has) averages at every second count: with one evaluation per step all training falls on odd counts, and the
# half stays at 1.0, as if averaging were off; with two it is as without. The same count is the exponent of the bias
# correction in Adam and LAMB on GPUs (`_forward_impl` adds 1 before it looks at the optimizer, not at the mode).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6 fbgemm-gpu-cpu==1.8.0
cd "$folder"
venv/bin/python -W ignore - <<'PY'
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    EmainplaceModeDefinition,
    SplitTableBatchedEmbeddingBagsCodegen,
)


def trained(evaluations):
    table = SplitTableBatchedEmbeddingBagsCodegen(
        [(10, 4, EmbeddingLocation.HOST, ComputeDevice.CPU)],
        output_dtype=SparseType.FP32,
        optimizer=EmbOptimType.EMAINPLACE_ROWWISE_ADAGRAD,
        learning_rate=0.1,
        emainplace_mode=EmainplaceModeDefinition(step_ema=2, step_start=0, step_ema_coef=0.5),
    )
    table.init_embedding_weights_uniform(1.0, 1.0)
    batch = torch.tensor([1]), torch.tensor([0, 1])
    for _ in range(4):
        table.train()
        table(*batch)[:, :2].sum().backward()
        table.eval()
        with torch.no_grad():
            for _ in range(evaluations):
                table(*batch)
    trained_half, averaged_half = table.split_embedding_weights()[0][1, [0, 2]].tolist()
    return table.iter.item(), round(trained_half, 4), round(averaged_half, 4)


seen = [trained(evaluations) for evaluations in (0, 1, 2)]
print("count, trained half, averaged half:", *seen)
assert seen == [(4, 0.6062, 0.8031), (8, 0.6062, 1.0), (12, 0.6062, 0.8031)]
PY
