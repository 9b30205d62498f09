#!/usr/bin/env bash
# FBGEMM 1.8.0: rows quantized to 8 bits, if the values of a row lie close together.
# Guess: each row has its own scale, so the error is at most 1/510 of the row's range, whatever the range is.
# Seen: the largest of [0, 1/3, 2/3, 1] * r comes back as 0.91 r for r = 1e-7, as 0.50 r for 1e-8 and as 0.09 r for
# 1e-9. The codes are made with 255 / (range + 1e-8), and decoded with range / 255. Rows that shrink under
# weight decay, or that are made of differences to a mean, lose their differences. (Rows of 4 bits are 0 below 1e-7, as
# their scale is stored in fp16.)
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6 fbgemm-gpu-cpu==1.8.0
cd "$folder"
venv/bin/python -W ignore - <<'PY'
import fbgemm_gpu  # noqa: F401
import torch

steps = torch.tensor([[0.0, 1 / 3, 2 / 3, 1.0]])
operators = torch.ops.fbgemm


def largest(row_range):
    rows = steps * row_range
    bytes_ = operators.Fused8BitRowwiseQuantizedToFloat(operators.FloatToFused8BitRowwiseQuantized(rows))
    half_bytes = operators.FusedNBitRowwiseQuantizedSBHalfToFloat(
        operators.FloatToFusedNBitRowwiseQuantizedSBHalf(rows, 4), 4
    )
    return round(bytes_[0, 3].item() / row_range, 2), round(half_bytes[0, 3].item() / row_range, 2)


seen = {row_range: largest(row_range) for row_range in (1.0, 1e-4, 1e-7, 1e-8, 1e-9)}
print("share of the largest value that is left, 8 and 4 bits:", seen)
assert [eight for eight, _ in seen.values()] == [1.0, 1.0, 0.91, 0.5, 0.09]
assert seen[1.0][1] == 1.0 and seen[1e-7][1] == 0.0
PY
