#!/usr/bin/env bash
# FBGEMM 1.8.0: the bounds check in its default mode, WARNING, writes into the caller's tensor of indices.
# Guess: the lookup reads row 0 for an ID outside of the table, and the batch stays what the caller passed.
# Seen: [1, 99, -5] is [1, 0, 0] after the forward call: a second model that reads the same batch no longer sees
# which IDs were unknown, and counts of unknown IDs taken after the forward are 0.
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


module = table(optimizer=EmbOptimType.EXACT_SGD, bounds_check_mode=BoundsCheckMode.WARNING)
indices = torch.tensor([1, 99, -5])
module(indices, torch.tensor([0, 1, 2, 3]))
print(indices)
assert indices.tolist() == [1, 0, 0]
PY
