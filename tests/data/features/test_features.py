import json
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from meshrec.data import DataError, Split, parquet
from meshrec.data.encoding import RowChecks, RowOrigin
from meshrec.data.faults import Faults
from meshrec.data.features import (
    Buckets,
    Cross,
    DatePart,
    Features,
    Hashed,
    Integer,
    Join,
    Label,
    Number,
    UnfittedError,
    Vocabulary,
)
from meshrec.data.features.fitting import fit_features
from meshrec.data.parquet import open_parquet

LABEL = (Label(column="y"),)


def table(num: int = 500, seed: int = 0) -> pa.Table:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 5, num)
    prices = rng.lognormal(size=num)
    prices[3] = np.nan
    return pa.table(
        {
            "y": rng.integers(0, 2, num),
            "w": rng.random(num),
            "price": prices,
            "time": pa.array(rng.integers(1_600_000_000, 1_700_000_000, num)),
            "user": pa.array([f"u{each}" if each else None for each in rng.zipf(1.3, num) % 90]),
            "item": rng.integers(0, 40, num),
            "tags": [[f"t{tag}" for tag in rng.integers(0, 9, length)] for length in lengths],
            "tag_weights": [rng.random(length).tolist() for length in lengths],
        }
    )


def all_kinds(**more) -> Features:
    return Features(
        labels=LABEL,
        features=(
            Number(name="price", log=True, clip=(0.05, 0.95), standardize=True, missing=1.0),
            Number(name="age", column="time", part="year"),
            Vocabulary(name="user", min_count=2, num_unseen=3),
            Hashed(name="user_hash", column="user", num_embeddings=50),
            Integer(name="item", num_embeddings=40),
            Vocabulary(name="tags", max_length=2, weights="tag_weights"),
            Cross(name="user_item", columns_crossed=("user", "item"), num_embeddings=100),
            Buckets(name="price_bucket", column="price", num_buckets=8),
            DatePart(name="hour", column="time", part="hour"),
        ),
        **more,
    )


def encoded(features: Features, rows: pa.Table):
    return features.encode(rows, RowOrigin("memory", 0), Faults("raise"))


def same(one, other) -> bool:
    return (
        np.array_equal(one.dense, other.dense)
        and np.array_equal(one.labels, other.labels)
        and all(
            np.array_equal(a.values, b.values)
            and np.array_equal(a.offsets, b.offsets)
            and np.array_equal(a.weights, b.weights)
            for a, b in zip(one.ids, other.ids, strict=True)
        )
    )


def test_the_same_row_has_the_same_values_after_a_round_trip_through_json_and_in_any_window(tmp_path):
    data = table()
    features = all_kinds().fit([data])
    features.save(tmp_path / "f.json")
    json.loads((tmp_path / "f.json").read_text())
    again = Features.load(tmp_path / "f.json")
    whole = encoded(features, data)
    assert same(whole, encoded(again, data))
    assert same(whole.part(100, 150).take(np.arange(50)), encoded(again, data.slice(100, 50)))
    assert same(whole.take(np.array([7])), encoded(again, data.take([7])))


def test_parts_fitted_in_any_order_are_fitted_as_a_whole():
    data = table()
    features, rows = all_kinds(), np.arange(500)
    parts = [
        features.state_of(data.slice(start, 130), rows[start : start + 130]) for start in (0, 130, 260, 390)
    ]
    merged = parts[2].merged(parts[0]).merged(parts[3].merged(parts[1]))
    assert features.fitted(merged, data.schema).to_json() == features.fit([data]).to_json()


def test_vocabularies_number_frequent_values_first():
    data = pa.table({"y": [0] * 7, "a": ["x", "y", "y", "z", None, "", "x"]})
    features = Features(labels=LABEL, features=(Vocabulary(name="a", min_count=2, num_unseen=2),)).fit([data])
    feature = features["a"]
    assert [feature.row_of(each) for each in ("x", "y", None, "")] == [3, 4, 0, 0]
    assert {feature.row_of(each) for each in "zqrstuv"} == {1, 2}
    assert feature.rows == 5


