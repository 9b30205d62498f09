#!/usr/bin/env bash
# torch 2.13.0, torch.distributed.pipelining over gloo: a batch of 11 in 3 microbatches, evaluated by 2 stages.
# Guess: 11 rows, as the microbatches are cut by tensor_split (4, 4 and 3 rows), or an error that asks for equal ones.
# Seen: 12 rows, without error or warning. The buffers to receive have the shape of the first microbatch, so the last
# stage computes on a fourth row of the last microbatch that nobody sent. Training fails in the first stage's
# backward pass, after the last stage has computed the loss and its own gradients from that row.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.0
cd "$folder"
cat > program.py <<'PY'
import sys

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
stage = PipelineStage(torch.nn.Identity(), rank, 2, torch.device("cpu"))
schedule = ScheduleGPipe(stage, 3)
batch = torch.arange(11.0)[:, None]
output = schedule.eval(batch) if rank == 0 else schedule.eval()
if rank == 1:
    print(torch.__version__, tuple(output.shape), output.flatten()[:11].tolist())
    assert output.shape == (12, 1)
    assert torch.equal(output[:11], batch)
PY
venv/bin/python -W ignore program.py 0 "$folder/store" &
venv/bin/python -W ignore program.py 1 "$folder/store"
wait $!
