import pytest

from meshrec.data import DataError
from meshrec.data.delimited import parse
from meshrec.data.faults import Faults

TYPES = {"a": "int64", "b": "float32"}


def read(text, on_error="raise", **options):
    faults = Faults(on_error)
    options = {"columns": ["a", "b", "c"], "types": TYPES, "delimiter": "\t", "first_line": 100} | options
    return parse(text, "file.tsv", faults, **options), faults


def test_columns_and_lines():
    (table, lines), _ = read(b"1\t2.5\tx\n\t-3e1\ty\n")
    assert table.to_pydict() == {"a": [1, None], "b": [2.5, -30.0]}
    assert lines.tolist() == [0, 1]


def test_headers_and_quotes():
    text = b'b,a,c\n1.5,2,"x, y"\n'
    options = {"columns": None, "delimiter": ",", "types": {"a": "int64", "c": "string"}, "quotes": True}
    (table, lines), _ = read(text, **options)
    assert table.to_pydict() == {"a": [2], "c": ["x, y"]}
    assert lines.tolist() == [1]


def test_a_wrong_type_names_line_and_column():
    text = b"1\t2\tx\n2\tlow\ty\n 3 \t4\tz\n"
    with pytest.raises(DataError, match=r"file.tsv.*line 102.*'b'.*'low'"):
        read(text)
    (table, lines), faults = read(text, "skip")
    assert table.to_pydict() == {"a": [1, 3], "b": [2.0, 4.0]}
    assert lines.tolist() == [0, 2]
    assert sum(faults.skipped.values()) == 1


def test_wrong_numbers_of_fields():
    text = b"1\t2\tx\n7\n\n3\t4\tz\n5\t6\tx\ty\n"
    with pytest.raises(DataError, match=r"file.tsv.*line 102.*1 fields.*3"):
        read(text)
    (table, lines), faults = read(text, "skip")
    assert table["a"].to_pylist() == [1, None, 3]  # an empty line holds nulls
    assert lines.tolist() == [0, 2, 3]
    assert sum(faults.skipped.values()) == 2


def test_both_kinds_of_damage_in_one_text():
    (table, lines), _ = read(b"1\n2\tx\ty\n3\t1\tz\n", "skip")
    assert (table["a"].to_pylist(), lines.tolist()) == ([3], [2])


def test_missing_columns_are_always_an_error():
    with pytest.raises(DataError, match=r"file.tsv.*\['d'\].*'d'"):
        read(b"1\t2\tx\n", "skip", types={"d": "int64"})
