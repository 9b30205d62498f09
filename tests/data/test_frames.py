from pathlib import Path

import pyarrow as pa
import pytest

from meshrec.data import DataError
from meshrec.data.frames import read_csvs, to_table
from meshrec.data.locations import is_csv


def write(folder: Path, **texts: str) -> list[Path]:
    for name, text in texts.items():
        (folder / f"{name}.csv").write_text(text)
    return [folder / f"{name}.csv" for name in texts]


def test_csv_files_have_one_type_a_column_and_their_texts_stay_what_they_are(tmp_path):
    paths = write(
        tmp_path,
        a="user,price,country\n001,1,NA\n002,2,DE\n",
        b="user,price,country\nx1,1.5,\n002,NA,DE\n",
        c="user,price,country\n7,,\n",
    )
    tables = read_csvs(paths)
    assert {str(each.schema.types) for each in tables} == {str([pa.string(), pa.float64(), pa.string()])}
    assert [row for each in tables for row in each.to_pylist()] == [
        {"user": "001", "price": 1.0, "country": "NA"},
        {"user": "002", "price": 2.0, "country": "DE"},
        {"user": "x1", "price": 1.5, "country": ""},
        {"user": "002", "price": None, "country": "DE"},
        {"user": "7", "price": None, "country": ""},
    ]


def test_columns_of_a_csv_file_are_what_features_were_fitted_on(tmp_path):
    (path,) = write(tmp_path, a="user,price\n007,1\n")
    (table,) = read_csvs([path], {"user": "text", "price": "number", "other": "text"})
    assert table.to_pylist() == [{"user": "007", "price": 1.0}]
    assert table.schema.types == [pa.string(), pa.float64()]
    with pytest.raises(DataError, match=r"a.csv cannot be read as CSV: .*column #0.*Repair the file"):
        read_csvs(write(tmp_path, a="user\nx\n"), {"user": "number"})


def test_large_ids_of_a_csv_file_are_not_rounded(tmp_path):
    paths = write(
        tmp_path,
        a=f"user,hash,size,flag\n{2**63 + 1},{10**30 + 1},1e300,true\n{2**63 + 2},7,0.5,false\n",
        b=f"user,hash,size,flag\n{2**63 + 1},{10**30 + 1},2,\n",
    )
    first, second = read_csvs(paths, {"flag": "integer"})
    assert first.select(["user", "hash", "size"]).to_pydict() == {
        "user": [2**63 + 1, 2**63 + 2],
        "hash": [str(10**30 + 1), "7"],
        "size": [1e300, 0.5],
    }
    assert second["user"].to_pylist() == [2**63 + 1]
    assert second["hash"].to_pylist() == [str(10**30 + 1)]
    assert second["size"].to_pylist() == [2.0]
    assert first["flag"].to_pylist() == [True, False]
    assert second["flag"].to_pylist() == [None]


def test_views_of_texts_and_lists_are_taken_plain():
    texts = pa.array(["x", None], pa.string_view())
    table = pa.table({"a": texts, "b": pa.array([[1], None], pa.list_view(pa.int64())), "c": [[1], [2]]})
    plain = to_table(table)
    assert plain.schema.types == [pa.large_string(), pa.large_list(pa.int64()), pa.list_(pa.int64())]
    assert plain.to_pylist() == table.to_pylist()


def test_csv_values_may_have_line_breaks_and_files_may_be_compressed(tmp_path):
    rows = [(at, f"line {at}\n{at},\nmore") for at in range(90_000)]  # more than Arrow reads at once
    text = "id,text\n" + "".join(f'{at},"{words}"\n' for at, words in rows)
    (plain,) = write(tmp_path, a=text)
    packed = tmp_path / "a.csv.zst"
    packed.write_bytes(pa.compress(text.encode(), codec="zstd", asbytes=True))
    for file in (plain, packed, packed.as_uri()):
        (table,) = read_csvs([file])
        assert table["id"].to_pylist() == [at for at, _ in rows]
        assert table["text"].to_pylist() == [words for _, words in rows]
        assert is_csv(file)


def test_headers_that_no_table_can_have_are_told(tmp_path):
    with pytest.raises(DataError, match=r"a.csv: columns need names of their own, given twice: \['x'\]"):
        read_csvs(write(tmp_path, a="x,y,x\n1,2,3\n"))
    with pytest.raises(DataError, match=r"b.csv has one column, 'x;y': commas part the columns of CSV"):
        read_csvs(write(tmp_path, b="x;y\n1;2\n"))
    (tmp_path / "c.csv").write_bytes("größe,y\n1,2\n".encode("latin-1"))
    with pytest.raises(DataError, match=r"c.csv: its header is not UTF-8: .*Write the file as UTF-8"):
        read_csvs([tmp_path / "c.csv"])
