import dataclasses
import sys

import pytest

from meshrec.models import DLRM
from meshrec.train import RECIPES, Recipe, SyntheticClicks, resolve

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


def test_faults_of_a_recipe_file_are_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "syntax.py").write_text("\ndef f(:\n")
    with pytest.raises(ValueError, match=rf"{tmp_path}/syntax.py:2: invalid syntax. Fix this line"):
        resolve(f"{tmp_path}/syntax.py:f")
    (tmp_path / "lacks.py").write_text("import not_installed_here\n")
    with pytest.raises(ValueError, match=r"no module 'not_installed_here', neither installed nor in"):
        resolve(f"{tmp_path}/lacks.py:f")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"data": SyntheticClicks},
            r"field 'data' must be a DataSource, got the class SyntheticClicks. Write",
        ),
        ({"model": DLRM}, r"field 'model' must be a ModelConfig, got the class DLRM. Give a ModelConfig"),
        (
            {"training": 3},
            r"recipe 'synthetic_clicks': its field 'training' must be a Training, got 3",
        ),
    ],
)
def test_a_wrong_class_in_a_recipe_names_its_field(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(resolve("synthetic_clicks"), **change)


def test_recipes_that_are_not_there(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    with pytest.raises(ValueError, match=r"there is no recipe 'dlmr'; there are .*Your own: path/to/file.py"):
        resolve("dlmr")
    with pytest.raises(ValueError, match=r"recipe file nowhere/x.py does not exist"):
        resolve("nowhere/x.py:f")
    with pytest.raises(ValueError, match=r"there is no module 'nowhere'"):
        resolve("nowhere:f")
    with pytest.raises(ValueError, match=r"has no function 'theirs'"):
        resolve(f"{tmp_path}/mine.py:theirs")
    with pytest.raises(ValueError, match=r"wrong\(\) gave 3; it must return a"):
        resolve(f"{tmp_path}/mine.py:wrong")
    with pytest.raises(ValueError, match=r"loads\(\) cannot be called without arguments \(missing .* 's'"):
        resolve("json:loads")
