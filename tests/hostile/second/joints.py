"""Damages at the joints of a file: where one part of it ends and the next begins.

Written apart from `tests.hostile.damage`, which draws places anywhere in a file.
"""

import json
import random
import re
import struct
from collections.abc import Iterator

_ZIP_MARKS = {b"PK\x03\x04": 30, b"PK\x01\x02": 46, b"PK\x05\x06": 22, b"PK\x06\x06": 56, b"PK\x06\x07": 20}
_PAGE = 4096
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?|true|false|null|[{}\[\]:,]|\s+')


def joints(content: bytes) -> list[int]:
    """Offsets where parts of a file meet: of safetensors, zip archives, lines, JSON, pages."""
    found = {0, len(content), len(content) // 2, *range(0, len(content), _PAGE)}
    found.update(_of_safetensors(content))
    for mark, size in _ZIP_MARKS.items():
        for match in re.finditer(re.escape(mark), content):
            found.update(range(match.start(), match.start() + size, 2))
    if b"\0" not in content:
        found.update(match.start() for match in re.finditer(rb'[\n {}\[\]:,"]', content))
    return sorted(at for at in found if at <= len(content))


def _of_safetensors(content: bytes) -> Iterator[int]:
    if len(content) < 9 or content[8:9] != b"{":
        return
    begin = 8 + struct.unpack("<Q", content[:8])[0]
    if begin > len(content):
        return
    yield from (*range(9), begin)
    for name, about in json.loads(content[8:begin]).items():
        if name != "__metadata__":
            yield from (begin + offset for offset in about["data_offsets"])


def broken(content: bytes, other: bytes, draw: random.Random) -> tuple[str, bytes]:
    """Break a file at its joints.

    Args:
        content: a sound file.
        other: the file of this name in another sound folder.
        draw: the source of randomness.

    Returns:
        What was done, and a content that differs from the sound one.
    """
    own, its = joints(content), joints(other)
    while True:
        begin, end = sorted(draw.choices(own, k=2))
        kind = draw.choice(_KINDS)
        changed = _BREAKS[kind](content, other, begin, end, its, draw)
        if changed != content:
            return f"{kind} {begin}-{end} of {len(content)}", changed


def _flip(content, _, begin, end, its, draw):
    at = min(max(0, begin + draw.randint(-1, 1)), len(content) - 1)
    return content[:at] + bytes([content[at] ^ 1 << draw.randrange(8)]) + content[at + 1 :]


def _spliced(content, other, begin, end, its, draw):
    return content[:begin] + other[draw.choice(its) :]


def _transplanted(content, other, begin, end, its, draw):
    return content[:begin] + other[begin:end] + content[end:]


def _number_changed(content, _, begin, end, its, draw):
    """Write another number of 2, 4 or 8 bytes, as sizes and offsets are."""
    size = draw.choice([2, 4, 8])
    number = draw.choice([0, 1, 1 << 15, (1 << 16) - 1, (1 << 31) - 1, (1 << 32) - 1, (1 << 63) - 1])
    return content[:begin] + number.to_bytes(8, "little")[:size] + content[begin + size :]


_BREAKS = {
    "flip": _flip,
    "cut": lambda content, _, begin, *__: content[: begin and begin - 1] or b"x",
    "begin cut off": lambda content, _, begin, *__: content[begin:] or b"x",
    "part left out": lambda content, _, begin, end, *__: content[:begin] + content[end:],
    "part twice": lambda content, _, begin, end, *__: content[:end] + content[begin:],
    "part of ones": lambda content, _, begin, end, *__: (
        content[:begin] + b"\xff" * (end - begin) + content[end:]
    ),
    "part turned round": lambda content, _, begin, end, *__: (
        content[:begin] + content[begin:end][::-1] + content[end:]
    ),
    "a byte more": lambda content, _, begin, *__: content[:begin] + b"\n" + content[begin:],
    "spliced": _spliced,
    "transplanted": _transplanted,
    "both": lambda content, other, *_: content + other,
    "other folder's": lambda content, other, *_: other,
    "number": _number_changed,
}
_KINDS = ["flip"] * 8 + list(_BREAKS)

_NUMBERS = ["-0", "1e0", "1.0", "0.1e1", "1e400", "-1e400", "NaN", "-Infinity", "00", "0x1", "1_0"]
_NUMBERS += [str(n) for n in (-1, 2**31, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1, 10**40)]
_TEXTS = ['""', '"\\u0000"', '"\\ud800"', '"."', '".."', '"../x"', '"a/b"', '"' + "é" * 300 + '"', '"\\/"']


def rewritten(text: str, draw: random.Random) -> tuple[str, str]:
    """Rewrite a JSON text token by token, so that its grammar or one of its values changes."""
    tokens = _TOKEN.findall(text)
    assert "".join(tokens) == text, "not all of the text is JSON"
    while True:
        kind = draw.choice(sorted(_REWRITES))
        places = [at for at, token in enumerate(tokens) if _kind_of(token) == kind.split()[0]]
        if not places:
            continue
        at = draw.choice(places)
        changed = list(tokens)
        _REWRITES[kind](changed, at, places, draw)
        if changed != tokens:
            said = "".join(changed[max(0, at - 3) : at + 4])
            return f"{kind}: {said[:60]!r}", "".join(changed)


def _kind_of(token: str) -> str:
    if token[0] == '"':
        return "text"
    if token[0] in "-0123456789":
        return "number"
    return {"true": "word", "false": "word", "null": "word"}.get(token, token if token.strip() else "space")


def _replace(choices):
    def replace(tokens, at, _, draw):
        tokens[at] = draw.choice(choices)

    return replace


def _exchange(tokens, at, places, draw):
    other = draw.choice(places)
    tokens[at], tokens[other] = tokens[other], tokens[at]


def _repeat(tokens, at, _, draw):
    tokens[at : at + 1] = [tokens[at], ",", tokens[at]] if tokens[at] != "," else [",", ","]


def _around(before, after):
    def around(tokens, at, _, draw):
        tokens[at] = before + tokens[at] + after

    return around


def _drop(tokens, at, _, draw):
    del tokens[at]


def _close(number):
    closing = {"[": "]", "{": "}"}

    def empty(tokens, at, _, draw):
        """Take the content away from a list or object."""
        depth, end = 0, at
        for end in range(at, len(tokens)):
            depth += (tokens[end] in closing) - (tokens[end] in closing.values())
            if not depth:
                break
        tokens[at + 1 : end] = tokens[at + 1 : end] * number

    return empty


_REWRITES = {
    "number other": _replace(_NUMBERS),
    "number exchanged": _exchange,
    "number in a list": _around("[", "]"),
    "number as text": _around('"', '"'),
    "number twice": _repeat,
    "number longer": _around("", "0"),
    "text other": _replace(_TEXTS),
    "text exchanged": _exchange,
    "text in a list": _around("[", "]"),
    "text in an object": _around('{"x":', "}"),
    "text twice": _repeat,
    "word other": _replace(["true", "false", "null", "0", '"x"', "[]", "{}", "nil"]),
    "[ emptied": _close(0),
    "[ doubled": _close(2),
    "{ emptied": _close(0),
    "{ doubled": _close(2),
    ", dropped": _drop,
    ", twice": _repeat,
    ": dropped": _drop,
    "] dropped": _drop,
}
