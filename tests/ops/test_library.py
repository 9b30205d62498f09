import json
import os
import subprocess
import sys
from pathlib import Path

from meshrec.ops import library

# Pooled sums of one table, looked up by a key with two bags, and the table after a step of plain SGD.
LOOKUP_AND_UPDATE = """
import json, sys, torch, meshrec
from meshrec.ops import library
weight = torch.arange(12.0).reshape(6, 2)
ids, offsets = torch.tensor([1, 5, 5]), torch.tensor([0, 2, 3])
lookup = dict(
    per_sample_weights=None, segments=None, num_keys=1, keys=[0], tables=[0], pooling=[0], flat=False)
names = torch.tensor(list(b"t0\\tf0\\n"), dtype=torch.uint8)
out = torch.ops.meshrec.tbe_forward(
    [weight], ids, offsets, out_size=2, out_dtype=torch.float32, check_ids=True, names=names, **lookup)
from meshrec.ops.tbe.formulas import Hyper
hyper = torch.zeros(len(Hyper._fields), dtype=torch.float64)
hyper[0] = 0.5
torch.ops.meshrec.tbe_update(
    torch.ones(2, 2), ids, offsets, dims=[2], weights=[weight], state=[], optimizer=0, hyper=hyper,
    row_stats=None, origins=[], **lookup)
json.dump([library.has_kernels, out.tolist(), weight.tolist()], sys.stdout)
"""
OUT = [[12.0, 14.0], [10.0, 11.0]]
UPDATED = [[0.0, 1.0], [1.5, 2.5], [4.0, 5.0], [6.0, 7.0], [8.0, 9.0], [9.0, 10.0]]


def run(environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", LOOKUP_AND_UPDATE],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, **environment},
    )


def test_without_kernels_the_naive_ones_serve_and_one_line_says_so(tmp_path: Path) -> None:
    done = run({"MESHREC_LIBRARY": str(tmp_path / "absent.so")})
    assert json.loads(done.stdout) == [False, OUT, UPDATED]
    (line,) = done.stderr.splitlines()
    assert "no compiled kernels" in line
    assert "absent.so" in line
    assert "Install a C++20 compiler" in line


def test_kernels_agree_with_the_naive_ones_and_say_nothing() -> None:
    done = run({})
    assert json.loads(done.stdout) == [library.has_kernels, OUT, UPDATED]
    assert done.stderr == "" if library.has_kernels else "no compiled kernels" in done.stderr


def test_schemas_are_joined_from_their_pieces() -> None:
    schemas = library.schemas()
    assert "lengths_to_offsets(Tensor lengths) -> Tensor" in schemas
    assert all(schema.count("(") == schema.count(")") and "//" not in schema for schema in schemas)
