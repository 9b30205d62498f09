import json
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest

from meshrec.data import DataError
from meshrec.data.features import Buckets, Features, Label, Vocabulary

NAMES = ("integer", "narrow", "unsigned", "wide", "number", "text", "large", "tags")
RNG = np.random.default_rng(0)
LARGE = 2**63 + 5


def values() -> pa.Table:
    num = 3000
    texts = [f"t{n}" if n else None for n in RNG.zipf(1.3, num) % 900]
    return pa.table(
        {
            "y": RNG.integers(0, 2, num),
            "integer": RNG.integers(-900, 900, num) * 2**50,
            "narrow": pa.array(RNG.integers(0, 90, num), pa.int16()),
            "unsigned": pa.array(RNG.integers(0, 9, num).astype(np.uint64) + np.uint64(LARGE)),
            "wide": pa.array(
                [Decimal(int(n)) * 10**25 for n in RNG.integers(0, 9, num)], pa.decimal128(38, 0)
            ),
            "number": RNG.integers(0, 90, num) / 7,
            "text": texts,
            "large": pa.array(texts, pa.large_string()),
            "tags": [[f"t{n}" for n in RNG.integers(0, 9, length)] for length in RNG.integers(0, 4, num)],
        }
    )


FEATURES = Features(
    labels=(Label(column="y"),),
    features=(
        *(Vocabulary(name=name, num_unseen=2) for name in NAMES),
        Vocabulary(name="again", column="text", num_unseen=2, max_size=4),
        Buckets(name="bucket", column="number"),
    ),
)


def rows_of(features: Features, table: pa.Table) -> list:
    return [feature.rows_of(feature.values(table).array).tolist() for feature in features.ids]


def test_vocabularies_are_mapped_from_a_file(tmp_path):
    table, other = values(), values()
    fitted = FEATURES.fit([table])
    fitted.save(tmp_path / "features.json")
    saved = json.loads((tmp_path / "features.json").read_text())
    # Features with the same values share a column.
    columns = [feature.get("vocabulary", {}).get("column") for feature in saved["features"]]
    assert columns == [*NAMES[:6], "text", "tags", "again", None]
    assert len(json.dumps(saved)) < 3000
    before = pa.total_allocated_bytes()
    loaded = Features.load(tmp_path / "features.json")
    assert pa.total_allocated_bytes() - before < 4096  # the values are in the file
    assert loaded == fitted
    assert loaded.to_json() == fitted.to_json()
    for data in (table, other):
        assert rows_of(loaded, data) == rows_of(fitted, data)
    types = [str(feature.vocabulary.type) for feature in loaded.ids[:8]]
    assert types == ["int64", "int64", "uint64", "decimal256(76, 0)", "double", "string", "string", "string"]


def test_files_of_earlier_releases_are_read(tmp_path):
    table = values()
    fitted = FEATURES.fit([table])
    (tmp_path / "old.json").write_text(json.dumps(fitted.to_json()))
    loaded = Features.load(tmp_path / "old.json")
    assert loaded == fitted
    assert rows_of(loaded, table) == rows_of(fitted, table)
    loaded.save(tmp_path / "new.json")
    assert Features.load(tmp_path / "new.json") == fitted


def test_only_the_values_of_a_vocabulary_are_written(tmp_path):
    data = pa.table({"y": [1] * 100_000, "user": np.arange(100_000)})
    features = Features(labels=(Label(column="y"),), features=(Vocabulary(name="user", max_size=10),))
    features.fit([data]).save(tmp_path / "f.json")
    assert (tmp_path / "f.arrow").stat().st_size < 2000
    assert Features.load(tmp_path / "f.json")["user"].vocabulary.to_pylist() == list(range(10))


def test_features_without_vocabularies_have_one_file(tmp_path):
    features = Features(labels=(Label(column="y"),), features=(Buckets(name="bucket", column="number"),))
    features.fit([values()]).save(tmp_path / "f.json")
    assert [path.name for path in tmp_path.iterdir()] == ["f.json"]
    assert Features.load(tmp_path / "f.json").is_fitted


def test_an_empty_vocabulary_is_kept(tmp_path):
    data = pa.table({"y": [1], "user": ["a"]})
    features = Features(labels=(Label(column="y"),), features=(Vocabulary(name="user", min_count=2),))
    features.fit([data]).save(tmp_path / "f.json")
    assert Features.load(tmp_path / "f.json")["user"].row_of("a") == 1


@pytest.mark.parametrize("damage", ["missing", "cut", "changed", "a folder"])
def test_a_damaged_file_is_named(tmp_path, damage):
    FEATURES.fit([values()]).save(tmp_path / "f.json")
    path = tmp_path / "f.arrow"
    content = bytearray(path.read_bytes())
    path.unlink()
    content[len(content) // 2] ^= 1
    if damage == "a folder":
        path.mkdir()
    elif damage != "missing":
        path.write_bytes(content if damage == "changed" else content[:-9])
    with pytest.raises(DataError, match=r"f\.arrow"):
        Features.load(tmp_path / "f.json")


def test_json_without_its_file_is_refused(tmp_path):
    saved = FEATURES.fit([values()]).write_vocabularies(tmp_path / "f.json")
    with pytest.raises(ValueError, match=r"'integer'.*Features\.load"):
        Features.from_json(saved)
    with pytest.raises(ValueError, match="version 3"):
        Features.from_json(saved | {"version": 3})
