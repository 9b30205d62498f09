"""Folders ``key=value`` are columns."""

import pyarrow as pa
import pyarrow.csv as csv
import pyarrow.parquet as pq
import pytest

from meshrec.data import DataError, Split
from meshrec.data.faults import Faults
from meshrec.data.features import Features, Label, Number, Vocabulary
from meshrec.data.frames import open_tables, read_columns, read_csvs
from meshrec.data.locations import expand_tables
from meshrec.data.parquet import parquet
from meshrec.data.parquet_tables import ParquetTables

PLACES = {
    "day=2024-05-02/shop=007": 1,
    "day=2024-05-01/shop=7": 2,
    "day=2024-05-03/shop=__HIVE_DEFAULT_PARTITION__": 3,
    "day=2024-05-04": 4,
    "day=2024-05-05/shop=a%2Fb": 5,
}
SHOPS = {1: "007", 2: "7", 3: None, 4: None, 5: "a/b"}
FEATURES = Features(
    labels=(Label(column="y"),),
    features=(Vocabulary(name="shop"), Number(name="weekday", column="day", part="weekday")),
)


def write(folder, suffix):
    for name, row in PLACES.items():
        (folder / name).mkdir(parents=True)
        table = pa.table({"row": [row, row], "y": [0, 1]})
        path = folder / name / f"part-0{suffix}"
        csv.write_csv(table, path) if suffix == ".csv" else pq.write_table(table, path)
    (folder / "_temporary").mkdir()
    return folder


@pytest.mark.parametrize("suffix", [".parquet", ".csv"])
@pytest.mark.parametrize("way", ["folder", "address", "pattern", "files"])
def test_keys_of_folders_are_columns(tmp_path, suffix, way):
    folder = write(tmp_path / "sales", suffix)
    paths = {
        "folder": str(folder),
        "address": f"file://{folder}",
        "pattern": [f"{folder}/day=*/part*{suffix}", f"{folder}/day=*/shop=*/*{suffix}"],
        "files": sorted(folder.rglob(f"*{suffix}")),
    }[way]
    read = read_columns(paths, ["row", "shop", "day"])
    assert dict(zip(read["row"].to_pylist(), read["shop"].to_pylist(), strict=True)) == SHOPS
    files, text = expand_tables(paths)
    if text:
        tables = read_csvs(files)
    else:
        parquet_tables = ParquetTables.open(files)
        tables = [table for _, table in parquet_tables.tables(range(len(parquet_tables.runs)))]
    looked_at = pa.concat_tables(tables)
    assert looked_at.select(["row", "shop", "day"]).equals(read)
    source = open_tables(paths, FEATURES, Faults("raise"))
    fitted = FEATURES.fit([table for block in range(5) for table in source.tables(block, 9)])
    assert sorted(fitted["shop"].vocabulary.to_pylist()) == ["007", "7", "a/b"]
    source = open_tables(paths, fitted, Faults("raise"))
    for block, shop in enumerate(source.column(block, "shop") for block in range(5)):
        samples = next(iter(source.windows(block, 0, 9)))
        assert samples.ids[0].values.tolist() == [fitted["shop"].row_of(value) for value in shop.to_pylist()]
    assert source.arrow_schema.field("day").type == pa.string()


def test_keys_split_rows_and_keep_the_fitted_kind(tmp_path):
    folder = write(tmp_path / "sales", ".parquet")
    fitted = FEATURES.fit([read_columns(str(folder), ["y", "shop", "day"])])
    split = Split(by="time", column="day", validation=0.25, test=0.2)
    dataset = parquet(train=str(folder), split=split, schema=fitted)
    assert [each.num_samples for each in (dataset.train, dataset.validation, dataset.test)] == [6, 2, 2]
    later = tmp_path / "later" / "day=2024-06-01" / "shop=7"  # of integers, by itself
    later.mkdir(parents=True)
    pq.write_table(pa.table({"y": [1]}), later / "part-0.parquet")
    samples = next(iter(open_tables(str(tmp_path / "later"), fitted, Faults("raise")).windows(0, 0, 9)))
    assert samples.ids[0].values.tolist() == [fitted["shop"].row_of("7")]


def test_keys_of_integers_are_integers_and_files_come_before_folders(tmp_path):
    for month in (1, 12):
        (tmp_path / f"month={month}").mkdir()
        pq.write_table(pa.table({"y": [month]}), tmp_path / f"month={month}" / "a.parquet")
    assert read_columns(str(tmp_path), ["month"])["month"].to_pylist() == [1, 12]
    pq.write_table(pa.table({"y": [1], "month": ["May"]}), tmp_path / "month=12" / "a.parquet")
    files = [tmp_path / "month=12" / "a.parquet"]
    assert read_columns(files, ["month"])["month"].to_pylist() == ["May"]


def test_folders_without_keys_are_not_searched(tmp_path):
    (tmp_path / "sub").mkdir()
    pq.write_table(pa.table({"y": [1]}), tmp_path / "sub" / "a.parquet")
    with pytest.raises(DataError, match="stands for no file"):
        read_columns(str(tmp_path), ["y"])
