#!/usr/bin/env bash
# torch 2.13.0, torch.distributed over gloo: all_reduce and broadcast of a column of a matrix.
# Guess: the column is reduced (as a tensor's strides say where its elements are), or it is refused: NCCL asks for
# contiguous tensors.
# Seen: both take as many elements as the column has from its first address on, without an error. Of a column of four
# ones over two ranks, the first two rows become 2 and the others stay 1; the neighboring column is reduced in their
# place. A metric kept as a column of a table is wrong for all rows but the first.
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

rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
table = torch.tensor([[1.0, 10.0]]).repeat(4, 1)
dist.all_reduce(table[:, 0])
sent = torch.full((4, 2), float(rank))
dist.broadcast(sent[:, 0], 1)
whole = torch.ones(4)
dist.all_reduce(whole)
print(f"{torch.__version__}: rank {rank} {table.tolist()} {sent.tolist()}\n", end="")
assert table.tolist() == [[2, 20], [2, 20], [1, 10], [1, 10]]
assert rank == 1 or sent.tolist() == [[1, 1], [1, 1], [0, 0], [0, 0]]
assert whole.tolist() == [2] * 4
PY
venv/bin/python -W ignore program.py 1 "$folder/store" &
venv/bin/python -W ignore program.py 0 "$folder/store"
wait $!
