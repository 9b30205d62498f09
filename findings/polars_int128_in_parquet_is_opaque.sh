#!/usr/bin/env bash
# polars 2.1.0 writes Int128 (also sums widened to it) to Parquet as 16 raw bytes; only its own Arrow schema in the
# file's metadata says that they are integers.
# Guess: DECIMAL(38, 0), or a refusal to write what Parquet has no integer type for.
# Seen: DuckDB 2.0.1 reads a BLOB of little-endian bytes without a warning; pyarrow 26.0.1 cannot even open the file,
# so its other columns are out of reach too.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check polars==2.1.0 duckdb==2.0.1 pyarrow==26.0.1
cd "$folder"
venv/bin/python - <<'PY'
import duckdb
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

pl.DataFrame({"id": [2**70, 5]}, schema={"id": pl.Int128}).write_parquet("ids.parquet")
rows = duckdb.sql("SELECT id, typeof(id) FROM 'ids.parquet'").fetchall()
print(rows)
assert rows == [((2**70).to_bytes(16, "little"), "BLOB"), ((5).to_bytes(16, "little"), "BLOB")], rows
try:
    pq.read_table("ids.parquet")
except pa.ArrowNotImplementedError as error:
    print("pyarrow:", error)
else:
    raise SystemExit("pyarrow reads it now")
PY
