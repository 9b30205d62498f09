#!/usr/bin/env bash
# DuckDB 2.0.1: UHUGEINT (what md5_number returns, a usual hash of text IDs) becomes decimal128(38, 0) in Arrow.
# Guess: decimal256, fixed_size_binary[16], or an error, as 2^128 - 1 has 39 digits.
# Seen: values from 2^127 on come out negative (2^128 - 1 is -1), so unsigned order and equality to text are lost.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check duckdb==2.0.1 pyarrow==26.0.1
cd "$folder"
venv/bin/python - <<'PY'
import duckdb

value = 2**128 - 1
table = duckdb.sql(
    f"SELECT {value}::UHUGEINT AS largest, {2**127 - 1}::UHUGEINT AS half, md5_number('a') AS hashed"
).to_arrow_table()
print(table.schema, table.to_pylist())
((true_hash,),) = duckdb.sql("SELECT md5_number('a')").fetchall()
row = table.to_pylist()[0]
assert all(str(field.type) == "decimal128(38, 0)" for field in table.schema)
assert int(row["largest"]) == -1 and int(row["half"]) == 2**127 - 1
assert true_hash >= 0 and (int(row["hashed"]) - true_hash) % 2**128 == 0
PY
