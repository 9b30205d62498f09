#!/usr/bin/env bash
# FBGEMM 1.8.0: asynchronous_complete_cumsum, which turns lengths into offsets, keeps int32 and wraps.
# Guess: int64 offsets, as torch.cumsum gives for int32, or an error.
# Seen: lengths [2147483647, 1] of int32 give the offsets [0, 2147483647, -2147483648].
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6 fbgemm-gpu-cpu==1.8.0
cd "$folder"
venv/bin/python - <<'PY'
import fbgemm_gpu  # noqa: F401
import torch

lengths = torch.tensor([2**31 - 1, 1], dtype=torch.int32)
offsets = torch.ops.fbgemm.asynchronous_complete_cumsum(lengths)
print(offsets, torch.cumsum(lengths, 0))
assert offsets.dtype == torch.int32 and offsets.tolist() == [0, 2**31 - 1, -(2**31)]
assert torch.cumsum(lengths, 0).tolist() == [2**31 - 1, 2**31]
PY
