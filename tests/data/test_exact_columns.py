"""A value has one row, whatever the type, the writer and the reader of its column."""

import datetime
import uuid
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from meshrec.data.exact_columns import plain, plain_table
from meshrec.data.faults import DataError, Faults
from meshrec.data.features import (
    Buckets,
    Cross,
    DatePart,
    Features,
    Hashed,
    Integer,
    Join,
    Key,
    Label,
    Number,
    Vocabulary,
)
from meshrec.data.features.values import hashes_of, kind_of, microseconds_of
from meshrec.data.frames import open_tables, read_columns, to_table

EPOCH = datetime.datetime(1970, 1, 1)
SMALL = [5, 0, None, 3, 5, 100, 7, 0]
LONG = [1_700_000_000_000_000_000 + each for each in (0, 1, 2, 1)] + [None, 7, 0, 1 - 2**63]
UNSIGNED = [2**64 - 1, 2**63, None, 1, 2**64 - 1]
WIDE = [10**30, 10**30 + 1, None, -(10**30), 7, 10**30]
UUIDS = [uuid.UUID(int=each << 90 | 5) for each in (1, 2, 1)] + [None, uuid.UUID(int=0)]
TIMES = [
    EPOCH,
    EPOCH - datetime.timedelta(microseconds=1),
    None,
    datetime.datetime(1600, 2, 29, 23, 59, 59, 999_999),
    datetime.datetime(9999, 12, 31),
    datetime.datetime(2024, 5, 1, 12, 30, 0, 123_456),
]


def decimals(values):
    return [None if each is None else Decimal(each) for each in values]


def ids(*features):
    wanted = features or (
        Vocabulary(name="known", column="x"),
        Hashed(name="hashed", column="x", num_embeddings=1 << 30),
        Key(name="key", column="x", max_rows=100),
    )
    return Features(labels=(), features=wanted)


def encoded(data, features):
    """Return the IDs and lengths of each feature, and the dense values."""
    source = open_tables(data, features, Faults("raise"))
    samples = [each for block in range(len(source.block_sizes)) for each in source.windows(block, 0, 1000)]
    rows = [
        [(each.ids[at].values.tolist(), np.diff(each.ids[at].offsets).tolist()) for each in samples]
        for at in range(len(features.ids))
    ]
    return rows, np.concatenate([each.dense for each in samples]).tolist()


def check_same(column, reference, tmp_path, features=None, *, hashes_differ=False):
    """Check that both columns have the same rows, fitted on either, from a frame and from Parquet."""
    table, plain_reference = pa.table({"x": column}), pa.table({"x": reference})
    features = features or ids()
    fitted = features.fit([plain_reference])
    expected = encoded(plain_reference, fitted)
    assert encoded(table, fitted) == expected
    of_column = features.fit([table])
    assert encoded(table, of_column) == encoded(plain_reference, of_column)
    if not hashes_differ:
        assert encoded(table, of_column) == expected
    path = tmp_path / "x.parquet"
    try:
        pq.write_table(table, path)
    except pa.ArrowNotImplementedError:
        return
    assert encoded(path, fitted) == expected
    assert encoded(path, of_column) == encoded(table, of_column)


INTEGER_TYPES = [
    *(pa.int8(), pa.uint8(), pa.int16(), pa.int32(), pa.uint32(), pa.uint64()),
    *(pa.decimal32(9, 0), pa.decimal64(18, 0), pa.decimal128(38, 0), pa.decimal256(76, 0)),
    *(pa.decimal128(20, 2), pa.decimal256(60, 10), pa.decimal64(12, 3)),
    pa.dictionary(pa.int32(), pa.int64()),
]


@pytest.mark.parametrize("kind", INTEGER_TYPES, ids=str)
def test_small_integers(kind, tmp_path):
    values = decimals(SMALL) if pa.types.is_decimal(kind) else SMALL
    check_same(pa.array(values, kind), pa.array(SMALL), tmp_path)
    rows = Integer(name="row", column="x", num_embeddings=101, missing=100)
    check_same(pa.array(values, kind), pa.array(SMALL), tmp_path, ids(rows))
    pairs = Cross(name="pair", columns_crossed=("x", "x"), num_embeddings=1 << 20)
    if not pa.types.is_dictionary(kind):
        check_same(pa.array(values, kind), pa.array(SMALL), tmp_path, ids(pairs))


