#!/usr/bin/env bash
# DuckDB 2.0.1: CAST to INTEGER of a half depends on the type that the half was written in.
# Guess: one rule for all, the one that round() has.
# Seen: DOUBLE and FLOAT go to the even neighbor (2.5 -> 2), DECIMAL and text away from zero (2.5 -> 3), round(DOUBLE)
# gives 3. A literal 2.5 is DECIMAL, a column read from Parquet is mostly DOUBLE: bucket numbers of a feature differ.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check duckdb==2.0.1
cd "$folder"
venv/bin/python - <<'PY'
import duckdb

row = duckdb.sql(
    "SELECT (2.5::DOUBLE)::INT, (0.5::FLOAT)::INT, (2.5::DECIMAL(3, 1))::INT, '2.5'::INT, 2.5::INT, round(2.5::DOUBLE)"
).fetchall()[0]
print(row)
assert row == (2, 0, 3, 3, 3, 3.0), row
PY
