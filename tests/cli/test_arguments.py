from dataclasses import dataclass, field, make_dataclass
from pathlib import Path
from typing import Any, Literal

import pandas as pd
import pytest

from meshrec.cli.arguments import parse


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


def test_frames_are_no_options(capsys):
    frame = pd.DataFrame({"a": [1]})
    kind = make_dataclass("Data", [("train", Any, field(default_factory=lambda: frame)), ("seed", int, 0)])
    assert parse(kind, ["--seed", "3"], program="meshrec do").train is frame
    with pytest.raises(SystemExit):
        parse(kind, ["--train", "x.parquet"], program="meshrec do")
    assert "no option can say this" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "x"], "Error parsing --ranks: invalid literal for int() with base 10: 'x'"),
        (["--pair", "x"], "Missing value for argument '--pair'. Expected 2 values."),
        (["--kind", "c"], "invalid choice 'c' for argument '--kind'"),
    ],
)
def test_mistakes_are_told_without_the_word_for_nothing(capsys, arguments, message):
    with pytest.raises(SystemExit) as ended:
        parse(Options, arguments, program="meshrec do")
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert message in told
    assert "NoneType" not in told