@pytest.mark.parametrize(
    ("known", "values"),
    [
        (["a", "b", "c"], ["b", None, "x", "b", "", "c", "b"]),
        ([7, -1, 1 << 62], [-1, 3, 7, 7, 1 << 62, -1, -5]),
    ],
)
def test_vocabulary_rows_are_the_same_in_all_layouts(known, values):
    fitted = Features(labels=(), features=(Vocabulary(name="x", num_unseen=4),)).fit([pa.table({"x": known})])
    (feature,) = fitted.ids
    one_by_one = [int(feature.rows_of(pa.array([value], pa.array(known).type))[0]) for value in values]
    array = pa.array(values)
    # A dictionary with a null, and with values that no row has.
    dictionary = pa.array([*known, None, *values])
    indices = pa.array([len(known) + 1 + k if k != 3 else None for k in range(len(values))])
    with_null = pa.DictionaryArray.from_arrays(indices, dictionary)
    repeated = pa.concat_arrays([array.dictionary_encode()] * 4)
    assert feature.rows_of(array).tolist() == one_by_one
    assert feature.rows_of(pa.concat_arrays([array, array])[1:]).tolist() == (2 * one_by_one)[1:]
    assert feature.rows_of(repeated).tolist() == 4 * one_by_one
    assert feature.rows_of(with_null).tolist() == [*one_by_one[:3], 0, *one_by_one[4:]]
    in_small = pa.DictionaryArray.from_arrays(pa.array([2, None, 0] * 3), pa.array([*known[:2], values[0]]))
    first = feature.row_of(known[0])
    assert feature.rows_of(in_small).tolist() == [one_by_one[0], 0, first] * 3


def test_hashes_are_public_and_the_same_for_every_width_of_a_type():
    feature = Hashed(name="user", num_embeddings=1000)
    assert feature.row_of("user-7") == 914
    assert feature.row_of(7) == 390
    assert feature.row_of(None) == feature.row_of("") == 0
    arrays = (
        pa.array(["user-7"]),
        pa.array(["user-7"], pa.large_string()),
        pa.array(["user-7"]).dictionary_encode(),
    )
    for array in arrays:
        assert feature.rows_of(array).tolist() == [914]
    assert feature.rows_of(pa.array([7], pa.int16())).tolist() == [390]
    rows = feature.rows_of(pa.array([f"v{each}" for each in range(20_000)]))
    assert rows.min() == 1
    assert rows.max() == 999
    counts = np.bincount(rows)[1:]
    assert ((counts - counts.mean()) ** 2 / counts.mean()).sum() < 1150  # chi squared of 998: 999 +- 45


def test_numbers_are_those_of_numpy():
    data = table()
    features = all_kinds().fit([data])
    prices = np.nan_to_num(data["price"].to_numpy(), nan=1.0)
    logs = np.log1p(prices)
    low, high = np.quantile(logs, (0.05, 0.95))
    cut = np.clip(logs, low, high)
    expected = (cut - cut.mean()) / cut.std()
    found = encoded(features, data)
    np.testing.assert_allclose(found.dense[:, 0], expected, rtol=1e-5, atol=1e-6)
    years = data["time"].to_numpy().astype("datetime64[s]").astype("datetime64[Y]").astype(int) + 1970
    assert found.dense[:, 1].tolist() == years.tolist()
    hours = data["time"].to_numpy() // 3600 % 24
    assert found.ids[features.keys.index("hour")].values.tolist() == (hours + 1).tolist()
    buckets = found.ids[features.keys.index("price_bucket")].values
    assert buckets[3] == 0
    assert np.bincount(buckets, minlength=9)[1:].min() >= 60


def test_lists_keep_the_end_that_is_asked_for_with_their_weights():
    data = pa.table({"y": [0, 1], "a": [[1, 2, 3], [4]], "w": [[0.1, 0.2, 0.3], [0.4]]})
    for keep, ids, weights in (("last", [2, 3, 4], [0.2, 0.3, 0.4]), ("first", [1, 2, 4], [0.1, 0.2, 0.4])):
        feature = Integer(name="a", num_embeddings=9, max_length=2, keep=keep, weights="w")
        features = Features(labels=LABEL, features=(feature, Integer(name="y", num_embeddings=2))).fit([data])
        found = encoded(features, data)
        assert found.ids[0].values.tolist() == ids
        np.testing.assert_allclose(found.ids[0].weights, weights, rtol=1e-6)
        assert found.ids[1].weights.tolist() == [1, 1]
        assert features.described()[0].average_length == 1.5


