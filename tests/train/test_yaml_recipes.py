from dataclasses import replace

import pytest

from meshrec.cli import evaluate, recipe
from meshrec.cli.train import main as train
from meshrec.optim import Adam
from meshrec.runs import load_recipe
from meshrec.train import Frame, RunFolder, resolve
from meshrec.train.recipes import RECIPES
from meshrec.train.yaml_recipes import from_yaml, to_yaml
from tests.train.shop import recipe as shop_recipe
from tests.train.shop import write_shop


def written(path, text):
    path.write_text(text)
    return path


@pytest.mark.parametrize("name", sorted(set(RECIPES) - {"mmoe"}))
def test_a_recipe_is_read_as_it_was_written(name, tmp_path):
    assert from_yaml(written(tmp_path / "r.yaml", to_yaml(resolve(name)))) == resolve(name)


def test_features_are_written_and_read(tmp_path):
    text = to_yaml(shop_recipe())
    assert "type: Vocabulary" in text
    assert "version" not in text
    assert from_yaml(written(tmp_path / "r.yaml", text)) == shop_recipe()


def test_a_run_of_a_yaml_file_trains_resumes_and_is_evaluated(tmp_path, capsys):
    write_shop(tmp_path, 600)
    shop = shop_recipe()
    text = to_yaml(replace(shop, data=replace(shop.data, train=("all.parquet",))))
    path = written(tmp_path / "shop.yaml", text)
    run = RunFolder(tmp_path / "runs" / "a")
    args = ["--runs", str(tmp_path / "runs"), "--name", "a", "--quiet"]
    assert train([str(path), *args]) == 0
    path.unlink()  # the run's config.json holds all of it
    assert load_recipe(run).data.train == (str(tmp_path / "all.parquet"),)
    assert train(["--resume", *args, "--training.epochs", "2"]) == 0
    assert evaluate.main([str(run.path), "--data", str(tmp_path / "all.parquet")]) == 0
    assert "600 rows" in capsys.readouterr().out


def test_the_command_writes_a_file(tmp_path, capsys):
    out = tmp_path / "movies.yaml"
    assert recipe.main(["to-yaml", "movielens_dlrm", "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"to train it: meshrec train {out}\n"
    assert resolve(str(out)) == resolve("movielens_dlrm")
    assert recipe.main(["to-yaml", "movielens_dlrm"]) == 0
    assert capsys.readouterr().out == out.read_text()


SMALL = "name: a\ndata: {type: SyntheticClicks}\nmodel: {type: DLRMConfig}\n"


def test_numbers_are_read_as_people_write_them(tmp_path):
    path = written(tmp_path / "r.yaml", f"{SMALL}tables: {{type: Adam, lr: 1e-3}}\n")
    assert from_yaml(path).tables == Adam(lr=1e-3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: [", "YAML"),
        ("- a", "fields"),
        ("name: a\ndata: {type: SyntheticClicks}", "Recipe"),
        (
            SMALL.replace("DLRMConfig", "DLRMConfg"),
            "DLRMConfg.*DLRMConfig",
        ),
        (SMALL.replace("type: SyntheticClicks", ""), "Parquet"),
        (f"{SMALL}trainig: {{}}", "'trainig'"),
        (f"{SMALL}training: {{epochs: many}}", "'many'"),
        (f"{SMALL}training: {{epochs: 0}}", "training.epochs.*0.*1"),
        (
            "name: a\nmodel: {type: DLRMConfig}\ndata: "
            "{type: Csv, train: [a], features: {labels: [{name: a}]}}",
            "features",
        ),
    ],
)
def test_what_cannot_be_read_is_named(text, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        from_yaml(written(tmp_path / "r.yaml", text))


def test_what_cannot_be_written_is_named():
    with pytest.raises(ValueError, match=r"Tasks.tasks.*YAML"):
        to_yaml(resolve("mmoe"))
    shop = shop_recipe()
    frame = Frame(train=object(), features=shop.data.features)
    with pytest.raises(ValueError, match=r"Frame.train.*YAML"):
        to_yaml(replace(shop, data=frame))
