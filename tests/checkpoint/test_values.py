import json
import math
from collections import Counter
from enum import Enum, IntEnum

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshrec.checkpoint.values import decode, encode

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text() | st.integers() | st.tuples(st.integers()), inner)
    ),
)


def there_and_back(value):
    tensors = {}
    text = json.dumps(encode(value, "x", tensors))
    return decode(json.loads(text), tensors.__getitem__)


@settings(max_examples=30)
@given(PLAIN)
def test_what_comes_back_is_the_same(value):
    back = there_and_back(value)
    assert back == value
    assert type(back) is type(value)


def test_kinds_that_json_lacks():
    value = {"milestones": Counter({3: 1}), "seen": {1, 2}, "__tuple__": [1], "inf": math.inf}
    back = there_and_back(value)
    assert back == value
    assert isinstance(back["milestones"], Counter)
    assert math.isnan(there_and_back(math.nan))


def test_tensors_are_named_by_their_place():
    tensors = {}
    value = {"a": [torch.tensor(1), {"b": torch.tensor(2)}]}
    encoded = encode(value, "x", tensors)
    assert list(tensors) == ["x.a.0", "x.a.1.b"]
    assert decode(encoded, tensors.__getitem__)["a"][1]["b"] is tensors["x.a.1.b"]


def test_names_of_tensors_are_those_of_the_values_that_come_back():
    class Text(str, Enum):
        A = "a"

    class Number(IntEnum):
        ONE = 1

    for key in (Text.A, Number.ONE, (1, ("b",)), np.float64(0.1), True, None):
        tensors, again = {}, {}
        encoded = encode({key: torch.tensor(1), "other": [torch.tensor(2)]}, "x", tensors)
        back = decode(json.loads(json.dumps(encoded)), tensors.__getitem__)
        assert encode(back, "x", again) == encoded
        assert again == tensors


def test_sets_may_hold_several_types():
    value = {1, "a", (2, 3), (1, "b"), None}
    assert there_and_back(value) == value


def test_frozensets_come_back_as_frozensets():
    value = {
        "sets": {frozenset({1}), (frozenset(), 2)},
        "keys": {frozenset({"a", 3}): frozenset()},
        "s": set(),
    }
    back = there_and_back(value)
    assert back == value
    assert type(back["keys"][frozenset({"a", 3})]) is frozenset
    assert type(back["s"]) is set


@pytest.mark.parametrize(
    ("value", "name"),
    [
        ({"a.b": torch.tensor(1), "a": {"b": torch.tensor(2)}}, r"x\.a\.b"),
        ({1: torch.tensor(1), "1": torch.tensor(2)}, r"x\.1"),
        ({"a": {torch.tensor(1), torch.tensor(2)}}, r"x\.a"),
    ],
)
def test_no_tensor_takes_the_name_of_another(value, name):
    with pytest.raises(ValueError, match=name):
        encode(value, "x", {})


def test_other_things_are_named():
    with pytest.raises(ValueError, match=r"x\.a"):
        encode({"a": {torch.tensor(1): 2}}, "x", {})
    with pytest.raises(ValueError, match=r"x\.a\.0"):
        encode({"a": [print_nothing]}, "x", {})


def print_nothing():
    pass