@pytest.mark.parametrize("kind", [pa.float16(), pa.float32(), pa.float64()], ids=str)
def test_whole_floats(kind, tmp_path):
    values = [None if each is None else float(each) or -0.0 for each in SMALL]
    check_same(pa.array(values, pa.float64()).cast(kind), pa.array(SMALL), tmp_path, hashes_differ=True)
    exact = ids(
        Vocabulary(name="known", column="x"),
        Key(name="key", column="x", max_rows=9),
        Integer(name="row", column="x", num_embeddings=101, missing=100),
        Cross(name="pair", columns_crossed=("x", "x"), num_embeddings=1 << 20),
    )
    check_same(pa.array(values, pa.float64()).cast(kind), pa.array(SMALL), tmp_path, exact)


@pytest.mark.parametrize("kind", [pa.decimal128(38, 0), pa.decimal256(76, 0), pa.decimal128(38, 10)], ids=str)
def test_long_integers_stay_apart(kind, tmp_path):
    check_same(pa.array(decimals(LONG), kind), pa.array(LONG), tmp_path)
    rows = encoded(pa.table({"x": pa.array(decimals(LONG), kind)}), ids().fit([pa.table({"x": LONG})]))
    for feature in rows[0]:
        assert len(set(feature[0][0])) == len(set(LONG))


@pytest.mark.parametrize("kind", [pa.decimal128(38, 0), pa.decimal256(76, 0)], ids=str)
def test_unsigned_integers(kind, tmp_path):
    check_same(pa.array(decimals(UNSIGNED), kind), pa.array(UNSIGNED, pa.uint64()), tmp_path)


def test_integers_beyond_64_bits_stay_apart(tmp_path):
    column = pa.array(decimals(WIDE), pa.decimal128(38, 0))
    check_same(pa.array(decimals(WIDE), pa.decimal256(76, 0)), column, tmp_path)
    fitted = ids().fit([pa.table({"x": column})])
    for feature in encoded(pa.table({"x": column}), fitted)[0]:
        assert len(set(feature[0][0])) == len(set(WIDE))
    again = Features.from_json(fitted.to_json())
    assert encoded(pa.table({"x": column}), again) == encoded(pa.table({"x": column}), fitted)
    assert again["known"].row_of(10**30 + 1) == again["known"].row_of(Decimal(10**30 + 1)) > 1
    rows = ids(Integer(name="row", column="x", num_embeddings=9, missing=0))
    with pytest.raises(DataError, match=str(10**30)):
        encoded(pa.table({"x": column}), rows)


def test_parts_of_a_column_may_be_int64_and_uint64_and_decimals():
    parts = [
        pa.table({"x": pa.array([1, 2])}),
        pa.table({"x": pa.array([2**64 - 1, 2], pa.uint64())}),
        pa.table({"x": pa.array(decimals([10**30, 2]), pa.decimal128(38, 0))}),
    ]
    known = ids(Vocabulary(name="known", column="x")).fit(parts)["known"]
    assert [int(each) for each in known.vocabulary.to_pylist()] == [2, 1, 2**64 - 1, 10**30]
    assert known.row_of(2) == 2


def test_prices_as_decimals_are_the_numbers_that_floats_are(tmp_path):
    prices = [1.25, 3.0, None, 1.25, -7.5]
    column = pa.array(decimals(prices))
    features = ids(
        Vocabulary(name="known", column="x"), Hashed(name="hashed", column="x", num_embeddings=1 << 30)
    )
    check_same(column, pa.array(prices), tmp_path, features)


def test_rows_of_hashes_are_those_of_former_versions():
    assert hashes_of(pa.array([1, -1])).tolist() == [10451216379200822465, 16490336266968443936]
    assert hashes_of(pa.array([1.0])).tolist() == hashes_of(pa.array([4607182418800017408])).tolist()
    fitted = Hashed(name="x", num_embeddings=1 << 30, found="number")  # as runs saved it for decimals, too
    rows = [
        fitted.rows_of(fitted.values(pa.table({"x": column})).array).tolist()
        for column in (pa.array([5.0]), pa.array([Decimal(5)]), pa.array([5]))
    ]
    assert rows[0] == rows[1] == rows[2]


