import json

import pytest

from meshrec.durable import DamageError, sealed, unsealed
from meshrec.durable.sealed import (
    check_fields,
    check_integer,
    check_integers,
    check_list,
    check_names,
    check_object,
    check_string,
    parse_json,
)

SAID = {"a": 1, "b": [0.1, None, "é"], "c": {"z": 1, "y": -2}}


def test_there_and_back():
    assert unsealed(sealed(SAID), "it", required=True) == SAID
    assert unsealed(json.dumps(SAID).encode(), "it", required=False) == SAID
    assert parse_json(b'["\\ud83d\\ude00 \\ud7ff"]', "it") == ["\U0001f600 \ud7ff"]
    reordered = dict(reversed(json.loads(sealed(SAID)).items()))
    assert unsealed(json.dumps(reordered).encode(), "it", required=True) == SAID


def test_every_flipped_bit_is_seen_or_changes_nothing():
    content = sealed(SAID)
    for place in range(8 * len(content)):
        damaged = bytearray(content)
        damaged[place // 8] ^= 1 << (place % 8)
        try:
            assert unsealed(bytes(damaged), "it", required=True) == SAID
        except DamageError:
            continue


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "JSON"),
        (b"[1]", "JSON"),
        (b'{"a": 1, "a": 2}', "twice"),
        (b'{"a": "\\ud800"}', "JSON"),
        (b'{"\\uDFff": 1}', "JSON"),
        (b"\xff", "JSON"),
        (b"[" * 100_000, "JSON"),
        (b"9" * 5000, "JSON"),
        (b'{"a": 1}', "checksum"),
        (b'{"a": 1, "crc32": "1"}', "checksum"),
    ],
)
def test_what_is_none_is_told(content, reason):
    with pytest.raises(DamageError, match=reason):
        unsealed(content, "it", required=True)


@pytest.mark.parametrize(
    "check",
    [
        lambda: check_integer(True, "x"),
        lambda: check_integer(1.0, "x"),
        lambda: check_integer(-1, "x"),
        lambda: check_integer(1 << 63, "x"),
        lambda: check_integer(5, "x", 0, 4),
        lambda: check_string(1, "x"),
        lambda: check_string("c", "x", allowed=["a", "b"]),
        lambda: check_list("ab", "x"),
        lambda: check_list([1], "x", 2),
        lambda: check_names(["a", "a"], "x"),
        lambda: check_integers([1, -1], "x"),
        lambda: check_fields({"a": 1}, "x", ["a", "b"]),
        lambda: check_fields({"a": 1, "c": 1}, "x", ["a"], ["b"]),
        lambda: check_fields([], "x", []),
        lambda: check_object([], "x"),
    ],
)
def test_other_kinds_are_damage(check):
    with pytest.raises(DamageError):
        check()


def test_what_is_right_is_given():
    assert check_integer(4, "x", 4, 4) == 4
    assert check_string("a", "x", allowed=["a"]) == "a"
    assert (check_list([1], "x", 1), check_names(["a"], "x"), check_integers([1, 2], "x")) == (
        [1],
        ["a"],
        (1, 2),
    )
    assert check_fields({"a": 1, "b": 2}, "x", ["a"], ["b"]) == {"a": 1, "b": 2}
    assert check_object({}, "x") == {}
    assert parse_json(b"[NaN]", "x")