def test_columns_of_items_are_joined(tmp_path):
    items = pa.table({"item": ["a", "b"], "kind": ["x", "y"], "price": [1.0, 2.0]})
    pq.write_table(items, tmp_path / "items.parquet")
    features = Features(
        labels=LABEL,
        features=(Vocabulary(name="kind"), Number(name="price", missing=-1.0)),
        joins=(Join(path=str(tmp_path / "items.parquet"), key="item", columns=("kind", "price")),),
    )
    data = pa.table({"y": [0, 1, 0, 1], "item": ["b", "a", "?", None]})
    fitted = Features.from_json(features.fit([data]).to_json())
    found = encoded(fitted, data)
    kind = fitted["kind"]
    assert found.ids[0].values.tolist() == [kind.row_of("y"), kind.row_of("x"), 0, 0]
    assert found.dense[:, 0].tolist() == [2, 1, -1, -1]
    assert fitted.columns() == ["y", "item"]


def test_several_labels_and_weights_of_samples():
    data = table(20)
    labels = (Label(column="y"), Label(column="price", kind="number"), Label(column="item", positive_from=20))
    features = Features(labels=labels, features=(Hashed(name="user", num_embeddings=9),), weight="w")
    data = data.set_column(2, "price", pa.array(np.full(20, 3.0)))
    found = encoded(features.fit([data]), data)
    assert found.labels.shape == (20, 3)
    assert found.labels[:, 2].tolist() == (data["item"].to_numpy() >= 20).tolist()
    np.testing.assert_allclose(found.weights, data["w"].to_numpy(), rtol=1e-6)
    assert np.isnan(encoded(features.unlabelled(), data.drop_columns(["y", "w"])).labels).all()


def test_a_split_fits_on_its_training_rows_alone(tmp_path):
    data = table(2000).append_column("row", pa.array(range(2000)))
    pq.write_table(data.slice(0, 900), tmp_path / "a.parquet", row_group_size=300)
    pq.write_table(data.slice(900), tmp_path / "b.parquet", row_group_size=333)
    split = Split(by="time", column="row")
    features = fit_features(all_kinds(), open_parquet, tmp_path, split=split)
    assert features.to_json() == all_kinds().fit([data.slice(0, 1600)]).to_json()
    with ProcessPoolExecutor(2, mp_context=get_context("forkserver")) as pool:
        again = fit_features(all_kinds(), open_parquet, tmp_path, split=split, engine=pool.map)
    assert again.to_json() == features.to_json()
    dataset = parquet(train=tmp_path, split=split, schema=features, window=100)
    assert [dataset.train.num_samples, dataset.test.num_samples] == [1600, 200]
    assert dataset.has_id_weights
    (batch,) = dataset.test.batches(200)
    batch.sparse.validate()
    expected = encoded(features, data.slice(1800))
    assert batch.sparse["user"].values().tolist() == expected.ids[0].values.tolist()
    assert torch.equal(batch.sparse["tags"].weights(), torch.from_numpy(expected.ids[3].weights))
    (unlabelled,) = dataset.open(tmp_path / "b.parquet", False).batches(1100)
    assert torch.equal(unlabelled.sparse["hour"].values()[-200:], batch.sparse["hour"].values())


@pytest.mark.parametrize("window", [100, 50_000])
def test_files_of_dictionaries_give_what_plain_arrays_give(tmp_path, window):
    data = table(40_000)
    pq.write_table(data, tmp_path / "a.parquet")
    features = all_kinds().fit([data])
    expected = encoded(features, data)
    reader = parquet(train=tmp_path, schema=features, window=window).open(tmp_path, True)
    at = 0
    for batch in reader.batches(7000):
        end = at + len(batch)
        assert torch.equal(batch.dense, torch.from_numpy(expected.dense[at:end]))
        for key, ids in zip(features.keys, expected.ids, strict=True):
            values = ids.values[ids.offsets[at] : ids.offsets[end]]
            assert torch.equal(batch.sparse[key].values(), torch.from_numpy(values))
        at = end
    assert at == 40_000


