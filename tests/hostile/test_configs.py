"""Damaged and crafted configs of runs: a recipe is read back as it was, or the error says what to do."""

import json
import random

import pytest

from meshrec.runs import load_recipe
from meshrec.train import RECIPES, resolve
from meshrec.train.run_folder import CONFIG, RunFolder, to_json
from tests.hostile.damage import NUMBER, Tally, crafted, harm, number

SOURCE = "movielens_dlrm"
LONG, HUGE = "a" * 10_000, 10**4000


@pytest.fixture
def run(tmp_path):
    folder, recipe = RunFolder(tmp_path), to_json(resolve(SOURCE))
    folder.write_json(CONFIG, {"source": SOURCE, "code": None, "recipe": recipe, "ranks": 2}, seal=True)
    return folder


def check(run, *, may_differ=False):
    """``may_differ``: there is no checksum, so a value that its field can have is taken for the run's."""
    try:
        found = load_recipe(run)
    except ValueError as error:
        assert may_differ or CONFIG in str(error) or "name the recipe" in str(error)  # noqa: PT017
        assert len(str(error)) < 2000  # noqa: PT017
    else:
        assert may_differ or found == resolve(SOURCE)


def test_damaged_configs(run):
    tally, draw = Tally("damaged configs of runs"), random.Random(41)
    for _ in range(number(60)):
        what, mend = harm(run.path / CONFIG, draw)
        tally.attempt(what, lambda: check(run))
        mend()
    check(run)
    tally.finish()


@pytest.mark.parametrize("sealed", [True, False])
def test_crafted_configs(run, sealed):
    tally = Tally("crafted configs of runs" + ("" if sealed else ", without a checksum"))
    draw, path = random.Random(42), run.path / CONFIG
    said = json.loads(path.read_bytes())
    if not sealed:
        del said["crc32"]
    for _ in range(number(60)):
        what, changed = crafted(said, draw)
        path.write_text(json.dumps(changed))
        may_differ = not (isinstance(changed, dict) and "crc32" in changed)
        tally.attempt(what, lambda may_differ=may_differ: check(run, may_differ=may_differ))
    tally.finish()


@pytest.mark.parametrize("source", ["avazu", "sasrec"] if not NUMBER else sorted(RECIPES))
def test_errors_do_not_repeat_huge_values(tmp_path, source):
    """Each value of a config becomes a huge one; the error must still fit on a screen."""
    folder, recipe = RunFolder(tmp_path), to_json(resolve(source))
    for name, place in leaves(recipe):
        for huge in (LONG, [LONG], {LONG: 1}, HUGE, f"int8,{LONG}:fp32", f"{LONG}/fp16"):
            changed = json.loads(json.dumps(recipe))
            place(changed)[name] = huge
            said = {"source": source, "code": None, "recipe": changed, "ranks": 2}
            (tmp_path / CONFIG).write_text(json.dumps(said))
            try:
                load_recipe(folder)
            except ValueError as error:
                assert len(str(error)) < 2000, (name, str(error)[:200])  # noqa: PT017


def leaves(value, place=lambda changed: changed):
    """The keys of values that are neither lists nor objects, each with what finds its parent in a copy."""
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        if isinstance(inner, dict | list):
            yield from leaves(inner, lambda changed, place=place, key=key: place(changed)[key])
        else:
            yield key, place
