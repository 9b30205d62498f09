import json
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd
import pytest

from meshrec.data.features import Features, Hashed, Label
from meshrec.optim import Adam
from meshrec.runs import load_recipe
from meshrec.runs.saved_recipe import changed_options, check_data, describe_data, restore_options
from meshrec.train import Frame, MovieLens, Placement, Recipe, RunFolder, Training
from meshrec.train.run_folder import CONFIG, to_json
from tests.train import small as small_module


def saved(recipe):
    return json.loads(json.dumps(to_json(recipe)))


@pytest.mark.parametrize(
    "change",
    [
        {"training": Training(epochs=40, patience=3, clip_norm=0.5)},
        {"tables": Adam(lr=0.7, weight_decay=0.1)},
        {
            "placement": Placement(
                sharding_types=("row_wise", "table_wise"), memory_gib=2, plan=Path("p.json"), sharded=False
            )
        },
    ],
)
def test_a_recipe_is_read_back_as_it_was(small, change):
    was = replace(small(), **change)
    template = replace(small(), **({"tables": Adam(lr=0.1)} if "tables" in change else {}))
    assert restore_options(template, saved(was), "x") == was


def test_what_cannot_be_read_back_is_named(small):
    with pytest.raises(ValueError, match=r"x.data.*SyntheticClicks.*MovieLens"):
        restore_options(replace(small(), data=MovieLens()), saved(small()), "x")
    broken = saved(small())
    broken["training"]["epochs"] = "many"
    with pytest.raises(ValueError, match=r"x.training.epochs.*'many'"):
        restore_options(small(), broken, "x")


@pytest.mark.parametrize("recipe", [None, [], {"type": "Recipe", "data": 5, "placement": {"type": []}}, {}])
def test_a_config_without_a_recipe_is_named(tmp_path, recipe):
    folder = RunFolder(tmp_path)
    folder.write_json(CONFIG, {"source": "sasrec", "recipe": recipe})
    with pytest.raises(ValueError, match=r"config.json: recipe(\.\w+)? (cannot be read back|is )"):
        load_recipe(folder)


@dataclass(frozen=True, kw_only=True)
class Files(MovieLens):
    pass


def test_what_a_run_may_change(small, tmp_path):
    old = small()
    new = replace(old, training=replace(old.training, epochs=9), dense=replace(old.dense, lr=0.5))
    assert changed_options(old, new) == [("dense.lr", 0.01, 0.5), ("training.epochs", 1, 9)]
    for name, other in (
        ("model.embedding_dim", replace(old, model=replace(old.model, embedding_dim=16))),
        ("data.seed", replace(old, data=replace(old.data, seed=1))),
        ("dense.kind", replace(old, dense=replace(old.dense, kind="sgd"))),
        ("tables.type", replace(old, tables=Adam(lr=0.1))),
    ):
        with pytest.raises(ValueError, match=f"{name}"):
            changed_options(old, other)
    here = replace(old, data=MovieLens(path=Path("a")))
    assert changed_options(here, replace(old, data=MovieLens(path=Path("b")))) == [("data.path", "a", "b")]


def test_a_run_knows_its_recipe(small, tmp_path):
    folder = RunFolder(tmp_path)
    with pytest.raises(ValueError, match=r"config.json"):
        load_recipe(folder)
    folder.write_json(
        CONFIG, {"recipe": to_json(small(epochs=7)), "source": f"{small_module.__file__}:small"}
    )
    with pytest.raises(ValueError, match="executed"):
        load_recipe(folder)  # of an earlier release, or of somebody else
    for found in (
        load_recipe(replace(folder, is_trusted=True)),
        load_recipe(folder, f"{small_module.__file__}:small"),
    ):
        assert isinstance(found, Recipe)
        assert found.training.epochs == 7
    folder.write_json(CONFIG, {"recipe": to_json(small())})
    with pytest.raises(ValueError, match="record"):
        load_recipe(folder)


def test_other_data_is_refused(small, tmp_path):
    config = {"data": describe_data(small().data.load())}
    check_data(config, small().data.load(), tmp_path)
    other = replace(small().data, num_samples=999).load()
    with pytest.raises(ValueError, match=r"1000.*999 now"):
        check_data(config, other, tmp_path)


def test_of_tables_in_memory_no_data_is_kept(small):
    frame = pd.DataFrame({"secret": [1, 2]})
    labels, columns = (Label(column="y"),), (Hashed(name="secret", num_embeddings=9),)
    recipe = replace(small(), data=Frame(train=frame, features=Features(labels=labels, features=columns)))
    assert saved(recipe)["data"]["train"] == "DataFrame"
    assert restore_options(recipe, saved(recipe), "recipe").data.train is frame
    assert not changed_options(recipe, restore_options(recipe, saved(recipe), "recipe"))
