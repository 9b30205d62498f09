#!/usr/bin/env bash
# DuckDB 2.0.1 and pyarrow 26.0.1: filters over Parquet that pyarrow wrote, in which a float column has NaN.
# Guess: the rows that the same filter finds in the same data as a table in memory, above all for isnan().
# Seen: the statistics of Parquet leave NaN out, and both engines skip row groups by them. DuckDB finds no NaN at all
# (isnan(), x = 'nan', x > 5), unless read_parquet has can_have_nan=true. pyarrow's dataset drops NaN rows from ~(x < 5)
# and ~(x == 3), and is_nan() finds none in a row group whose other values are all equal. So a check of a data set
# for NaN passes, and training reads them. polars 2.1.0 finds the same rows in both.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check duckdb==2.0.1 pyarrow==26.0.1 polars==2.1.0
cd "$folder"
venv/bin/python - <<'PY'
import duckdb
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq

nan = float("nan")
frame = pa.table({"row": range(8), "x": [1.0, 2.0, nan, 4.0, 3.0, 3.0, 3.0, nan]})
pq.write_table(frame, "x.parquet", row_group_size=4)
duckdb.sql("CREATE TABLE x AS SELECT * FROM frame")


def count(source, condition):
    return duckdb.sql(f"SELECT count(*) FROM {source} WHERE {condition}").fetchall()[0][0]


for condition in ("isnan(x)", "x = 'nan'::DOUBLE", "x > 5"):
    seen = [count(source, condition) for source in ("x", "'x.parquet'", "read_parquet('x.parquet', can_have_nan=true)")]
    print("DuckDB", condition, seen)
    assert seen == [2, 0, 2]
x = pc.field("x")
for condition, in_memory, in_file in (
    (pc.is_nan(x), [2, 7], [2]),
    (~(x < 5), [2, 7], []),
    (~(x == 3), [0, 1, 2, 3, 7], [0, 1, 2, 3]),
):
    sources = ds.dataset(frame), ds.dataset("x.parquet")
    found = [source.to_table(filter=condition)["row"].to_pylist() for source in sources]
    print("pyarrow", condition, *found)
    assert found == [in_memory, in_file]
for condition in (pl.col.x.is_nan(), ~(pl.col.x < 5)):
    assert pl.scan_parquet("x.parquet").filter(condition).collect()["row"].to_list() == [2, 7]
PY