def test_what_is_wrong_is_named():
    features = all_kinds()
    data = table()
    with pytest.raises(UnfittedError, match="'price'"):
        encoded(features, data)
    with pytest.raises(UnfittedError, match="'user'"):
        features["user"].row_of("u1")
    fitted = features.fit([data])
    other = data.set_column(4, "user", pa.array([1] * 500))
    assert (
        "column 'user' holds integer, and held text when feature 'user' was fitted"
        in fitted.wrong_columns(other.schema)[0]
    )
    with pytest.raises(ValueError, match="integer"):
        fitted["user"].row_of(3)
    with pytest.raises(DataError, match=r"40 values.*others 42.*table 10"):
        Features(labels=LABEL, features=(Vocabulary(name="item", num_embeddings=10),)).fit([data])
    null = pa.table(
        {**{name: data[name] for name in data.column_names}, "item": pa.nulls(len(data), pa.int64())}
    )
    with pytest.raises(DataError, match=r"row 0.*'item'"):
        encoded(Features(labels=LABEL, features=(Integer(name="item", num_embeddings=2),)), null)
    with pytest.raises(DataError, match=r"row 0 has the id \d+, outside \[0, 2\)"):
        encoded(Features(labels=LABEL, features=(Integer(name="item", num_embeddings=2),)), data.slice(1))
    one = (Number(name="price"), Hashed(name="user", num_embeddings=4))
    with pytest.raises(DataError, match="row 3"):
        encoded(Features(labels=LABEL, features=one), data)
    with pytest.raises(DataError, match="another"):
        encoded(fitted, data.set_column(7, "tag_weights", pa.array([[0.5] * 9] * 500)))
    y = pa.array([1.0] * 5 + [None] + [0.0] * 494)
    with pytest.raises(DataError, match="row 5"):
        encoded(fitted, data.set_column(0, "y", y))
    with pytest.raises(ValueError, match=r"\['a'\]"):
        Features(labels=LABEL, features=(Hashed(name="a", num_embeddings=3), Number(name="a")))
    with pytest.raises(ValueError, match="'Magic'"):
        Features.from_json(all_kinds().to_json() | {"features": [{"type": "Magic"}]})
    with pytest.raises(ValueError, match="version 7"):
        Features.from_json({"version": 7})


@pytest.mark.parametrize("log", [False, True])
def test_infinity_is_damage_whatever_stands_for_null(log):
    table = pa.table({"y": [1.0, 0, 1, 0], "x": [1.0, None, np.nan, 7], "a": ["b"] * 4})
    number = Number(name="x", missing=2.0, log=log)
    fitted = Features(labels=LABEL, features=(number, Hashed(name="a", num_embeddings=4))).fit([table])
    stands_for = np.log(3) if log else 2
    assert encoded(fitted, table).dense[1:3, 0].tolist() == pytest.approx([stands_for] * 2)
    for infinite in (np.inf, -np.inf):
        with pytest.raises(DataError, match=r"'x'.*row 2"):
            encoded(fitted, table.set_column(1, "x", pa.array([1.0, None, infinite, 7])))


SEPARATED = pa.array(["a|b", "", None, " b |c||", "c"])


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())])
@pytest.mark.parametrize("feature", [Vocabulary(name="x"), Hashed(name="x", num_embeddings=1000)])
def test_texts_of_several_values_are_as_lists(feature, kind):
    separated = pa.table({"y": [0, 1, 0, 1, 0], "x": SEPARATED.cast(kind)})
    lists = pa.table({"y": [0, 1, 0, 1, 0], "x": [["a", "b"], [], None, ["b", "c"], ["c"]]})
    found = []
    for data, each in ((separated, replace(feature, separator="|")), (lists, feature)):
        features = Features(labels=LABEL, features=(each,)).fit([data])
        features = Features.from_json(json.loads(json.dumps(features.to_json())))
        kept = np.ones(5, bool)
        ids = features.ids[0].encode(data, RowChecks(RowOrigin("here", 0, ""), kept, Faults("raise")))
        found.append((ids.values.tolist(), ids.offsets.tolist(), features.ids[0].average_length))
        assert features.ids[0].row_of("b") == ids.values[1]
    assert found[0] == found[1]


def test_separators_are_for_texts():
    for make in (
        lambda: Integer(name="x", separator="|", num_embeddings=3),
        lambda: Vocabulary(name="x", separator=""),
        lambda: Vocabulary(name="x", separator="|", weights="w"),
    ):
        with pytest.raises(ValueError, match="Vocabulary"):
            make()
    features = Features(labels=LABEL, features=(Vocabulary(name="x", separator="|"),))
    with pytest.raises(ValueError, match=r"'x'.*'x'"):
        features.fit([pa.table({"y": [0], "x": [1]})])


