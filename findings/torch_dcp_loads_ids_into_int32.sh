#!/usr/bin/env bash
# torch 2.13.0: torch.distributed.checkpoint loads a tensor into one of another dtype without a word.
# Guess: an error that names both dtypes, as sizes that differ give, and as the checkpoint records the dtype.
# Seen: int64 IDs above 2^32 are wrapped into an int32 tensor (2^40 + 3 becomes 3), 70000.0 becomes inf in fp16, 1.7
# becomes 1 as int64 and True as bool. The default load planner copies with Tensor.copy_, and compares only sizes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cd "$folder"
venv/bin/python -W ignore - <<'PY'
import torch
import torch.distributed.checkpoint as dcp


def loaded(saved, dtype):
    dcp.save({"x": saved}, checkpoint_id="checkpoint")
    state = {"x": torch.zeros(saved.shape, dtype=dtype)}
    dcp.load(state, checkpoint_id="checkpoint")
    return state["x"].tolist()


seen = [
    loaded(torch.tensor([2**40 + 3]), torch.int32),
    loaded(torch.tensor([70000.0]), torch.float16),
    loaded(torch.tensor([1.7]), torch.int64),
    loaded(torch.tensor([1.7]), torch.bool),
]
print(torch.__version__, seen)
assert seen == [[3], [float("inf")], [1], [True]]
try:
    dcp.load({"x": torch.zeros(2)}, checkpoint_id="checkpoint")
except BaseException as error:
    print("another size:", type(error).__name__)
else:
    raise AssertionError("another size is taken, too")
PY
