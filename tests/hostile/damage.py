"""Damages drawn at random, and a count of how the code held.

``MESHREC_HOSTILE=1000`` draws that many of each kind in place of some dozens; a file that is named in
``MESHREC_HOSTILE_TABLE`` gets a line of JSON for each test: what was tried, how often it held, what failed.
"""

import contextlib
import json
import os
import random
import shutil
import signal
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

NUMBER = int(os.environ.get("MESHREC_HOSTILE") or 0)
_TABLE = os.environ.get("MESHREC_HOSTILE_TABLE")


def number(small: int) -> int:
    """How many damages to draw: ``small`` in the usual tests."""
    return NUMBER or small


class Tally:
    """Tries attacks one by one, each with a deadline, and counts those that the code held against.

    Args:
        what: the row of the table.
        seconds: how long an attack may take.
    """

    def __init__(self, what: str, seconds: float = 60.0) -> None:
        self.what, self.tried, self._seconds = what, 0, seconds
        self.failures: list[str] = []

    def attempt(self, attack: str, check: Callable[[], None]) -> None:
        """Call ``check``; whatever it raises is a failure, and so is taking too long."""
        self.tried += 1
        try:
            with deadline(self._seconds):
                check()
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            self.failures.append(f"{attack}: {type(error).__name__}: {error}")

    def finish(self) -> None:
        """Write the row, and fail where an attack succeeded."""
        if _TABLE:
            row = {
                "what": self.what,
                "tried": self.tried,
                "held": self.tried - len(self.failures),
                "failed": len(self.failures),
                "failures": self.failures[:20],
            }
            with open(_TABLE, "a") as file:
                file.write(json.dumps(row) + "\n")
        assert self.tried
        assert not self.failures, "\n".join([f"{len(self.failures)} failed:", *self.failures[:20]])


class Late(BaseException):
    """The time is up. No OSError, as TimeoutError is one: what is under attack may catch these."""


@contextlib.contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Raise `Late` in the main thread when the content takes longer."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def late(*_: object) -> None:
        raise Late(f"still busy after {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def harm(path: Path, draw: random.Random) -> tuple[str, Callable[[], None]]:
    """Damage a file in a way that is drawn; give the damage's name, and what mends it."""
    content = path.read_bytes()

    def mend() -> None:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
        path.write_bytes(content)

    rare = ["longer", "space", "zeros", "empty", "missing", "swap"]
    rare += ["pipe", "folder", "socket", "endless", "circle", "hole"]
    kind = draw.choice(["flip"] * 6 + ["cut"] * 2 + rare)
    place = draw.randrange(max(1, len(content)))
    harmed: bytes | None = None
    if kind == "flip" and content:
        bit = 1 << draw.randrange(8)
        harmed = content[:place] + bytes([content[place] ^ bit]) + content[place + 1 :]
    elif kind == "cut":
        harmed = content[:place]
    elif kind == "longer":
        harmed = content + draw.randbytes(draw.choice([1, 8, 4096]))
    elif kind == "space":
        harmed = content + b" "
    elif kind == "zeros":
        length = draw.choice([1, 64, 4096])
        harmed = content[:place] + bytes(len(content[place : place + length])) + content[place + length :]
    elif kind == "swap":
        other = draw.randrange(max(1, len(content)))
        changed = bytearray(content)
        if changed:
            changed[place], changed[other] = changed[other], changed[place]
        harmed = bytes(changed)
    path.unlink()
    if harmed is not None:
        path.write_bytes(harmed)
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "socket":
        os.mknod(path, stat.S_IFSOCK | 0o600)
    elif kind == "endless":
        path.symlink_to("/dev/zero")
    elif kind == "circle":
        path.symlink_to(path.name)
    elif kind == "hole":
        with path.open("wb") as file:
            file.truncate(1 << 42)
    elif kind in ("empty", "flip"):
        path.write_bytes(b"")
    return f"{kind} at {place} of {path.name}", mend


_STRANGE = [
    *(None, True, False, 0, 1, -1, 2**31, 2**62, 2**63, 2**64, 10**30, 0.5, 1e300, -0.0, float("nan")),
    *(
        "",
        "x",
        "0" * 64,
        "../x",
        "/etc/passwd",
        "\0",
        "a" * 10_000,
        "F64",
        "U8",
        "float16",
        "uint8",
        "model.x",
    ),
    *([], [[]], [-1], [2**62] * 3, [0] * 100, {}, {"__tensor__": "x"}, {"__tuple__": 3}, {"a": {"a": {}}}),
]


def crafted(said: Any, draw: random.Random) -> tuple[str, Any]:
    """Change one value of a JSON document in a way that is drawn; give the change's name and the result."""
    places = list(_places(said, ()))
    changed = json.loads(json.dumps(said))
    place, other = draw.choice(places), draw.choice(places)
    kind = draw.choice(
        ["strange"] * 3 + ["near"] * 3 + ["drop", "repeat", "copy", "exchange", "rename", "deep"]
    )
    value = _at(changed, place)
    if not place or (kind == "near" and not isinstance(value, int | str | list)):
        kind = "strange"
    elif kind == "exchange" and (place[: len(other)] == other or other[: len(place)] == place):
        kind = "copy"  # one lies within the other
    parent, key = (_at(changed, place[:-1]), place[-1]) if place else ([changed], 0)
    new = draw.choice(_STRANGE)
    if kind == "near":
        new = _near(value, draw)
    elif kind in ("copy", "exchange"):
        new = json.loads(json.dumps(_at(said, other)))
    elif kind == "deep":
        new = json.loads("[" * 500 + "]" * 500)
    if kind == "drop":
        del parent[key]
    elif kind == "repeat" and isinstance(parent, list):
        parent.insert(key, value)
    elif kind == "repeat":
        parent[f"{key}'"] = value
    elif kind == "rename" and isinstance(parent, dict):
        parent[draw.choice([f"{key}'", key[1:], "", "__metadata__", "random"])] = parent.pop(key)
    else:
        parent[key] = json.loads(json.dumps(new))
        if kind == "exchange":
            _at(changed, other[:-1])[other[-1]] = value
    return f"{kind} {_short(new)} at {'/'.join(map(str, place))}", changed if place else parent[0]


def _at(said: Any, place: tuple[Any, ...]) -> Any:
    for step in place:
        said = said[step]
    return said


def _near(value: Any, draw: random.Random) -> Any:
    if isinstance(value, list):
        return draw.choice(
            [value[::-1], value[1:], value[:-1], [*value, *value[-1:]], sorted(value, key=str)]
        )
    if isinstance(value, str):
        return draw.choice([value[::-1], value[1:], value + "0", value.upper(), value.replace("0", "1")])
    return draw.choice([value + 1, value - 1, value * 2, value // 2, -value, value + 8, value + 4096])


def _places(said: Any, above: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    yield above
    pairs = said.items() if isinstance(said, dict) else enumerate(said) if isinstance(said, list) else ()
    for key, value in pairs:
        yield from _places(value, (*above, key))


def _short(value: Any) -> str:
    said = repr(value)
    return said if len(said) < 60 else said[:57] + "..."
