#!/usr/bin/env bash
# pyarrow 26.0.1: group_by, join, is_in and value_counts take 0.0 and -0.0 for two keys.
# Guess: one key, as in IEEE comparison, pc.equal, polars 2.1.0 and DuckDB 2.0.1.
# Seen: two groups, no match in the join, is_in false, two counts. A float ID column whose zeros come from -0.0
# (a product with a negative factor) gets two vocabulary entries from Arrow and one from the other engines.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check pyarrow==26.0.1 polars==2.1.0 duckdb==2.0.1
cd "$folder"
venv/bin/python - <<'PY'
import duckdb
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

column = pa.array([0.0, -0.0])
groups = pa.table({"x": column}).group_by("x").aggregate([([], "count_all")])
joined = pa.table({"x": [0.0]}).join(pa.table({"x": [-0.0], "y": [1]}), "x")
print(groups.to_pylist(), joined.to_pylist(), pc.is_in(column, value_set=pa.array([0.0])).to_pylist())
assert groups.num_rows == 2 and joined["y"].to_pylist() == [None]
assert pc.is_in(column, value_set=pa.array([0.0])).to_pylist() == [True, False]
assert len(pc.value_counts(column)) == 2 and pc.equal(0.0, -0.0).as_py()
assert pl.Series([0.0, -0.0]).n_unique() == 1
assert duckdb.sql("SELECT count(DISTINCT x) FROM (VALUES (0.0::DOUBLE), (-0.0::DOUBLE)) AS t(x)").fetchall() == [(1,)]
PY
