#!/usr/bin/env bash
# pyarrow 26.0.1: dictionary_encode() of a dictionary array returns the array as it is.
# Guess: codes by first appearance and a dictionary of the values that occur, as for the same values in a plain array.
# Seen: the dictionary stays whole, in the writer's order, with unused and repeated values: code 2 for the first row,
# and two codes for the one value "b". unique() returns "b" twice, too, and value_counts() counts its rows apart.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check pyarrow==26.0.1
cd "$folder"
venv/bin/python - <<'PY'
import pyarrow as pa

array = pa.DictionaryArray.from_arrays(pa.array([2, 1, 3]), pa.array(["a", "b", "c", "b"]))
again = array.dictionary_encode()
plain = array.cast(pa.string()).dictionary_encode()
print("again:", again.indices.to_pylist(), again.dictionary.to_pylist())
print("plain:", plain.indices.to_pylist(), plain.dictionary.to_pylist())
assert again.indices.to_pylist() == [2, 1, 3] and again.dictionary.to_pylist() == ["a", "b", "c", "b"]
assert plain.indices.to_pylist() == [0, 1, 1] and plain.dictionary.to_pylist() == ["c", "b"]
counts = [row["counts"].as_py() for row in array.value_counts()]
print("unique:", array.unique().to_pylist(), "counts:", counts)
assert array.unique().to_pylist() == ["c", "b", "b"] and counts == [1, 1, 1]
PY
