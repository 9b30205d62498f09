import pytest

from meshrec.cli.recipe_help import recipe_help
from meshrec.cli.train import TrainOptions
from meshrec.train import RECIPES, resolve

SCREEN = 52


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_the_help_of_a_recipe_is_one_screen(name):
    lines = recipe_help(f"meshrec train {name}", resolve(name), TrainOptions, summary="Train.").splitlines()
    assert len(lines) <= SCREEN
    assert max(map(len, lines)) <= 100
    text = "\n".join(lines)
    for word in ("--nproc", "--training.epochs", "--placement.plan", "--help-all", "--training.no-pipeline"):
        assert word in text
