import sys

import pytest

from meshrec.train import RECIPES, Recipe, resolve

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
