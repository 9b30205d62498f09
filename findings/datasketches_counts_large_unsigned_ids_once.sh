#!/usr/bin/env bash
# datasketches 5.2.0: distinct counts of integers from 2^63 on, half of all unsigned 64-bit hashes.
# Guess: 1000 consecutive IDs from 2^63 on count as about 1000, as those from 2^62 on do, or a TypeError, as
# count_min_sketch raises for them.
# Seen: HLL and theta sketches count 1. update() takes an integer that does not fit int64 for a float, so IDs that share
# their first 53 bits (items of a tenant or shard whose number is in the upper bits) are one value. The CPC sketch
# counts 1000, but takes negative integers for floats: it counts 2 if the same bits are given as int64, where the others
# count 1000. So no integer type of a hash is right for all three.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check datasketches==5.2.0 numpy==2.4.6
cd "$folder"
venv/bin/python - <<'PY'
import datasketches
import numpy as np


def estimates(values):
    """Return the distinct counts of three sketches."""
    sketches = datasketches.hll_sketch(12), datasketches.cpc_sketch(12), datasketches.update_theta_sketch(12)
    for sketch in sketches:
        for value in values:
            sketch.update(value)
    return [round(sketch.get_estimate()) for sketch in sketches]


ids = np.arange(1000, dtype=np.uint64) + np.uint64(2**63)
seen = {
    "from 2^62": estimates((ids - np.uint64(2**62)).tolist()),
    "from 2^63": estimates(ids.tolist()),
    "as int64": estimates(ids.view(np.int64).tolist()),
}
print(seen)
true = [[abs(count - 1000) < 50 for count in counts] for counts in seen.values()]
assert true == [[True, True, True], [False, True, False], [True, False, True]]
assert seen["from 2^63"][::2] == [1, 1] and seen["as int64"][1] == 2
try:
    datasketches.count_min_sketch(5, 1000).update(2**63)
except TypeError:
    pass
else:
    raise AssertionError("count_min_sketch takes 2^63")
PY
