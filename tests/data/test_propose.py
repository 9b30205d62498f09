import numpy as np
import pyarrow as pa
import pytest

from meshrec.data.features import Buckets, Cross, DatePart, Key, Label, Number, Vocabulary
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
        ({"label": "nobody"}, "--label nobody: there is no such column"),
        ({"time": "never"}, "--time never: there is no such column"),
        ({"label": "country", "task": "binary"}, "it holds text, and labels are numbers"),
        ({"query": "never"}, "--query never: there is no such column"),
        ({"label": "same", "same": np.ones(N)}, "all rows have the same"),
        ({"label": "gaps", "gaps": pa.array([1, None] * (N // 2))}, "2,000 of 4,000 rows have none"),
        ({"time": "country"}, "and times are dates, timestamps or"),
    ],
)
def test_labels_and_times_that_cannot_be(more, message):
    with pytest.raises(ValueError, match=message):
        proposed(**more)


def test_nothing_to_make_tables_of():
    data = pa.table({"y": [0, 1] * 50, "x": np.random.default_rng(0).normal(size=100)})
    with pytest.raises(ValueError, match="nothing to make tables of"):
        propose(profile([data], "y"), label="y", time=None)


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


def test_texts_are_classes_and_queries_rank():
    found = proposed(label="country", country=np.array(["fr", "no"])[np.arange(N) % 2])
    assert found.features.labels == (Label(column="country", kind="class", classes=("fr", "no")),)
    found = proposed(query="user")
    assert found.features.labels == (
        Label(column="y", kind="number"),
        Label(column="user", kind="query"),
    )
    assert "user" not in [each.name for each in found.features.features]
