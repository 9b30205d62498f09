"""Formats of CSV files that a recipe gives, where detection would be wrong."""

import numpy as np
import pyarrow as pa
import pytest

from meshrec.cli.inspect import main as inspect
from meshrec.data.csv_dialects import CsvFormat
from meshrec.data.frames import read_columns, read_csvs
from meshrec.train import Csv, Log, resolve


def write(path, rows, encoding="utf-8"):
    path.write_bytes("".join(f"{row}\n" for row in rows).encode(encoding))
    return path


def test_given_parts_are_taken_and_the_others_detected(tmp_path):
    path = write(tmp_path / "a.csv", ["name:x", "é:1,5", "b:2"], "latin-1")
    form = CsvFormat(delimiter=":", decimal_point=",", encoding="latin-1")
    assert read_csvs([path], form=form)[0].to_pydict() == {"name": ["é", "b"], "x": [1.5, 2.0]}
    path = write(tmp_path / "b.csv", ["name;x", "a;1,5", "b;2"])
    assert read_csvs([path], form=CsvFormat(encoding="utf-8"))[0]["x"].to_pylist() == [1.5, 2.0]
    as_text = read_columns(str(path), ["x"], form=CsvFormat(decimal_point="."))
    assert as_text["x"].to_pylist() == ["1,5", "2"]


@pytest.mark.parametrize(
    ("parts", "value"),
    [
        ({"delimiter": "::"}, "'::'"),
        ({"delimiter": '"'}, "'\"'"),
        ({"delimiter": "é"}, "'é'"),
        ({"decimal_point": "'"}, '"\'"'),
        ({"delimiter": ",", "decimal_point": ","}, "','"),
        ({"encoding": "latin-99"}, "'latin-99'"),
    ],
)
def test_formats_that_no_csv_file_has_are_refused(parts, value):
    with pytest.raises(ValueError, match=value):
        CsvFormat(**parts)


def test_inspect_writes_the_format_into_a_recipe_that_reads_by_it(tmp_path):
    draws = np.random.default_rng(0)
    rows = [f"{n % 7}:{n % 5}é:{draws.random():.3f}:{n % 2}".replace(".", ",") for n in range(600)]
    path = write(tmp_path / "a.csv", ["user:tag:price:label", *rows], "latin-1")
    out = tmp_path / "recipe.py"
    options = ["--delimiter", ":", "--decimal-point", ",", "--encoding", "latin-1", "--out", str(out)]
    assert inspect([str(path), "--label", "label", *options]) == 0
    data = resolve(f"{out}:recipe").data
    assert isinstance(data, Csv)
    assert data.csv == CsvFormat(delimiter=":", decimal_point=",", encoding="latin-1")
    assert data.load().arrow_schema.field("price").type == pa.float64()


def test_inspect_of_a_log_writes_the_format_too(tmp_path):
    rows = [f"{n // 10}:i{(n * 7) % 13}é:{n}" for n in range(400)]
    path = write(tmp_path / "log.csv", ["user:item:time", *rows], "latin-1")
    out = tmp_path / "recipe.py"
    columns = ["--user", "user", "--item", "item", "--time", "time"]
    assert inspect([str(path), *columns, "--delimiter", ":", "--encoding", "latin-1", "--out", str(out)]) == 0
    data = resolve(f"{out}:recipe").data
    assert isinstance(data, Log)
    assert data.csv == CsvFormat(delimiter=":", encoding="latin-1")
    assert len(data.interactions(data.fit()).log.items) == 400
