#!/usr/bin/env bash
# pyarrow 26.0.1: read_json splits text into rows by objects, and not by lines.
# Guess: a line with two objects, or with a part of one, is an error, as newlines_in_values=False says and as in
# polars 2.1.0. So a reader of line-delimited messages may compare the numbers of rows and lines.
# Seen: a line with two objects gives two rows, and an object over two lines gives one. In a text with both,
# rows are as many as lines, and all rows in between have shifted by one.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check pyarrow==26.0.1 polars==2.1.0
cd "$folder"
venv/bin/python - <<'PY'
import io

import polars as pl
import pyarrow.json as pj

lines = b'{"a": 1}{"a": 2}\n{"a": 3}\n{"a":\n4}'
table = pj.read_json(io.BytesIO(lines), parse_options=pj.ParseOptions(newlines_in_values=False))
print(table.to_pylist())
assert table.num_rows == len(lines.splitlines()) and table["a"].to_pylist() == [1, 2, 3, 4]
try:
    pl.read_ndjson(io.BytesIO(lines))
except Exception as error:
    print("polars:", type(error).__name__)
else:
    raise AssertionError("polars reads the text, too")
PY
