from dataclasses import dataclass, field, make_dataclass
from pathlib import Path
from typing import Any, Literal

import pandas as pd
import pytest

from meshrec.cli.arguments import UsageError, Words, option_names, parse


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
    with pytest.raises(UsageError, match="an option cannot hold such a value"):
        parse(kind, ["--train", "x.parquet"], program="meshrec do")


@dataclass(frozen=True, kw_only=True)
class Nested:
    """Does more."""

    options: Options = Options()
    rate: float = 0.1
    words: Words = ()


MORE = "`meshrec do --help` lists its options."


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rate", "x"], "--rate x: give a number, such as 0.01."),
        (["--options.ranks", "x"], "--options.ranks x: give a whole number, such as 4."),
        (["--options.pair", "x"], f"do: --options.pair needs a value: PATH PATH. {MORE}"),
        (["--options.kind", "c"], "--options.kind c: take one of a, b, none."),
        (["--rat", "1"], f"do: there is no option --rat. Did you mean --rate? {MORE}"),
        (["--ranks", "1"], f"do: there is no option --ranks. Did you mean --options.ranks? {MORE}"),
        (["--rankz=1"], f"do: there is no option --rankz. Did you mean --options.ranks? {MORE}"),
        (
            ["--options.no-quik"],
            f"do: there is no option --options.no-quik. Did you mean --options.no-quick? {MORE}",
        ),
        (["--zzz"], f"do: there is no option --zzz. {MORE}"),
        (["zzz"], f"do: 'zzz' is one argument too many. {MORE}"),
    ],
)
def test_mistakes_are_one_line_with_the_remedy(arguments, message):
    with pytest.raises(UsageError) as told:
        parse(Nested, arguments, program="meshrec do")
    assert str(told.value) == message


def test_negative_numbers_are_values():
    assert parse(Nested, ["--rate", "-1e-3"], program="meshrec do").rate == -1e-3


def test_all_options_are_known():
    assert list(option_names(Nested)) == [
        "--options.ranks", "--options.patience", "--options.kind", "--options.pair",
        "--options.quick", "--options.no-quick", "--rate", "--words",
    ]  # fmt: skip


def test_an_empty_default_has_a_name(capsys):
    with pytest.raises(SystemExit):
        parse(Nested, ["--rate", "2", "--help"], program="meshrec do")
    assert "(default: )" not in capsys.readouterr().out