def test_numbers_with_a_fraction_are_named_where_integers_are_needed():
    table = pa.table({"x": [1.0, 2.5]})
    for feature in (Key(name="x", max_rows=9), Integer(name="x", num_embeddings=9)):
        with pytest.raises(DataError, match=r"'x'.*2\.5"):
            encoded(table, ids(feature))


UUID_TYPES = [pa.uuid(), pa.binary(16), pa.dictionary(pa.int8(), pa.binary(16))]


@pytest.mark.parametrize("kind", UUID_TYPES, ids=str)
def test_uuids_have_the_rows_of_their_text(kind, tmp_path):
    stored = [None if each is None else each.bytes for each in UUIDS]
    texts = pa.array([None if each is None else str(each) for each in UUIDS])
    check_same(pa.array(stored, kind), texts, tmp_path)
    check_same(pa.array(stored, kind).slice(1), texts.slice(1), tmp_path)
    assert ids().fit([pa.table({"x": texts})])["known"].row_of(UUIDS[0]) > 1


def test_other_binaries_of_fixed_size_are_hexadecimal():
    column = pa.array([b"\x00\xff", None, b"ab"], pa.binary(2))
    assert plain(column).to_pylist() == ["00ff", None, "6162"]
    assert plain(column.slice(1)).to_pylist() == [None, "6162"]


TEXTS = ["a", None, "long enough for a view of its own", "a", ""]
TEXT_TYPES = [
    *(pa.large_string(), pa.string_view(), pa.binary(), pa.large_binary(), pa.binary_view()),
    pa.dictionary(pa.int32(), pa.string()),
    pa.dictionary(pa.uint8(), pa.large_string()),
]


@pytest.mark.parametrize("kind", TEXT_TYPES, ids=str)
def test_texts(kind, tmp_path):
    stored = [each if each is None or "binary" not in str(kind) else each.encode() for each in TEXTS]
    check_same(pa.array(stored, kind), pa.array(TEXTS), tmp_path)


@pytest.mark.parametrize("values", [SMALL, TEXTS, LONG], ids=["small", "texts", "long"])
def test_run_ends(values, tmp_path):
    array = pa.array(values)
    check_same(pc.run_end_encode(array), array, tmp_path)
    check_same(pc.run_end_encode(array).slice(2, 3), array.slice(2, 3), tmp_path)


LISTS = [[1, 2], None, [], [3], [2, 2, 2]]
LIST_TYPES = [
    *(pa.large_list(pa.int32()), pa.list_view(pa.int64()), pa.large_list_view(pa.int16())),
    *(pa.list_(pa.decimal128(38, 0)), pa.list_view(pa.decimal128(20, 2)), pa.list_(pa.float64())),
    pa.list_(pa.dictionary(pa.int8(), pa.int64())),
]


@pytest.mark.parametrize("kind", LIST_TYPES, ids=str)
def test_lists(kind, tmp_path):
    is_decimal = pa.types.is_decimal(kind.value_type)
    values = [each and decimals(each) for each in LISTS] if is_decimal else LISTS
    array = pa.array(values, kind)
    check_same(array, pa.array(LISTS), tmp_path)
    check_same(array.slice(1, 3), pa.array(LISTS[1:4]), tmp_path)
    backward = pa.array([4, 0, 1, 2])
    check_same(array.take(backward), pa.array(LISTS).take(backward), tmp_path)


def test_list_views_out_of_order():
    array = pa.ListViewArray.from_arrays([2, 0, 1, 0], [2, 2, 0, 1], pa.array([7, 8, 9, 10]))
    assert plain(array).to_pylist() == [[9, 10], [7, 8], [], [7]]
    chunks = pa.chunked_array([array.slice(1, 2), array, array.slice(0, 0)])
    assert plain(chunks).to_pylist() == [[7, 8], [], [9, 10], [7, 8], [], [7]]


