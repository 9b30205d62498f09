import dataclasses

import numpy as np
import pytest

from meshrec.serve.requests import RequestError, as_array, check_request, concat_requests
from tests.serve.conftest import SIGNATURE, request_of, samples
from tests.serve.toys import FEATURES


def arrays(given):
    request = request_of(given)
    return (
        request.dense,
        dict(zip(FEATURES, request.values, strict=True)),
        dict(zip(FEATURES, request.lengths, strict=True)),
    )


def test_sound_requests_are_put_in_order_and_joined():
    first, second = samples(3, 1), samples(2, 2)
    both = concat_requests(
        [check_request(SIGNATURE, *arrays(first)), check_request(SIGNATURE, *arrays(second))]
    )
    assert both.group is None
    for found, expected in zip(both[:3], request_of(first + second)[:3], strict=True):
        assert np.array_equal(
            np.concatenate([np.ravel(a) for a in found]), np.concatenate([np.ravel(a) for a in expected])
        )
    assert both.num_samples == 5
    assert check_request(SIGNATURE, *arrays([])).num_samples == 0


def test_what_is_shared_is_kept_or_repeated():
    dense, values, lengths = arrays(samples(3, 1))
    once = dense[:1], {**values, "user": np.array([4, 5])}, {**lengths, "user": np.array([2])}
    kept = dataclasses.replace(SIGNATURE, shared=frozenset({"user", "dense"}))
    found = check_request(kept, *once, shared={"user", "dense"}, num_samples=3)
    assert found.num_samples == 3
    assert found.group.tolist() == [0, 0, 0]
    assert found.lengths[0].tolist() == [2]
    repeated = check_request(SIGNATURE, *once, shared={"user", "dense"}, num_samples=3)
    assert repeated.group is None
    assert repeated.values[0].tolist() == [4, 5] * 3
    assert repeated.lengths[0].tolist() == [2] * 3
    assert repeated.dense.tolist() == [dense[0].tolist()] * 3
    # A request that shares less than the model does is a plain one.
    less = check_request(
        kept, dense, {**values, "user": np.array([4])}, {**lengths, "user": np.array([1])}, shared={"user"}
    )
    assert less.group is None
    many = (
        dense[:1],
        {**values, "user": np.zeros(1 << 23, np.int64)},
        {**lengths, "user": np.array([1 << 23])},
    )
    with pytest.raises(RequestError, match="3 samples") as caught:
        check_request(SIGNATURE, *many, shared={"user", "dense"}, num_samples=3)
    assert caught.value.status == 413
    both = concat_requests([found, repeated, found])
    assert both.group.tolist() == [0, 0, 0, 1, 2, 3, 4, 4, 4]
    assert both.num_samples == 9
    separate = found._replace(group=np.arange(3))  # as warm-up requests: each sample has a row of its own
    assert concat_requests([separate, found]).group.tolist() == [0, 1, 2, 3, 3, 3]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d, v, n: (d, {"user": v["user"]}, n), "'item'"),
        (lambda d, v, n: (d, v, {"item": n["item"]}), "'user'"),
        (lambda d, v, n: (None, v, n), "dense.*3"),
        (lambda d, v, n: (d[:, 1:], v, n), r"shape.*\[4, 3\].*\[4, 2\]"),
        (lambda d, v, n: (d * [1, np.nan, 1], v, n), "value 1.*sample 0"),
        (
            lambda d, v, n: (d, v, {**n, "item": n["item"][1:]}),
            r"'item'.*\[3\].*4 samples",
        ),
        (
            lambda d, v, n: (d, v, {**n, "item": n["item"] - 9}),
            "'item': or the length|the length of sample 0 is -",
        ),
        (lambda d, v, n: (d, {**v, "user": v["user"][1:]}, n), r"'user': the lengths sum to \d+, but"),
        (
            lambda d, v, n: (d, {**v, "item": v["item"] * 0 + 50}, n),
            r"'item'.*id 50.*sample 0.*\[0.*50",
        ),
        (lambda d, v, n: (d, {**v, "item": v["item"] * 0 - 1}, n), "'item'.*id -1.*sample 0"),
    ],
)
def test_what_cannot_be_scored_is_named(change, message):
    given = samples(4, 5)
    given[0]["item"] = [7]
    given[1]["user"] = [1]
    with pytest.raises(RequestError, match=message) as caught:
        check_request(SIGNATURE, *change(*arrays(given)))
    assert caught.value.status == 400


def test_the_sample_of_a_wrong_id_is_the_one_that_has_it():
    given = samples(4, 5)
    for each in given:
        each["item"] = []
    given[2]["item"] = [1, 99, 2]
    with pytest.raises(RequestError, match=r"'item'.*id 99.*sample 2"):
        check_request(SIGNATURE, *arrays(given))


@pytest.mark.parametrize(
    ("data", "dtype", "message"),
    [
        ([1, [2]], np.int64, "regular"),
        ([1.5], np.int64, r"fit 64.*\[1.5\]"),
        (["1"], np.int64, "numbers"),
        ([True, 2], np.int64, "numbers"),
        ([1, None], np.float32, "numbers"),
        ({"a": 1}, np.float32, "numbers"),
        ([1 << 63], np.int64, "numbers"),
        ([1, 1e300], np.int64, "numbers"),
        ([float("nan")], np.int64, "numbers"),
        ([1 << 31], np.int32, "int32"),
        ([10**400], np.float32, "numbers"),
        (["x" * 100], np.float32, r"\.\.\."),
    ],
)
def test_what_is_no_number_is_refused(data, dtype, message):
    with pytest.raises(RequestError, match=message):
        as_array(data, np.dtype(dtype), "input 'x'")


def test_numbers_become_arrays():
    assert as_array([], np.dtype(np.int64), "x").dtype == np.int64
    assert as_array([1, 2.5], np.dtype(np.float32), "x").tolist() == [1.0, 2.5]
    assert as_array([1e3, 2, 2.0**40], np.dtype(np.int64), "x").tolist() == [1000, 2, 1 << 40]
    assert as_array([(1 << 62) + 1, 1.0], np.dtype(np.int64), "x").tolist() == [(1 << 62) + 1, 1]
    assert as_array([[1], [2]], np.dtype(np.int32), "x").shape == (2, 1)
