from dataclasses import dataclass, field, make_dataclass
from pathlib import Path
from typing import Any, Literal

import pandas as pd
import pytest

from meshrec.cli.arguments import Words, parse


@dataclass(frozen=True, kw_only=True)
class Options:
    """Does something."""

    ranks: int | None = None
    """Ranks; if none, all."""
    patience: int | None = 3
    """Evaluations."""
    kind: Literal["a", "b"] | None = None
    """Kind."""
    pair: tuple[Path, Path] | None = None
    """Two files."""
    quick: bool = False
    """Quickly."""


def test_what_may_be_left_out_is_shown_by_its_type(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as ended:
        parse(Options, ["--help"], program="meshrec do")
    assert ended.value.code == 0
    lines = [" ".join(line.strip("│ ").split()) for line in capsys.readouterr().out.splitlines()]
    assert "--ranks INT Ranks; if none, all. (default: none)" in lines
    assert "--kind {a,b,none} Kind. (default: none)" in lines
    assert "--pair PATH PATH Two files. (default: none)" in lines
    assert "--quick, --no-quick Quickly. (default: False)" in lines


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], Options()),
        (["--ranks", "4", "--patience", "none", "--kind", "b"], Options(ranks=4, patience=None, kind="b")),
        (["--patience", "None", "--quick"], Options(patience=None, quick=True)),
        (["--pair", "x", "y"], Options(pair=(Path("x"), Path("y")))),
    ],
)
def test_what_is_read(arguments, expected):
    assert parse(Options, arguments, program="meshrec do") == expected


def test_frames_are_no_options():
    frame = pd.DataFrame({"a": [1]})
    kind = make_dataclass("Data", [("train", Any, field(default_factory=lambda: frame)), ("seed", int, 0)])
    assert parse(kind, ["--seed", "3"], program="meshrec do").train is frame
    with pytest.raises(SystemExit):
        parse(kind, ["--train", "x.parquet"], program="meshrec do")


@dataclass(frozen=True, kw_only=True)
class Nested:
    """Does more."""

    options: Options = Options()
    rate: float = 0.1
    words: Words = ()


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--rate", "x"], ["--rate", "'x'"]),
        (["--options.ranks", "x"], ["--options.ranks", "'x'"]),
        (["--options.pair", "x"], ["--options.pair"]),
        (["--options.kind", "c"], ["--options.kind", "'c'", "'none'"]),
        (["--rat", "1"], ["--rat", "--rate FLOAT"]),
        (["--ranks", "1"], ["--options.ranks"]),
        (["--rankz=1"], ["--rankz"]),
        (["--words"], ["--words"]),
        (["--zzz"], ["--zzz", "meshrec do --help"]),
        (["zzz"], ["zzz"]),
    ],
)
def test_a_mistake_is_named_with_the_nearest_option(arguments, parts, capsys):
    with pytest.raises(SystemExit) as ended:
        parse(Nested, arguments, program="meshrec do")
    assert ended.value.code == 2
    output, errors = capsys.readouterr()
    assert not output
    assert [part for part in parts if part not in errors] == []


def test_negative_numbers_are_values():
    assert parse(Nested, ["--rate", "-1e-3"], program="meshrec do").rate == -1e-3


def test_an_empty_default_has_a_name(capsys):
    with pytest.raises(SystemExit):
        parse(Nested, ["--rate", "2", "--help"], program="meshrec do")
    assert "(default: )" not in capsys.readouterr().out
