#!/usr/bin/env bash
# pyarrow 26.0.1: read_json makes string columns of bytes that are not UTF-8.
# Guess: ArrowInvalid, as read_csv raises for the same bytes, and as Python's json and polars 2.1.0 raise.
# Seen: a table whose validate(full=True) fails. Values are hashed, joined and written to Parquet like others;
# the first conversion to Python raises UnicodeDecodeError, far from the file and line.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check pyarrow==26.0.1 polars==2.1.0
cd "$folder"
venv/bin/python - <<'PY'
import io
import json

import polars as pl
import pyarrow as pa
import pyarrow.csv as pc
import pyarrow.json as pj
import pyarrow.parquet as pq

text = b'{"a": "\xff"}'
table = pj.read_json(io.BytesIO(text))
pq.write_table(table, "a.parquet")
assert table.schema.field("a").type == pa.string()


def fails(call):
    try:
        call()
    except Exception as error:
        print(type(error).__name__)
        return True
    return False


strings = pc.ConvertOptions(column_types={"a": pa.string()})
assert fails(lambda: table.validate(full=True))
assert fails(lambda: table["a"].to_pylist())
assert fails(lambda: pc.read_csv(io.BytesIO(b"a\n\xff\n"), convert_options=strings))
assert fails(lambda: json.loads(text))
assert fails(lambda: pl.read_ndjson(io.BytesIO(text)))
PY
