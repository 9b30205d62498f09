#!/usr/bin/env bash
# torch 2.13.0, torch.distributed over gloo: the largest value over ranks if it is NaN on one of two ranks.
# Guess: NaN on both ranks, as torch.maximum and max() give, whichever rank has it.
# Seen: NaN if it is on rank 0, and the other rank's number if it is on rank 1, for MAX and MIN in all float dtypes
# (gloo compares with std::max, which keeps its first argument unless the second is greater). So the infinity norm of
# a sharded DTensor is finite although one shard has a NaN, and clipping by that norm does not notice.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cd "$folder"
cat > program.py <<'PY'
import sys

import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
nan, seen = float("nan"), []
for values in ([nan, 1.0], [1.0, nan]):
    for operation in (dist.ReduceOp.MAX, dist.ReduceOp.MIN):
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            value = torch.tensor(values[rank], dtype=dtype)
            dist.all_reduce(value, operation)
            seen.append(value.isnan().item())
matrix = torch.tensor([[1.0, 2.0], [3.0, nan]])
shards = distribute_tensor(matrix, init_device_mesh("cpu", (2,)), [Shard(0)])
norm = torch.linalg.vector_norm(shards, float("inf")).full_tensor().item()
print(torch.__version__, "rank", rank, seen, "norm", norm)
assert seen == [True] * 6 + [False] * 6
assert torch.linalg.vector_norm(matrix, float("inf")).isnan() and norm == 2.0
PY
venv/bin/python -W ignore program.py 1 "$folder/store" &
venv/bin/python -W ignore program.py 0 "$folder/store"
wait $!
