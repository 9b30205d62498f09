#!/usr/bin/env bash
# DuckDB 2.0.1: SUM of BIGINT is HUGEINT, and COPY writes HUGEINT to Parquet as DOUBLE.
# Guess: DECIMAL(38, 0), which the same query gives as an Arrow table, or an error.
# Seen: column type double; 9007199254740993 comes back as 9007199254740992.0, without a warning.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check duckdb==2.0.1 pyarrow==26.0.1
cd "$folder"
venv/bin/python - <<'PY'
import duckdb
import pyarrow.parquet as pq

connection = duckdb.connect()
query = "SELECT sum(x) AS total FROM (VALUES (9007199254740993::BIGINT), (0::BIGINT)) AS t(x)"
arrow = connection.sql(query).to_arrow_table()
connection.sql(f"COPY ({query}) TO 'sums.parquet'")
parquet = pq.read_table("sums.parquet")
print("Arrow:", arrow.schema.field(0).type, arrow["total"].to_pylist())
print("Parquet:", parquet.schema.field(0).type, parquet["total"].to_pylist())
assert str(arrow.schema.field(0).type) == "decimal128(38, 0)" and int(arrow["total"][0].as_py()) == 9007199254740993
assert str(parquet.schema.field(0).type) == "double" and parquet["total"].to_pylist() == [9007199254740992.0]
PY
