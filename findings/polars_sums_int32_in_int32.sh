#!/usr/bin/env bash
# polars 2.1.0: sums of Int8, Int16 and UInt8 are Int64, sums of Int32 stay Int32 and wrap.
# Guess: the 32-bit sum widens as the narrower ones do, or raises.
# Seen: [2147483647, 1] of Int32 sums to -2147483648, also within group_by; Int16 sums to 60000 as Int64.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check polars==2.1.0
cd "$folder"
venv/bin/python - <<'PY'
import polars as pl

wide = pl.DataFrame({"user": [1, 1], "clicks": pl.Series([2**31 - 1, 1], dtype=pl.Int32)})
narrow = pl.DataFrame({"user": [1, 1], "clicks": pl.Series([30000, 30000], dtype=pl.Int16)})
sums = [frame.group_by("user").agg(pl.col("clicks").sum())["clicks"] for frame in (wide, narrow)]
print(sums)
assert sums[0].dtype == pl.Int32 and sums[0].to_list() == [-(2**31)]
assert sums[1].dtype == pl.Int64 and sums[1].to_list() == [60000]
PY
