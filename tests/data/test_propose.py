import numpy as np
import pyarrow as pa
import pytest

from meshrec.data.faults import Faults
from meshrec.data.features import Buckets, Cross, DatePart, Key, Label, Number, Vocabulary
from meshrec.data.frames import open_tables
from meshrec.data.profile import Column, profile
from meshrec.data.propose import propose

N = 4000


def table(**more) -> pa.Table:
    rng = np.random.default_rng(1)
    y = rng.integers(0, 2, N)
    columns = {
        "y": y,
        "row": np.arange(N),
        "user": rng.integers(1, 200, N),
        "country": [["fr", "no", None][each] for each in rng.integers(0, 3, N)],
        "visits": rng.geometric(0.002, N),
        "price": rng.lognormal(0, 2, N),
        "session": [f"s{each}" for each in range(N)],
        "same": ["x"] * N,
        "empty": pa.nulls(N, pa.string()),
        "answer": [f"a{each}" for each in y],
        "tags": [rng.integers(0, 30, each % 5).tolist() for each in range(N)],
        "vector": [[0.5, 0.5]] * N,
        "ts": pa.array(1_600_000_000 + rng.integers(0, 10**7, N)),
        "born": pa.array(rng.integers(0, 10**9, N)).cast(pa.timestamp("s")),
    }
    return pa.table(columns | more)


def proposed(label="y", time="ts", task=None, query=None, **more):
    data = table(**more)
    return propose(profile([data], label), label=label, time=time, task=task, query=query)


def test_every_column_has_a_role_and_a_reason():
    found = proposed()
    roles = {choice.column: choice.role for choice in found.choices}
    assert roles == {
        "y": "label",
        "row": "drop",
        "user": "id",
        "country": "id",
        "visits": "dense",
        "price": "dense",
        "session": "drop",
        "same": "drop",
        "empty": "drop",
        "answer": "drop",
        "tags": "list",
        "vector": "drop",
        "ts": "time",
        "born": "id",
    }
    assert all(choice.reason for choice in found.choices)
    warned = "\n".join(found.warnings)
    for part in ("'row' counts the rows", "'session' differs in almost every row", "'same' is constant"):
        assert part in warned
    assert "'answer' tells the label by itself (AUC 1.0000)" in warned
    kinds = {feature.name: type(feature) for feature in found.features.features}
    assert kinds == {
        "user": Vocabulary,
        "user_number": Number,
        "country": Vocabulary,
        "visits": Number,
        "price": Number,
        "tags": Vocabulary,
        "born_hour": DatePart,
        "born_weekday": DatePart,
    }
    assert found.features["price"].log
    found.features.fit([table()])


def test_labels_of_many_values_are_cut_in_two():
    stars = np.random.default_rng(0).integers(1, 11, N) / 2
    found = proposed(label="stars", stars=stars)
    assert found.features.labels == (Label(column="stars", positive_from=3.0),)
    assert "1 from 3 on" in found.choices[0].reason


def test_without_a_time_the_split_is_random_and_that_is_said():
    assert "the split is random" in proposed(time=None).warnings[-1]


def test_a_time_that_is_no_time_is_said():
    assert any("--time price" in warning for warning in proposed(time="price").warnings)
    assert not any("--time" in warning for warning in proposed(time="row").warnings)