@pytest.mark.parametrize(
    "feature",
    [Vocabulary(name="f", column="x", num_unseen=2), Hashed(name="f", column="x", num_embeddings=40)],
    ids=["vocabulary", "hashed"],
)
def test_whole_numbers_are_the_same_as_integers_and_as_floats(feature):
    # Integers with nulls are floats as pandas writes them, and integers in the next file, which has none.
    integers = pa.array([7, 3, 7, 12, 0])
    floats = pa.array([7.0, 3.0, 7.0, 12.0, 0.0])
    holes = pa.array([7.0, np.nan, None, 12.0, 3.5])

    def ids(fitted, x):
        made = fitted.encode(pa.table({"x": x}), RowOrigin("f", 0), Faults("raise"))
        return made.ids[0].values.tolist()

    for first, second in ((integers, floats), (floats, integers)):
        features = Features(labels=(), features=(feature,)).fit([pa.table({"x": first})])
        features = Features.from_json(json.loads(json.dumps(features.to_json())))
        assert ids(features, first) == ids(features, second) == ids(features, second.dictionary_encode())
        assert features["f"].row_of(7) == features["f"].row_of(7.0) == ids(features, first)[0]
    # Fitted on floats; NaN and null are missing alike, and other numbers are values as well.
    expected = ids(features, floats)
    assert ids(features, holes)[:4] == [expected[0], 0, 0, expected[3]]
    features = Features(labels=(), features=(feature,)).fit([pa.table({"x": integers})])
    assert ids(features, holes.slice(0, 4)) == [ids(features, integers)[0], 0, 0, ids(features, integers)[3]]
    with pytest.raises(DataError, match="'x'"):
        ids(features, holes)


def test_names_of_tables_have_no_dot():
    with pytest.raises(ValueError, match=r"'user.id'.*'user_id'.*'user.id'"):
        Features(labels=LABEL, features=(Vocabulary(name="user.id"),))


def test_files_may_differ_in_how_they_hold_whole_numbers():
    files = [pa.array([1, 2], pa.int16()), pa.array([2.0, None, 3.0]), pa.array([3, 3], pa.int64())]
    vocabulary = Features(labels=(), features=(Vocabulary(name="x"),))
    for order in ((0, 1, 2), (1, 0, 2), (2, 0, 1)):
        fitted = vocabulary.fit([pa.table({"x": files[at]}) for at in order])["x"]
        assert [fitted.row_of(value) for value in (None, 4, 3, 2, 1, 1.0)] == [0, 1, 2, 3, 4, 4]
    halves = vocabulary.fit([pa.table({"x": files[0]}), pa.table({"x": pa.array([0.5, 0.5])})])["x"]
    assert [halves.row_of(value) for value in (None, 4, 0.5, 1, 2)] == [0, 1, 2, 3, 4]


def test_times_that_are_none_are_null_and_bytes_that_are_no_text_are_named():
    parts = Features(
        labels=(), features=(DatePart(name="h", column="t", part="hour"), Hashed(name="x", num_embeddings=9))
    )
    good, bad = 1_700_000_000, [10**15, -(10**15), 2**63 - 1, -(2**63)]
    for times in (
        pa.array([good, *bad, None]),
        pa.array([float(each) for each in (good, *bad, np.nan, np.inf)]),
    ):
        data = pa.table({"t": times, "x": range(len(times))})
        ids = parts.fit([data]).encode(data, RowOrigin("f", 0), Faults("raise")).ids[0].values
        assert ids[0] > 0
        assert not ids[1:].any()
    texts = pa.table({"x": pa.array([b"a|b", b"\xff|c"])})
    with pytest.raises(DataError, match=r"'x'.*'x'.*UTF-8"):
        Features(labels=(), features=(Vocabulary(name="x", separator="|"),)).fit([texts])


