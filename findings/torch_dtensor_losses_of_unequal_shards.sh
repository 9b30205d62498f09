#!/usr/bin/env bash
# torch 2.13.0: mean losses of a DTensor whose shards have unequal sizes (3 samples on 2 ranks).
# Guess: the loss and gradients of the whole tensor. DTensor.mean() gives the whole mean.
# Seen: the mean of the ranks' means, in which the single sample of the last rank counts half: log loss 1.871 and not
# 1.478, squared error 4.75 and not 3.33, with gradients [-1, 0, 6] and not [-2/3, 0, 2]. The
# loss of each rank's shard is marked Partial(avg), whatever their sizes are. reduction="none", then mean(), is right.
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
from torch.nn.functional import binary_cross_entropy_with_logits, mse_loss

rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))
logits, labels = torch.tensor([0.0, 0.0, 3.0]), torch.tensor([1.0, 0.0, 0.0])
sharded_labels = distribute_tensor(labels, mesh, [Shard(0)])
seen = []
for loss in (binary_cross_entropy_with_logits, mse_loss):
    sharded = distribute_tensor(logits, mesh, [Shard(0)]).requires_grad_()
    loss(sharded, sharded_labels).backward()
    value = loss(sharded, sharded_labels).full_tensor().item()
    mean = loss(sharded, sharded_labels, reduction="none").mean().full_tensor().item()
    seen.append((round(value, 3), round(mean, 3), round(loss(logits, labels).item(), 3)))
gradient = sharded.grad.full_tensor().tolist()
print(torch.__version__, "rank", rank, seen, gradient)
assert seen == [(1.871, 1.478, 1.478), (4.75, 3.333, 3.333)] and gradient == [-1.0, 0.0, 6.0]
PY
venv/bin/python -W ignore program.py 1 "$folder/store" &
venv/bin/python -W ignore program.py 0 "$folder/store"
wait $!