def test_times_are_numbers_too_where_training_meets_all_of_them():
    times = pa.array([9 * 3600, 10 * 3600] * (N // 2), pa.time32("s"))
    found = proposed(time=None, times=times).features
    names = {feature.name for feature in found.features}
    assert {"born_hour", "born_weekday", "born_number", "times_hour"} < names
    assert "times_number" not in names  # its hour says it
    assert found["born_number"] == Number(name="born_number", column="born", standardize=True, num_bins=16)
    found.fit([table(times=times)])


@pytest.mark.parametrize("kind", ["text", "integer"])
def test_large_columns_get_hashed_tables_and_their_cost_is_said(kind):
    from meshrec.data.propose import _ids

    choice = _ids(Column("c_id", kind, "string", num_rows=10**8, distinct=3_000_000))
    assert choice.features == (Key(name="c_id", max_rows=3_000_000, min_count=2),)
    # 3 x 16 fp32 values, 4 bytes of LRU, and 16 of the index.
    assert "607 MiB with Adam at width 16, of which 46 MiB find them" in choice.reason
    assert choice.rows == 3_000_000


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"label": "nobody"}, "--label"),
        ({"time": "never"}, "--time"),
        (
            {"label": "answer", "task": "binary", "answer": ["a", "b", "c", "c"] * (N // 4)},
            "binary.* 3 values",
        ),
        ({"label": "answer", "task": "number"}, "number.*'a1'"),
        ({"label": "born", "task": "classes"}, "holds time"),
        ({"query": "never"}, "--query"),
        ({"label": "same", "same": np.ones(N)}, "rows"),
        ({"label": "gaps", "gaps": pa.array([1, None] * (N // 2))}, "2,000.*4,000 rows"),
        ({"time": "country"}, r"\['fr'\]"),
        ({"label": "empty", "empty": pa.nulls(N)}, "--label empty: no row"),
    ],
)
def test_labels_and_times_that_cannot_be(more, message):
    with pytest.raises(ValueError, match=message):
        proposed(**more)


def test_numbers_alone_have_tables_of_their_ranges():
    data = pa.table({"y": [0, 1] * 50, "x": np.random.default_rng(0).normal(size=100)})
    found = propose(profile([data], "y"), label="y", time=None)
    assert [type(feature) for feature in found.features.features] == [Number, Buckets]
    with pytest.raises(ValueError, match="nothing"):
        propose(profile([data.set_column(1, "x", [[1.0] * 100])], "y"), label="y", time=None)


def test_a_column_that_tells_the_label_is_taken_if_there_is_no_other():
    data = pa.table({"y": [0, 1] * 50, "x": [0.5, 2.25] * 50, "one": [1] * 100})
    found = propose(profile([data], "y"), label="y", time=None)
    assert [feature.source for feature in found.features.features] == ["x", "x"]
    assert any("'x'" in warning and "by itself" in warning for warning in found.warnings)


def test_texts_with_separators_are_lists_and_sentences_are_not():
    rng = np.random.default_rng(2)
    genres = ["|".join(f"g{each}" for each in rng.integers(0, 9, k % 4)) for k in range(N)]
    titles = [f"The {each}, of {each % 7}" for each in rng.integers(0, 300, N)]
    choices = {each.column: each for each in proposed(genres=genres, titles=titles).choices}
    assert choices["genres"].role == "list"
    assert choices["genres"].features == (Vocabulary(name="genres", separator="|"),)
    assert choices["genres"].rows == 11
    assert choices["titles"].features[0].separator is None


def test_names_with_dots_become_names_of_tables():
    more = {"user.id": np.arange(N) % 90, "user_id": np.arange(N) % 80, "a.price": np.arange(N) ** 1.5}
    found = {each.column: each.features[0] for each in proposed(**more).choices if each.column in more}
    assert {name: feature.name for name, feature in found.items()} == {
        "user.id": "user_id_",
        "user_id": "user_id",
        "a.price": "a_price",
    }
    assert found["user.id"].source == "user.id"


def test_integers_that_are_floats_for_their_nulls_are_ids():
    codes = np.where(np.arange(N) % 7 == 0, np.nan, np.random.default_rng(0).integers(0, 9, N))
    data = table(codes=codes)
    found = propose(profile([data], "y"), label="y", time="ts")
    features = found.features.fit([data])
    assert features["codes"].rows == 2 + 9
    assert [features["codes"].row_of(value) for value in (None, 100)] == [0, 1]


def test_one_missing_id_changes_no_proposal():
    users = np.random.default_rng(3).integers(1000, 1150, N)
    as_integers = proposed(user=users)
    for column in (
        pa.array(users.astype(float), mask=np.arange(N) == 7),
        pa.array(users).cast(pa.decimal128(30, 2)),
    ):
        choices = {choice.column: choice for choice in proposed(user=column).choices}
        expected = next(choice for choice in as_integers.choices if choice.column == "user")
        assert choices["user"].role == "id"
        assert [type(each) for each in choices["user"].features] == [type(each) for each in expected.features]


def test_ids_that_floats_round_are_told():
    users = np.random.default_rng(3).integers(0, 100, N).astype(float) * 2.0**10 + 2.0**60
    (warning,) = [each for each in proposed(user_id=users).warnings if "user_id" in each]
    assert "2^53" in warning


def test_bytes_are_hashed_and_dictionaries_are_read_as_their_values():
    numbers = np.random.default_rng(5).integers(0, 9, N)
    raw = pa.array([bytes([255, each]) for each in numbers])
    days = pa.array(numbers.astype(np.int32)).cast(pa.date32()).dictionary_encode()
    found = proposed(time=None, raw=raw, day=days)
    features = {each.column: [type(one).__name__ for one in each.features] for each in found.choices}
    assert (features["raw"], features["day"]) == (["Hashed"], ["DatePart", "Number"])
    assert found.features.fit([table(raw=raw, day=days)])["raw"].rows == 20


@pytest.mark.parametrize("labels", [[0.0, 1.0, None, 1.0], ["no", "yes", None, "yes"], [1.0, 2.0, None, 5.0]])
def test_rows_without_a_label_are_left_out_if_that_is_asked_for(labels):
    data = table(y=pa.array((labels * N)[:N]))
    looked_at = profile([data], "y")
    with pytest.raises(ValueError, match="1,000 of 4,000"):
        propose(looked_at, label="y", time="ts")
    found = propose(looked_at, label="y", time="ts", skip_unlabelled=True)
    faults = Faults("raise")
    source = open_tables(data, found.features.fit([data]), faults)
    kept = np.concatenate([each.is_valid for each in source.windows(0, 0, N)])
    assert kept.tolist() == [each is not None for each in (labels * N)[:N]]
    assert list(faults.skipped.values()) == [1000]


def test_vectors_are_not_read():
    vectors = pa.array([[0.5, 1.0]] * N, pa.list_(pa.float32(), 2))
    (choice,) = [each for each in proposed(vector=vectors).choices if each.column == "vector"]
    assert (choice.role, choice.features) == ("drop", ())


def test_iso_texts_are_times():
    days = np.datetime64("2024-01-01") + np.random.default_rng(4).integers(0, 90, N)
    texts = pa.array(days.astype(str)).cast(pa.string())
    by_time = proposed(time="day", day=texts)
    assert next(each.role for each in by_time.choices if each.column == "day") == "time"
    parts = next(each for each in proposed(time=None, day=texts).choices if each.column == "day").features
    assert [(type(each), each.part) for each in parts] == [(DatePart, "weekday"), (Number, "days")]
    with pytest.raises(ValueError, match=r"01.*05.*2024"):
        proposed(time="day", day=["01/05/2024"] * N)


@pytest.mark.parametrize(
    ("texts", "example"),
    [
        (["$1,234.56", "$7.00", "$12.50"], "$1,234.56"),
        (["12%", "7%"], "12%"),
        (["12", "-", "7"], "-"),
        (["1.234,5", "2,25", "7"], "1.234,5"),
        (["(7.50)", "1.25"], "(7.50)"),
    ],
)
def test_numbers_written_as_texts_are_told(texts, example):
    warnings = [each for each in proposed(amount=(texts * N)[:N]).warnings if "amount" in each]
    assert len(warnings) == 1
    assert repr(example) in warnings[0]


@pytest.mark.parametrize(
    "texts", [["007", "12"], ["a1", "12.5"], ["2024-05", "7"], ["red", "-"], ["1.2.3", "1.2"]]
)
def test_other_texts_are_no_numbers(texts):
    assert not [each for each in proposed(code=(texts * N)[:N]).warnings if "written as text" in each]


def test_what_training_refuses_is_refused():
    with pytest.raises(ValueError, match=r"column 'price' has 2 infinite"):
        proposed(price=np.where(np.arange(N) < 2, np.inf, 1.5))
    with pytest.raises(ValueError, match="5 rows"):
        propose(profile([table().slice(0, 5)], "y"), label="y", time="ts")


def test_features_have_names_that_tables_can_have_and_kinds_that_they_take():
    rng = np.random.default_rng(0)
    odd = {name: rng.integers(0, 5, N) for name in ("a.b", "a_b", "", "training", "items", 'quo"te')}
    code = pa.array(rng.integers(0, 5, N).astype(float), mask=rng.random(N) < 0.1)
    found = proposed(**odd, code=code).features
    columns = {each.name: each.source for each in found.ids}
    wanted = {
        "a_b_": "a.b",
        "a_b": "a_b",
        "column": "",
        "training_": "training",
        "items_": "items",
        'quo"te': 'quo"te',
    }
    assert columns.items() >= wanted.items()
    fitted = found.fit([table(**odd, code=code)])
    assert fitted["code"].rows == 2 + 5


def test_a_cross_that_pays_is_proposed_and_numbers_have_bins():
    rng = np.random.default_rng(0)
    left, right = rng.integers(0, 5, N), rng.integers(0, 5, N)
    chance = np.where((left % 2) == (right % 2), 0.8, 0.2)
    x = rng.normal(size=N)
    y = (rng.random(N) < chance).astype(int)
    found = proposed(y=y, left=left, right=right, x=x)
    crosses = [each for each in found.features.features if isinstance(each, Cross)]
    assert [each.columns_crossed for each in crosses] == [("left", "right")]
    numbers = [each for each in found.features.features if isinstance(each, Number)]
    assert {each.num_bins for each in numbers} == {16}


def test_ranges_of_a_number_are_proposed_where_they_pay():
    rng = np.random.default_rng(0)
    x = rng.normal(size=N)
    y = (rng.random(N) < np.where(np.abs(x) > 1, 0.9, 0.1)).astype(int)
    found = proposed(y=y, bend=x, gaps=np.where(rng.random(N) < 0.2, np.nan, x))
    names = {each.name for each in found.features.features if isinstance(each, Buckets)}
    assert names >= {"bend_range", "gaps_range"}


def test_texts_of_three_values_are_classes_and_queries_rank():
    found = proposed(label="country", country=np.array(["fr", "it", "no"])[np.arange(N) % 3])
    assert found.features.labels == (Label(column="country", kind="class", classes=("fr", "it", "no")),)
    found = proposed(label="answer", task="classes")
    assert found.features.labels == (Label(column="answer", kind="class", classes=("a0", "a1")),)
    found = proposed(query="user")
    assert found.features.labels == (
        Label(column="y", kind="number"),
        Label(column="user", kind="query"),
    )
    assert "user" not in [each.name for each in found.features.features]


@pytest.mark.parametrize(
    ("values", "classes"),
    [
        (("no", "yes"), ("no", "yes")),
        (("Clicked", "not clicked"), ("not clicked", "Clicked")),
        (("False", "True"), ("False", "True")),
        (("0", "1"), ("0", "1")),
        ((b"benign", b"malignant"), ("benign", "malignant")),
    ],
)
@pytest.mark.parametrize("task", [None, "binary"])
def test_two_texts_are_a_binary_label_and_the_positive_one_is_said(values, classes, task):
    y = np.asarray(table()["y"])
    texts = pa.array(values).take(pa.array(y)).dictionary_encode()
    found = proposed(label="text", task=task, text=texts)
    (label,) = found.features.labels
    assert label == Label(column="text", classes=classes)
    said = [text for text in found.warnings if repr(classes[1]) in text]
    assert len(said) == 1
    assert repr(classes[1]) in found.choices[0].reason


def test_labels_as_text_get_the_features_of_labels_as_numbers():
    rng = np.random.default_rng(0)
    x = rng.normal(size=N)
    y = (rng.random(N) < np.where(np.abs(x) > 1, 0.9, 0.1)).astype(int)
    numbers = proposed(y=y, bend=x, leak=y * 2)
    texts = proposed(y=np.array(["no", "yes"])[y], bend=x, leak=y * 2)
    assert proposed(y=y / 2, bend=x, leak=y * 2).features.labels == (Label(column="y", positive_from=0.5),)
    assert texts.features.features == numbers.features.features
    assert "bend_range" in [feature.name for feature in texts.features.features]
    assert {choice.column: choice.role for choice in texts.choices}["leak"] == "drop"


def test_a_class_that_no_sampled_row_has_is_proposed():
    num = 200_000
    y = np.zeros(num, np.int64)
    y[77] = 1
    data = pa.table({"user": np.arange(num) % 91, "y": np.array(["good", "spam"])[y]})
    found = propose(profile([data], "y"), label="y", time=None)
    assert found.features.labels[0].classes == ("good", "spam")


def marching(**more) -> tuple[pa.Table, np.ndarray]:
    """Return a shuffled table of one year and the day of each row, with columns that march with time."""
    rng = np.random.default_rng(3)
    day = rng.integers(0, 365, N)
    data = pa.table(
        {
            "y": rng.integers(0, 2, N),
            "user": rng.integers(0, 50, N),
            "ts": 1_672_531_200 + 86_400 * day,
            "month": day // 31 + 1,
            "name_of_month": [f"{chr(122 - each)}{each}" for each in (day // 31).tolist()],
            "day_of_year": day,
            "order": [f"A-{each:05}" for each in (day * 3 + rng.integers(0, 3, N)).tolist()],
            "clock": day + rng.random(N),
            "weekday": day % 7,
        }
    )
    return data, day


def test_columns_that_march_with_time_are_left_out_with_a_warning():
    data, _ = marching()
    by_time = propose(profile([data], "y"), label="y", time="ts")
    out = {choice.column for choice in by_time.choices if choice.role == "drop"}
    assert out == {"month", "name_of_month", "day_of_year", "order", "clock"}
    for name in out:
        assert any(f"{name!r} marches with time: 100%" in warning for warning in by_time.warnings)
    assert {"user", "weekday"} == {feature.source for feature in by_time.features.features}
    at_random = propose(profile([data], "y"), label="y", time=None)
    assert not [choice for choice in at_random.choices if choice.role == "drop"]


def test_the_future_meets_every_category_that_is_proposed_by_time():
    data, day = marching()
    later, earlier = day >= np.quantile(day, 0.9), day < np.quantile(day, 0.8)
    found = propose(profile([data], "y"), label="y", time="ts").features
    for feature in found.features:
        if isinstance(feature, Vocabulary):
            values = data[feature.source].to_numpy()
            assert np.isin(values[later], values[earlier]).mean() > 0.9


def test_users_of_a_single_session_keep_their_ids():
    data, day = marching()
    users = np.random.default_rng(0).permutation(400)[day]
    found = propose(profile([data.append_column("visitor", [users])], "y"), label="y", time="ts")
    assert "visitor" in {feature.source for feature in found.features.features}


def test_rare_ids_do_not_march_with_time():
    data, _ = marching()
    rare = np.random.default_rng(0).permutation(N) // 2
    found = propose(profile([data.append_column("card", [rare])], "y"), label="y", time="ts")
    assert "card" in {feature.source for feature in found.features.features}


def test_columns_that_march_with_time_stay_where_there_are_no_others():
    data = marching()[0].select(["y", "ts", "month"])
    found = propose(profile([data], "y"), label="y", time="ts")
    assert "month" in {feature.source for feature in found.features.features}


def test_crosses_that_march_with_time_are_not_proposed():
    rng = np.random.default_rng(0)
    num = 6000
    day = np.sort(rng.integers(0, 730, num))
    season, year = day % 365 // 92, day // 365
    y = (rng.random(num) < 0.1 + 0.8 * ((season + year) % 2)).astype(int)
    data = pa.table({"y": y, "ts": day * 86_400, "season": season, "year": year})
    by_time = propose(profile([data], "y"), label="y", time="ts").features
    at_random = propose(profile([data], "y"), label="y", time=None).features
    assert not [each for each in by_time.features if isinstance(each, Cross)]
    assert [each for each in at_random.features if isinstance(each, Cross)]
