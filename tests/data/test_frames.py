import gzip
from pathlib import Path

import pyarrow as pa
import pytest

from meshrec.data import DataError
from meshrec.data.faults import Faults
from meshrec.data.features import Features, Label, Number, Vocabulary
from meshrec.data.frames import open_tables, read_columns, read_csvs, to_table
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
    with pytest.raises(DataError, match=r"a.csv.*CSV.*0"):
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
    with pytest.raises(DataError, match=r"a.csv.*\['x'\]"):
        read_csvs(write(tmp_path, a="x,y,x\n1,2,3\n"))
    with pytest.raises(DataError, match=r"b.csv.*'x;y'.*delimiter"):
        read_csvs(write(tmp_path, b="x;y\n1;2;3\n"))
    (tmp_path / "c.csv").write_bytes("größe,y\n1,2\n".encode("latin-1"))
    with pytest.raises(DataError, match=r"c.csv.*UTF-8.*UTF-8"):
        read_csvs([tmp_path / "c.csv"])


@pytest.mark.parametrize("name", ["data.txt", "data.json", "data.csv.xz"])
def test_a_file_that_is_neither_parquet_nor_named_csv_is_both_in_the_error(tmp_path, name):
    path = tmp_path / name
    path.write_text("u\ty\na\t1\n")
    with pytest.raises(DataError, match=f"{name}.*CSV"):
        read_columns([path], ["u"])


@pytest.mark.parametrize("values", [[1, "a"], [{"a": 1}, 2.5], [b"x", 1]])
def test_a_pandas_column_of_several_types_is_named(values):
    frame = pytest.importorskip("pandas").DataFrame({"y": [0, 1], "u": values})
    with pytest.raises(DataError, match=r"'u'.*\['u'\]"):
        to_table(frame)


def test_leading_zeros_are_text_unless_numbers_are_wanted(tmp_path):
    paths = write(
        tmp_path, a="zip,sku,size,late\n007,7,1.5,1\n7,8,007,2\n", b="zip,sku,size,late\n12,9,3,010\n,1,2,3\n"
    )
    first, second = read_csvs(paths)
    assert first.to_pydict() == {"zip": ["007", "7"], "sku": [7, 8], "size": [1.5, 7.0], "late": ["1", "2"]}
    assert second.to_pydict()["late"] == ["010", "3"]
    for kind in ("numeric", "integer"):
        (table,) = read_csvs(paths[:1], {"zip": kind})
        assert table["zip"].to_pylist() == [7, 7]


def test_features_say_which_columns_of_csv_files_are_numbers(tmp_path):
    (path,) = write(tmp_path, a="user,age,clicked\n007,07,01\n7,08,00\n")
    features = Features(
        labels=(Label(column="clicked"),), features=(Vocabulary(name="user"), Number(name="age"))
    )
    source = open_tables([path], features, Faults("raise"))
    fitted = features.fit([next(source.tables(0, 9))])
    assert fitted["user"].row_of("007") != fitted["user"].row_of("7")
    samples = next(iter(open_tables([path], fitted, Faults("raise")).windows(0, 0, 9)))
    assert (samples.dense.tolist(), samples.labels.tolist()) == ([[7.0], [8.0]], [1.0, 0.0])
    later = write(tmp_path, b="user,age,clicked\n12,7,1\n7,8,0\n")
    rows = next(iter(open_tables(later, fitted, Faults("raise")).windows(0, 0, 9))).ids[0].values
    assert rows.tolist() == [1, fitted["user"].row_of("7")]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.csv", "user;price;tags\nu1;1,5;a,b\nu2;-12;c\n;0,25;\n"),
        ("a.csv", "user|price|tags\nu1|1.5|a,b\nu2|-12|c\n|0.25|\n"),
        ("a.csv", "user\tprice\ttags\nu1\t1,5\ta,b\nu2\t-12\tc\n\t0,25\t\n"),
        ("a.tsv", "user\tprice\ttags\nu1\t1.5\ta,b\nu2\t-12\tc\n\t0.25\t\n"),
        ("a.csv", 'user,price,tags\nu1,1.5,"a,b"\nu2,-12,c\n,0.25,\n'),
    ],
)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_csv_files_are_read_as_their_first_rows_show(tmp_path, name, text, encoding):
    path = tmp_path / name
    path.write_bytes(text.encode(encoding))
    expected = {"user": ["u1", "u2", ""], "price": [1.5, -12.0, 0.25], "tags": ["a,b", "c", ""]}
    assert read_csvs([path])[0].to_pydict() == expected
    (packed := tmp_path / f"{name}.gz").write_bytes(gzip.compress(path.read_bytes()))
    assert read_columns([packed], ["user", "price"]).to_pydict() == {
        "user": expected["user"],
        "price": expected["price"],
    }
    assert read_csvs([f"file://{path}"])[0].to_pydict() == expected


def test_points_and_commas_in_one_file_are_no_decimal_commas(tmp_path):
    (table,) = read_csvs(write(tmp_path, a="x;y\n1,5;2.5\n2,5;1.5\n"))
    assert table.to_pydict() == {"x": ["1,5", "2,5"], "y": [2.5, 1.5]}


def test_long_csv_files_are_read_as_their_head_shows(tmp_path):
    rows = "".join(f"u{row};{row},5\n" for row in range(10_000))
    (table,) = read_csvs(write(tmp_path, a=f"user;price\n{rows}"))
    assert table["price"].to_pylist() == [row + 0.5 for row in range(10_000)]


def test_json_lines_have_one_type_a_column(tmp_path):
    (tmp_path / "a.jsonl").write_text(
        '{"user": "007", "n": 1, "tags": ["a"]}\n{"user": "7", "n": null, "tags": []}\n'
    )
    (tmp_path / "b.ndjson").write_text('{"user": "2024-05-01", "n": 2.5, "tags": ["b"]}\n')
    first, second = read_csvs([tmp_path / "a.jsonl", tmp_path / "b.ndjson"])
    assert first.to_pydict() == {"user": ["007", "7"], "n": [1.0, None], "tags": [["a"], []]}
    assert second.to_pydict() == {"user": ["2024-05-01"], "n": [2.5], "tags": [["b"]]}
    assert read_columns(str(tmp_path), ["n"])["n"].to_pylist() == [1.0, None, 2.5]
    (tmp_path / "b.ndjson").write_text("{")
    with pytest.raises(DataError, match=r"b.ndjson.*JSON"):
        read_csvs([tmp_path / "b.ndjson"])