def test_lists_of_fixed_size(tmp_path):
    pairs = [[1, 2], None, [3, 4]]
    check_same(pa.array(pairs, pa.list_(pa.int64(), 2)), pa.array(pairs), tmp_path)
    assert plain(pa.array(pairs, pa.list_(pa.float32(), 2)).slice(1)).to_pylist() == [None, [3.0, 4.0]]
    check_same(pa.array([[str(uuid.UUID(int=3))]]), pa.array([[str(uuid.UUID(int=3))]]), tmp_path)
    uuids = pa.array([[uuid.UUID(int=3).bytes], None], pa.list_(pa.binary(16)))
    assert plain(uuids).to_pylist() == [[str(uuid.UUID(int=3))], None]


def micros(value):
    return None if value is None else (value - EPOCH) // datetime.timedelta(microseconds=1)


TIME_FEATURES = (
    *(Number(name=part, column="x", part=part, missing=-1.0) for part in ("year", "days", "minute")),
    Number(name="seconds", column="x", missing=0.0),
    DatePart(name="hour", column="x", part="hour"),
    Hashed(name="hashed", column="x", num_embeddings=1 << 30),
)


@pytest.mark.parametrize("layout", ["us", "int96", "zone", "ms", "s", "ns"])
def test_times(layout, tmp_path):
    values = pa.array(TIMES, pa.timestamp("us"))
    options = {"use_deprecated_int96_timestamps": True} if layout == "int96" else {}
    if layout in ("ms", "s", "ns"):
        values = pa.array(TIMES[:1] + TIMES[2:3], pa.timestamp("us")).cast(pa.timestamp(layout))
    if layout == "zone":
        values = values.cast(pa.timestamp("us", "Europe/Oslo"))
    fitted = ids(*TIME_FEATURES).fit([pa.table({"x": values.cast(pa.timestamp("us"))})])
    expected = encoded(pa.table({"x": values.cast(pa.timestamp("us"))}), fitted)
    pq.write_table(pa.table({"x": values}), tmp_path / "x.parquet", **options)
    assert encoded(tmp_path / "x.parquet", fitted) == expected
    assert encoded(pa.table({"x": values}), fitted) == expected
    read = read_columns([tmp_path / "x.parquet"], ["x"])["x"]
    assert microseconds_of(read.drop_null(), "s").tolist() == [
        each for each in values.cast(pa.timestamp("us")).cast(pa.int64()).to_pylist() if each is not None
    ]


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
def test_times_as_numbers_keep_microseconds(unit):
    exact = [micros(each) for each in TIMES[:2] + TIMES[3:]]
    if unit == "ns":
        exact = [each for each in exact if abs(each) < 2**63 // 1000]
    factor = {"s": Decimal(10) ** 6, "ms": Decimal(10) ** 3, "us": Decimal(1), "ns": Decimal(1) / 1000}[unit]
    written = [Decimal(each) / factor for each in exact]
    assert microseconds_of(pa.array(written, pa.decimal128(38, 9)), unit).tolist() == exact
    near = [each for each in exact if abs(each) < 2**51]
    floats = pa.array([float(Decimal(each) / factor) for each in near])
    assert microseconds_of(floats, unit).tolist() == near


ISO_TEXTS = ["1969-12-31 23:59:59.9999991", "2024-05-01T12:30:00", None, "", " 1600-02-29 "]


@pytest.mark.parametrize(
    "kind", [pa.string(), pa.string_view(), pa.dictionary(pa.int8(), pa.string())], ids=str
)
def test_texts_as_iso_writes_times_are_times(kind, tmp_path):
    stamps = [
        EPOCH - datetime.timedelta(microseconds=1),
        datetime.datetime(2024, 5, 1, 12, 30),
        None,
        None,
        datetime.datetime(1600, 2, 29),
    ]
    features = ids(*(each for each in TIME_FEATURES if each.name not in ("seconds", "hashed")))
    texts, times = pa.array(ISO_TEXTS).cast(kind), pa.array(stamps, pa.timestamp("us"))
    check_same(texts, times, tmp_path, features)


def test_zones_of_texts_count():
    assert microseconds_of(pa.array(["1970-01-01 01:00+01:00", "1970-01-01T00:00:01Z"]), "s").tolist() == [
        0,
        10**6,
    ]
    with pytest.raises(DataError, match=r"01.*05.*2024"):
        microseconds_of(pa.array(["01/05/2024"]), "s")


def test_texts_of_another_format_are_times(tmp_path):
    texts = pa.array(["01/05/2024 12:30", None, "31/12/1969 23:59"])
    times = pa.array([datetime.datetime(2024, 5, 1, 12, 30), None, datetime.datetime(1969, 12, 31, 23, 59)])
    features = ids(
        Number(name="days", column="x", part="days", missing=0.0, time_format="%d/%m/%Y %H:%M"),
        Number(name="seconds", column="x", missing=0.0, time_format="%d/%m/%Y %H:%M"),
        Buckets(name="range", column="x", part="days", num_buckets=2, time_format="%d/%m/%Y %H:%M"),
        DatePart(name="hour", column="x", time_format="%d/%m/%Y %H:%M"),
    )
    check_same(texts, times, tmp_path, features)
    check_same(texts.dictionary_encode(), times, tmp_path, features)
    fitted = features.fit([pa.table({"x": texts})])
    assert Features.from_json(fitted.to_json()) == fitted
    with pytest.raises(DataError, match="2024-05-01"):
        encoded(pa.table({"x": ["2024-05-01"]}), fitted)


def test_a_feature_of_a_part_of_times_names_texts_that_are_not_times():
    with pytest.raises(DataError, match="1"):
        encoded(pa.table({"x": ["1st of May"]}), ids(DatePart(name="x", part="hour")))


def test_nanoseconds_are_floored():
    for column in (pa.array([-1, -1001, 1999], pa.timestamp("ns")), pa.array([-1, -1001, 1999])):
        assert microseconds_of(column, "ns").tolist() == [-1, -2, 1]
    assert microseconds_of(pa.array([Decimal("-0.0000001"), Decimal("1.9999999")]), "s").tolist() == [
        -1,
        1_999_999,
    ]
    assert microseconds_of(pa.array([-0.0000001, 1.5]), "s").tolist() == [-1, 1_500_000]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (pa.duration("s"), "other"),
        (pa.month_day_nano_interval(), "other"),
        (pa.struct([("a", pa.int64())]), "other"),
        (pa.map_(pa.int64(), pa.int64()), "other"),
        (pa.list_(pa.list_(pa.int64())), "other"),
        (pa.null(), "other"),
        (pa.opaque(pa.binary(), "bignum", "DuckDB"), "other"),
        (pa.bool8(), "integer"),
        (pa.json_(), "text"),
        (pa.fixed_shape_tensor(pa.float32(), [3]), "list of number"),
        (pa.time64("ns"), "time"),
        (pa.date64(), "time"),
        (pa.decimal128(5, -2), "integer"),
    ],
    ids=str,
)
def test_kinds_of_further_types(kind, expected):
    assert kind_of(kind) == expected