@pytest.mark.parametrize(
    ("weight", "text"),
    [(None, "null"), (float("nan"), "null"), (float("inf"), "inf"), (-1.0, "-1"), (1e39, r"1e\+39")],
)
def test_a_wrong_sample_weight_is_named_and_no_feature(weight, text):
    features = Features(labels=LABEL, features=(Hashed(name="u", num_embeddings=4),), weight="w")
    rows = pa.table({"u": ["a", "b"], LABEL[0].column: [0.0, 1.0], "w": [1.0, weight]})
    with pytest.raises(DataError, match=f"'w'.*row 1.*{text}") as refused:
        encoded(features, rows)
    assert "feature 'w'" not in str(refused.value)


def test_a_binary_label_of_two_texts_is_encoded_as_0_and_1():
    label = Label(column="y", classes=("no", "yes"), missing="skip")
    features = Features(labels=(label,), features=(Integer(name="item", num_embeddings=4),))
    assert features.num_classes == 0
    assert features.fitted_kinds()["y"] == "text"
    table = pa.table({"y": ["yes", "no", None, "yes"], "item": [0, 1, 2, 3]})
    samples = features.fit([table]).encode(table, RowOrigin("f", 0), Faults("raise"))
    assert samples.labels[[0, 1, 3]].tolist() == [1, 0, 1]
    assert samples.is_valid is not None
    assert samples.is_valid.tolist() == [True, True, False, True]
    latin = pa.array([b"no", b"ma\xefs"]).view(pa.string())
    for values, text in ((["yes", "maybe"], "'maybe'"), (latin, r"b'ma\\xefs'")):
        rows = pa.table({"y": values, "item": [0, 1]})
        with pytest.raises(DataError, match=rf"row 1 has the label {text}.*'no', 'yes'"):
            features.fit([table]).encode(rows, RowOrigin("f", 0), Faults("raise"))


def fitted(values, **options) -> Features:
    ids = Vocabulary(name="item", **options)
    edges = Buckets(name="bucket", column="y", num_buckets=4)
    features = Features(labels=LABEL, features=(ids, edges, Number(name="z", column="y", standardize=True)))
    return features.fit([pa.table({"y": np.arange(len(values)), "item": pa.array(values)})])


def test_a_continued_vocabulary_keeps_its_rows_and_appends_new_values():
    earlier = fitted([3, 3, 1, 1, 2], min_count=2)
    now = fitted([2, 2, 4, 4, 4, 1, 1], min_count=2).continued(earlier)
    assert now["item"].vocabulary[2:].to_pylist() == [4, 2]
    assert now["item"].vocabulary[:2].equals(earlier["item"].vocabulary)
    assert [now["item"].row_of(value) for value in (3, 1)] == [earlier["item"].row_of(v) for v in (3, 1)]
    assert (now["bucket"].edges, now["z"].mean) == (earlier["bucket"].edges, earlier["z"].mean)
    assert now.changed_since(earlier) == []


def test_a_continued_vocabulary_obeys_its_limits():
    earlier = fitted([1, 2, 3])
    assert len(fitted([1, 4, 5], max_size=3).continued(earlier)["item"].vocabulary) == 3
    assert len(fitted([1, 4, 5], max_size=4).continued(earlier)["item"].vocabulary) == 4
    with pytest.raises(DataError, match="7"):
        fitted([4, 5], num_embeddings=6).continued(earlier)


def test_whole_floats_continue_integers_and_text_does_not():
    earlier = fitted([1, 2])
    assert fitted([1.0, 3.0, None]).continued(earlier)["item"].vocabulary.to_pylist() == [1, 2, 3]
    with pytest.raises(DataError, match="'item'"):
        fitted([1.5]).continued(earlier)
    with pytest.raises(DataError, match=r"'item'.*text.*integer"):
        fitted(["1"]).continued(earlier)


def test_features_with_other_rows_start_again():
    earlier = fitted([1, 2])
    now = fitted([5], num_unseen=2)
    assert now.changed_since(earlier) == ["item"]
    assert now.continued(earlier)["item"] == now["item"]


def test_a_new_feature_continues_the_vocabulary_of_its_table():
    earlier = fitted([1, 2], table="t")
    features = Features(
        labels=LABEL,
        features=(Vocabulary(name="item", table="t"), Vocabulary(name="last", table="t")),
    ).fit([pa.table({"y": [0], "item": [2], "last": [9]})])
    now = features.continued(earlier)
    assert now["item"].vocabulary.to_pylist() == now["last"].vocabulary.to_pylist() == [1, 2, 9]
