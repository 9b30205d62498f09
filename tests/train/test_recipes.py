import dataclasses
import sys

import pytest

from meshrec.models import DLRM
from meshrec.train import RECIPES, Ranking, Recipe, SyntheticClicks, resolve
from meshrec.train.recipe_files import full_name

MINE = """
from meshrec.train import resolve
def mine():
    return resolve("synthetic_clicks")
def wrong():
    return 3
"""


@pytest.mark.parametrize("name", list(RECIPES))
def test_recipes_have_their_name_and_run_on_two_ranks(name):
    recipe = resolve(name)
    assert recipe.name == name
    assert RECIPES[name].__doc__
    recipe.check(2)


def test_recipes_of_users(tmp_path, monkeypatch):
    (tmp_path / "recipe_of_mine.py").write_text(MINE)
    assert isinstance(resolve(f"{tmp_path}/recipe_of_mine.py:mine"), Recipe)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert isinstance(resolve("recipe_of_mine:mine"), Recipe)


def test_a_recipe_imports_its_neighbours(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "neighbour_of_mine.py").write_text(MINE)
    (tmp_path / "uses.py").write_text("from neighbour_of_mine import mine\n")
    assert isinstance(resolve(f"{tmp_path}/uses.py:mine"), Recipe)


@pytest.mark.parametrize("name", ["uses.py:mine", "uses:mine"])
def test_a_stray_file_beside_a_recipe_replaces_no_package(tmp_path, monkeypatch, name):
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    for module in ("wave", "uses"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    (tmp_path / "wave.py").write_text("raise SystemExit('the stray file ran')\n")
    (tmp_path / "uses.py").write_text(f"import wave\n{MINE}")
    assert isinstance(resolve(name), Recipe)


def test_faults_of_a_recipe_file_are_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "syntax.py").write_text("\ndef f(:\n")
    with pytest.raises(ValueError, match=f"{tmp_path}.*syntax.py:2"):
        resolve(f"{tmp_path}/syntax.py:f")
    (tmp_path / "lacks.py").write_text("import not_installed_here\n")
    with pytest.raises(ValueError, match="'not_installed_here'"):
        resolve(f"{tmp_path}/lacks.py:f")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"data": SyntheticClicks},
            "'data'.*DataSource.*SyntheticClicks",
        ),
        ({"model": DLRM}, "'model'.*ModelConfig.*DLRM.*ModelConfig"),
        (
            {"training": 3},
            "'synthetic_clicks'.*'training'.*3",
        ),
    ],
)
def test_a_wrong_class_in_a_recipe_names_its_field(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(resolve("synthetic_clicks"), **change)


def test_recipes_that_are_not_there(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    with pytest.raises(ValueError, match=r"'dlmr'.*path/to/file.py"):
        resolve("dlmr")
    with pytest.raises(ValueError, match=r"nowhere/x.py"):
        resolve("nowhere/x.py:f")
    with pytest.raises(ValueError, match="'nowhere'"):
        resolve("nowhere:f")
    with pytest.raises(ValueError, match="'theirs'"):
        resolve(f"{tmp_path}/mine.py:theirs")
    with pytest.raises(ValueError, match="gave 3"):
        resolve(f"{tmp_path}/mine.py:wrong")
    with pytest.raises(ValueError, match="'s'"):
        resolve("json:loads")


def test_a_file_with_one_recipe_is_named_without_it(tmp_path):
    source = "from meshrec.train import RECIPES, Recipe\n\n\ndef helper():\n    pass\n\n\n"
    one = tmp_path / "one.py"
    one.write_text(f"{source}def clicks() -> Recipe:\n    return RECIPES['synthetic_clicks']()\n")
    assert full_name(str(one)) == f"{one}:clicks"
    assert resolve(str(one)).name == "synthetic_clicks"
    two = tmp_path / "two.py"
    two.write_text(f"{source}def a() -> Recipe: ...\n\n\ndef b() -> Recipe: ...\n")
    with pytest.raises(ValueError, match=r"two.py:a or .*two.py:b"):
        resolve(str(two))


def test_chance_patience_is_refused_without_losses_per_sample():
    recipe = resolve("movielens_dlrm")
    training = dataclasses.replace(recipe.training, chance_patience=3)
    dataclasses.replace(recipe, training=training).check(2)
    with pytest.raises(ValueError, match=r"chance_patience is 3.*Ranking"):
        dataclasses.replace(recipe, training=training, loss=Ranking()).check(2)