# -- writers ---------------------------------------------------------------------------------------------

WRITTEN = {
    "integer": ([*LONG[:4], None], None),
    "unsigned": (UNSIGNED[:2] + UNSIGNED[3:], None),
    "text": (TEXTS[:3], None),
    "uuid": ([None if each is None else str(each) for each in UUIDS], None),
    "time": (TIMES, TIME_FEATURES),
    "bool": ([True, None, False], None),
    "list": ([[1, 2], [], [3]], None),
    "texts": ([["a", "b"], [], ["a"]], None),
}


def reference_of(name):
    values = WRITTEN[name][0]
    kind = {"time": pa.timestamp("us"), "unsigned": pa.uint64()}.get(name)
    return pa.table({"x": pa.array(values, kind)})


def check_written(name, data):
    features = ids(*(WRITTEN[name][1] or ()))
    table = reference_of(name)
    fitted = features.fit([table])
    assert encoded(data, fitted) == encoded(table, fitted)


@pytest.mark.parametrize("name", WRITTEN)
def test_what_polars_writes(name, tmp_path):
    polars = pytest.importorskip("polars")
    kinds = {
        "unsigned": polars.UInt64,
        "list": polars.List(polars.Int64),
        "texts": polars.List(polars.String),
    }
    frame = polars.DataFrame({"x": polars.Series(WRITTEN[name][0], dtype=kinds.get(name))})
    check_written(name, frame)
    frame.write_parquet(tmp_path / "x.parquet")
    check_written(name, tmp_path / "x.parquet")
    if name == "text":
        check_written(name, frame.with_columns(polars.col("x").cast(polars.Categorical)))
    if name == "integer":
        check_written(name, frame.with_columns(polars.col("x").cast(polars.Decimal(38, 0))))
        with pytest.raises(ValueError, match="128"):
            to_table(frame.with_columns(polars.col("x").cast(polars.Int128)))


