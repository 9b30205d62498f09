#!/usr/bin/env bash
# scipy 1.17.1: linprog and milp (HiGHS) with a constraint whose coefficients are at most 1e-9.
# Guess: the coefficients count, since HiGHS scales the problem, or the solver refuses them.
# Seen: they are taken as 0, without a word. Two tables of up to 10^9 rows of 512 bytes shall fit into 0.08 TB: in TB,
# 10^9 rows of each are "optimal", which take 1.024 TB, with a slack of 0.08 TB. In GB the plan fits. HiGHS' option
# small_matrix_value is the limit, and scipy has no argument for it.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check scipy==1.17.1 numpy==2.4.6
cd "$folder"
venv/bin/python - <<'PY'
import numpy as np
from scipy.optimize import Bounds, LinearConstraint, linprog, milp


def rows(unit):
    """Return rows of both tables by linprog and milp, with memory in this unit of bytes."""
    size, room = [[512 / unit] * 2], 80e9 / unit
    first = linprog([-1, -2], A_ub=size, b_ub=[room], bounds=(0, 1e9))
    limit = LinearConstraint(size, -np.inf, room)
    second = milp([-1, -2], constraints=limit, bounds=Bounds(0, 1e9), integrality=[1, 1])
    assert first.success and second.success
    return first.x.round().tolist(), second.x.round().tolist(), float(first.slack[0])


gigabytes, terabytes = rows(1e9), rows(1e12)
print("GB", gigabytes, "TB", terabytes)
assert gigabytes[:2] == ([0, 156_250_000],) * 2
assert terabytes == ([1e9, 1e9], [1e9, 1e9], 0.08)
PY
