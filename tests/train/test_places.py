from pathlib import Path

import pyarrow.csv as csv
import pytest

from meshrec.cli import inspect
from meshrec.cli.train import main as train
from meshrec.runs.saved_recipe import load_recipe
from meshrec.train import RunFolder, resolve
from tests.train.shop import shop

RECIPE = """
from pathlib import Path
from meshrec.data.features import Features, Hashed, Label
from meshrec.train import DLRMConfig, MovieLens, Parquet, Placement, Recipe, Training

FEATURES = Features(labels=(Label(column="clicked"),), features=(Hashed(name="city", num_embeddings=9),))


def files() -> Recipe:
    data = Parquet(train=("data/a.parquet", "s3://bucket/b", "/c"), test=("*.csv",), features=FEATURES)
    return Recipe(
        name="files", data=data, model=DLRMConfig(), placement=Placement(plan=Path("plan.json"))
    )


def movies() -> Recipe:
    return Recipe(name="movies", data=MovieLens(path=Path("ml-100k")), model=DLRMConfig())
"""


def test_relative_paths_start_at_the_recipes_file(tmp_path, monkeypatch):
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "r.py").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    here = tmp_path / "recipes"
    recipe = resolve("recipes/r.py:files")
    assert recipe.data.train == (f"{here}/data/a.parquet", "s3://bucket/b", "/c")
    assert recipe.data.validation is None
    assert recipe.data.test == (f"{here}/*.csv",)
    assert recipe.placement.plan == here / "plan.json"
    assert resolve("recipes/r.py:movies").data.path == here / "ml-100k"
    assert resolve("movielens_dlrm").data.path is None


def test_a_proposed_recipe_trains_and_resumes_from_any_folder(tmp_path, monkeypatch, capsys):
    for name in ("data", "recipes", "other"):
        (tmp_path / name).mkdir()
    csv.write_csv(shop(400).drop_columns(["tags"]), tmp_path / "data" / "all.csv")
    monkeypatch.chdir(tmp_path)
    args = ["data/all.csv", "--label", "clicked", "--out", "recipes/shop.py"]
    assert inspect.main(args) == 0
    assert '"../data/all.csv"' in Path("recipes/shop.py").read_text()
    monkeypatch.chdir(tmp_path / "other")
    few = ["--training.max-steps", "6", "--quiet", "--name", "a"]
    assert train(["../recipes/shop.py:recipe", *few]) == 0
    monkeypatch.chdir(tmp_path)
    run = RunFolder(Path("other/runs/a"))
    assert Path(load_recipe(run).data.train[0]).samefile("data/all.csv")
    # The same data under another name may take its place; an option is relative to where it is typed.
    Path("data").rename("moved")
    more = ["--resume", "--name", "a", "--runs", "other/runs", "--training.max-steps", "7", "--quiet"]
    with pytest.raises(ValueError, match=r"data/all.csv"):
        train(more)
    capsys.readouterr()
    assert train([*more, "--data.train", "moved/all.csv"]) == 0
    assert "-> ['moved/all.csv']" in capsys.readouterr().out