SQL = {"integer": "HUGEINT", "unsigned": "UBIGINT", "text": "VARCHAR", "uuid": "UUID", "time": "TIMESTAMP"}
SQL |= {"bool": "BOOLEAN", "list": "BIGINT[]", "texts": "VARCHAR[]"}


@pytest.mark.parametrize("name", WRITTEN)
def test_what_duckdb_writes(name, tmp_path):
    duckdb = pytest.importorskip("duckdb")
    with duckdb.connect() as connection:
        connection.execute("SET arrow_output_version = '1.4'")
        connection.execute(f"CREATE TABLE t (n BIGINT, x {SQL[name]})")
        connection.executemany("INSERT INTO t VALUES (?, ?)", list(enumerate(WRITTEN[name][0])))
        if name != "integer":  # HUGEINT is a double in Parquet
            connection.execute(f"COPY (SELECT x FROM t ORDER BY n) TO '{tmp_path / 'x.parquet'}'")
            check_written(name, tmp_path / "x.parquet")
        for views in ("false", "true"):
            connection.execute(f"SET arrow_output_list_view = {views}")
            check_written(name, connection.sql("SELECT x FROM t ORDER BY n").to_arrow_table())


@pytest.mark.parametrize("name", WRITTEN)
def test_what_pandas_writes(name, tmp_path):
    pandas = pytest.importorskip("pandas")
    kinds = {"integer": "Int64", "unsigned": "uint64"}
    frame = pandas.DataFrame({"x": pandas.Series(WRITTEN[name][0], dtype=kinds.get(name))})
    check_written(name, frame)
    frame.to_parquet(tmp_path / "x.parquet")
    check_written(name, tmp_path / "x.parquet")
    if name == "text":
        check_written(name, frame.astype("category"))


KEYS = {
    "int64": pa.array(LONG[:3]),
    "decimal": pa.array(decimals(LONG[:3]), pa.decimal128(38, 0)),
    "scaled": pa.array(decimals(LONG[:3]), pa.decimal128(38, 10)),
    "dictionary": pa.array(decimals(LONG[:3]), pa.decimal128(38, 0)).dictionary_encode(),
}


@pytest.mark.parametrize("joined", KEYS)
def test_keys_of_joins_meet_whatever_their_types(joined, tmp_path):
    path = tmp_path / "items.parquet"
    pq.write_table(pa.table({"x": KEYS[joined], "color": ["red", "blue", "green"]}), path)
    join = Join(path=str(path), key="x", columns=("color",))
    for column in KEYS.values():
        table = pa.table({"x": column.take(pa.array([2, 0, 1]))})
        assert join.joined(table)["color"].to_pylist() == ["green", "red", "blue"]


def test_plain_tables_are_not_copied():
    table = pa.table({"x": [1], "y": [["a"]], "z": pa.array(["a"]).dictionary_encode()})
    assert plain_table(table) is table


def test_labels_of_decimals_and_views():
    table = pa.table({"x": ["a", "b"], "y": pa.array(decimals([1, 0]), pa.decimal128(38, 0))})
    features = Features(labels=(Label(column="y"),), features=(Vocabulary(name="x"),)).fit([table])
    samples = next(iter(open_tables(table, features, Faults("raise")).windows(0, 0, 9)))
    assert samples.labels.tolist() == [1.0, 0.0]
