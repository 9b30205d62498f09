"""Every mistake gets one line, and what the line leads to works."""

import os
import random
import sys

import numpy as np
import pyarrow as pa
import pyarrow.csv as csv
import pyarrow.parquet as pq
import pytest

from meshrec.cli.__main__ import main
from tests.cli.mistakes import MISTAKES

NUM = int(os.environ.get("MESHREC_MISTAKES", "40"))
"""So many mistakes are drawn from the list, and the remedies of every tenth are run; all take two minutes."""
DRAWN = random.Random(1).sample(MISTAKES, min(NUM, len(MISTAKES)))


def clicks(num: int = 800) -> pa.Table:
    rng = np.random.default_rng(0)
    users = rng.integers(0, 20, num)
    return pa.table(
        {
            "user": [f"u{user}" for user in users],
            "item": rng.integers(0, 30, num),
            "country": rng.choice(["de", "fr"], num),
            "when": np.arange(num) + 1_600_000_000,
            "clicked": (rng.random(num) < 0.2 + 0.6 * (users % 2)).astype(int),
        }
    )


def type_in(words, folder):
    """Return the exit code of a command that is typed in a folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "argv", ["meshrec", *words])
        try:
            return main()
        except SystemExit as ended:  # of a help
            return ended.code


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mistakes")
    table = clicks()
    csv.write_csv(table, folder / "clicks.csv")
    pq.write_table(table, folder / "clicks.parquet")
    csv.write_csv(table.drop_columns(["user"]), folder / "other.csv")
    csv.write_csv(table.drop_columns(["clicked"]).slice(0, 50), folder / "new.csv")
    csv.write_csv(table.slice(0, 50), folder / "bad.csv")
    lines = (folder / "bad.csv").read_text().splitlines()
    lines[7] = lines[7].rpartition(",")[0] + ","
    (folder / "bad.csv").write_text("\n".join(lines))
    (folder / "text.txt").write_text("not a table")
    csv.write_csv(table.drop_columns(["clicked"]).slice(0, 2), folder / "users.csv")
    for command in (
        "inspect clicks.csv --label clicked --time when",
        "recipe to-yaml recipe.py:recipe --out recipe.yaml",
        "train recipe.py:recipe --quiet --training.epochs 1 --name a",
        "export a --out pack --no-compile",
        "plan recipe.py:recipe --ranks 2 --out plan.json",
        "inspect clicks.csv --user user --item item --time when --out log.py",
        "train log.py:recipe --quiet --training.max-steps 2 --name s",
    ):
        assert type_in(command.split(), folder) == 0, command
    return folder


def test_the_list_is_long():
    assert len(MISTAKES) >= 80
    assert len({each.typed for each in MISTAKES}) == len(MISTAKES)


@pytest.mark.parametrize("mistake", DRAWN, ids=lambda mistake: mistake.typed)
def test_a_mistake_gets_one_line_or_tyros_box(mistake, folder, capfd, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert type_in(mistake.words, folder) in (1, 2)
    output, errors = capfd.readouterr()
    assert not output
    if errors.startswith("╭"):
        assert errors.count("╭") == 1
    else:
        assert errors.startswith("meshrec: ")
        assert errors.count("\n") == 1
    assert mistake.said in errors


REMEDIES = sorted({each.remedy for each in DRAWN[:: 1 if len(MISTAKES) <= NUM else 10]})


@pytest.mark.parametrize("remedy", REMEDIES)
def test_the_remedy_works(remedy, folder):
    assert type_in(remedy.split(), folder) == 0
