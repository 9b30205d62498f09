#!/usr/bin/env bash
# torch 2.13.0, torch.distributed over gloo: a group is created with a timeout of 12 s, which _set_pg_timeout (the
# public dist.set_timeout from 2.14 on) then lowers to 2 s. Rank 1 does nothing any more.
# Guess: whatever rank 0 waits for fails after 2 s, as the function sets the timeout of the group.
# Seen: an all-reduce fails after 2 s, and a receive (a message between two ranks) after 12 s. A message uses the
# lower timeout only if it is given to its wait.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.0
cd "$folder"
cat > program.py <<'PY'
import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

kind, rank = sys.argv[1], int(sys.argv[2])
first, second = timedelta(seconds=12), timedelta(seconds=2)
dist.init_process_group("gloo", init_method="file://" + sys.argv[3], rank=rank, world_size=2, timeout=first)
tensor = torch.ones(1)
dist.all_reduce(tensor)
dist.distributed_c10d._set_pg_timeout(second, dist.group.WORLD)
if rank == 1:
    time.sleep(20)
    os._exit(0)
began = time.monotonic()
try:
    if kind == "all-reduce":
        dist.all_reduce(tensor)
    elif kind == "receive":
        dist.irecv(tensor, 1).wait()
    else:
        dist.irecv(tensor, 1).wait(second)
except RuntimeError:
    pass
seconds = time.monotonic() - began
print(f"{torch.__version__}: {kind} failed after {seconds:.0f} s")
assert abs(seconds - (12 if kind == "receive" else 2)) < 1.5
os._exit(0)
PY
for kind in all-reduce receive receive-within; do
    venv/bin/python -W ignore program.py $kind 1 "$folder/$kind" &
    venv/bin/python -W ignore program.py $kind 0 "$folder/$kind"
    kill $! && wait $! || true
done
