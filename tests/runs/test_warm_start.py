"""Runs that start from the weights, optimizer state and vocabularies of another run."""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from meshrec.checkpoint import find_checkpoint, read_manifest
from meshrec.checkpoint.reading import read_rows
from meshrec.cli.train import main as train
from meshrec.data.features import Features, Hashed, Label, Number, Vocabulary
from meshrec.optim import SGD, Adam
from meshrec.runs.fitting import features_of
from meshrec.runs.job import Job
from meshrec.runs.worker import run_rank
from meshrec.train import DenseOptimizer, Log, Placement, Recipe, SASRecConfig, WideDeepConfig
from meshrec.train.losses import NextItem
from meshrec.train.observers import Reported
from meshrec.train.run_folder import CONFIG, SUMMARY, RunFolder, finished_refit
from tests.train import raw_ids, shop
from tests.train.raw_ids import write_visits

BIASED = "sparse_arch.embedding_bag_collection.embedding_bags"


def quiet(_):
    return lambda event: None


def trained(recipe, folder, name="new", **options):
    job = Job(recipe=recipe, runs=folder, name=name, device="cpu", source="recipe.yaml", **options)
    return run_rank(job, quiet)


def warm_started(recipe, folder, earlier):
    return trained(recipe, folder, warm_start=earlier)


def read(run, **selection):
    """Every tensor of a checkpoint by name, and the optimizers' values that are no tensors."""
    folder = find_checkpoint(run.path, **selection)
    manifest = read_manifest(folder)
    tensors = {
        name: read_rows(folder, manifest, name, (0, record.shape[0] if record.shape else 1))
        for name, record in manifest.tensors.items()
        if not name.startswith("random")
    }
    return tensors, {name: manifest.values[name] for name in ("table_optimizer", "dense_optimizer")}


def untrained(recipe, **changes):
    """The recipe for a run that ends before its first step, with the weights it has then."""
    return replace(recipe, training=replace(recipe.training, end_step=0), **changes)


def shop_recipe(folder, table, *, features=shop.FEATURES, **changes) -> Recipe:
    path = folder / f"{len(list(folder.glob('*.parquet')))}.parquet"
    pq.write_table(table, path)
    recipe = shop.recipe()
    return replace(recipe, data=replace(recipe.data, train=(str(path),), features=features), **changes)


@pytest.fixture(scope="module")
def yesterday(tmp_path_factory):
    """Return the recipe and the folder of a finished run. Tests do not change it."""
    folder = tmp_path_factory.mktemp("yesterday")
    recipe = shop_recipe(folder, shop.shop(900))
    trained(recipe, folder, "r")
    return recipe, RunFolder(folder / "r")


@pytest.mark.parametrize(("num_ranks", "kind"), [(1, None), (2, "column_wise"), (2, "row_wise")])
def test_weights_and_state_are_those_of_the_run_under_any_plan(ranks, tmp_path, yesterday, num_ranks, kind):
    recipe, earlier = yesterday
    placement = Placement(sharding_types=None if kind is None else (kind,), min_partition=4)
    again = untrained(recipe, placement=placement)
    if num_ranks == 1:
        trained(again, tmp_path, warm_start=earlier)
    else:
        ranks(num_ranks).run(warm_started, again, tmp_path, earlier)
    assert_equal(read(RunFolder(tmp_path / "new"), last=True), read(earlier, last=True))


def assert_equal(found, expected):
    (tensors, values), (earlier_tensors, earlier_values) = found, expected
    assert tensors.keys() == earlier_tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(tensor, earlier_tensors[name]), name
    for name, value in values.items():
        assert value["content"]["state"] == earlier_values[name]["content"]["state"]


def test_hashed_tables_continue(ranks, tmp_path):
    write_visits(tmp_path, 600)
    recipe = raw_ids.recipe()
    recipe = replace(recipe, data=replace(recipe.data, train=(str(tmp_path / "all.parquet"),)))
    trained(recipe, tmp_path, "r")
    earlier = RunFolder(tmp_path / "r")
    ranks(2).run(warm_started, untrained(recipe), tmp_path, earlier)
    assert_equal(read(RunFolder(tmp_path / "new"), last=True), read(earlier, last=True))


def today(num=900):
    """Rows with users and tags that yesterday's rows did not have, and without other users."""
    table = shop.shop(num, seed=1)
    users = [f"user-{int(user.removeprefix('user-')) + 20}" for user in table["user"].to_pylist()]
    table = table.set_column(table.column_names.index("user"), "user", pa.array(users))
    return table.append_column("shop", pa.array(np.arange(num) % 5))


def test_values_keep_their_rows_and_new_values_and_features_start(tmp_path, yesterday):
    _, earlier = yesterday
    kept = tuple(feature for feature in shop.FEATURES.features if feature.name != "hour")
    added = (Hashed(name="shop", num_embeddings=8), Number(name="shops", column="shop"))
    features = replace(shop.FEATURES, features=(*kept, *added))
    lines = []
    summary = trained(
        untrained(shop_recipe(tmp_path, today(), features=features)),
        tmp_path,
        warm_start=earlier,
        on_event=lambda event: lines.append(event.text) if isinstance(event, Reported) else None,
    )
    before, now = features_of(earlier), features_of(RunFolder(tmp_path / "new"))
    num_before = len(before["user"].vocabulary)
    assert now["user"].vocabulary[:num_before].equals(before["user"].vocabulary)
    assert {f"user-{user}" for user in range(40, 60)} <= set(now["user"].vocabulary[num_before:].to_pylist())
    assert now["price"] == before["price"]  # the same mean: the dense weights are for it
    tensors, _ = read(RunFolder(tmp_path / "new"), last=True)
    old, _ = read(earlier, last=True)
    user = f"model.{BIASED}.user.weight"
    assert len(tensors[user]) == len(old[user]) + len(now["user"].vocabulary) - num_before
    assert torch.equal(tensors[user][: len(old[user])], old[user])
    assert tensors[user][len(old[user]) :].abs().min() > 0  # initial values
    slot = next(name for name in tensors if name.startswith(f"table_optimizer.state.{BIASED}.user.weight."))
    assert torch.equal(tensors[slot][: len(old[user])], old[slot])
    assert (tensors[slot][len(old[user]) :] == 0).all()
    start = summary["warm_start"]
    assert (start["added"], start["removed"], start["changed"]) == (["shops", "shop"], ["hour"], [])
    assert start["grown"]["user"] == [len(old[user]), len(tensors[user])]
    assert start["fresh"]["dense_arch.model._mlp.0._linear.weight"][0] == [8, 1]
    text = "\n".join(lines)
    for name in (str(earlier.path), "new features: shops, shop", "left out: hour", "table user:"):
        assert name in text


def test_training_continues_better_than_it_started_anew(tmp_path, yesterday):
    recipe, earlier = yesterday
    summary = trained(recipe, tmp_path, warm_start=earlier)
    first, *_ = RunFolder(tmp_path / "new").metrics()
    assert first["step"] == 0
    assert first["auc"] == earlier.read_json(SUMMARY)["validation"]["auc"]
    config = RunFolder(tmp_path / "new").read_json(CONFIG)
    assert config["warm_start"]["folder"] == summary["warm_start"]["folder"] == str(earlier.path.resolve())


def test_a_feature_whose_rows_changed_starts_again(tmp_path, yesterday):
    recipe, earlier = yesterday
    features = replace(
        shop.FEATURES,
        features=tuple(
            replace(feature, seed=1) if feature.name == "city" else feature
            for feature in shop.FEATURES.features
        ),
    )
    changed = untrained(replace(recipe, data=replace(recipe.data, features=features)))
    summary = trained(changed, tmp_path, warm_start=earlier)
    assert summary["warm_start"]["changed"] == ["city"]
    tensors, old = read(RunFolder(tmp_path / "new"), last=True)[0], read(earlier, last=True)[0]
    assert not torch.equal(*(values[f"model.{BIASED}.city.weight"] for values in (tensors, old)))
    assert torch.equal(*(values[f"model.{BIASED}.tags.weight"] for values in (tensors, old)))


def test_replaced_features_leave_only_the_tables(tmp_path, yesterday):
    _, earlier = yesterday
    *kept, _ = shop.FEATURES.features
    features = replace(shop.FEATURES, features=(*kept, Hashed(name="shop", num_embeddings=8)))
    summary = trained(
        untrained(shop_recipe(tmp_path, today(), features=features)), tmp_path, warm_start=earlier
    )
    assert summary["warm_start"]["tables_only"]
    tensors, old = read(RunFolder(tmp_path / "new"), last=True)[0], read(earlier, last=True)[0]
    assert torch.equal(*(values[f"model.{BIASED}.city.weight"] for values in (tensors, old)))
    assert not torch.equal(
        *(values["model.over_arch.model.0._mlp.0._linear.weight"] for values in (tensors, old))
    )


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model": WideDeepConfig()}, "WideDeepConfig"),
        ({"model": replace(shop.recipe().model, embedding_dim=4)}, "8"),
        ({"features": tuple(reversed(shop.FEATURES.features))}, "order"),
    ],
)
def test_what_does_not_fit_is_an_error(tmp_path, yesterday, changes, named):
    recipe, earlier = yesterday
    if "features" in changes:
        features = replace(shop.FEATURES, features=changes["features"])
        changes = {"data": replace(recipe.data, features=features)}
    with pytest.raises(ValueError, match=named):
        trained(replace(recipe, **changes), tmp_path, warm_start=earlier)


def test_values_of_another_type_are_an_error(tmp_path, yesterday):
    _, earlier = yesterday
    table = shop.shop(300)
    table = table.set_column(table.column_names.index("user"), "user", pa.array(np.arange(300) % 7))
    with pytest.raises(ValueError, match="'user'"):
        trained(shop_recipe(tmp_path, table), tmp_path, warm_start=earlier)


def test_another_optimizer_starts_without_state(tmp_path, yesterday):
    recipe, earlier = yesterday
    other = untrained(recipe, tables=Adam(lr=0.01), dense=DenseOptimizer(kind="adagrad"))
    summary = trained(other, tmp_path, warm_start=earlier)
    assert f"{BIASED}.user.weight" in summary["warm_start"]["fresh_state"]
    tensors, old = read(RunFolder(tmp_path / "new"), last=True)[0], read(earlier, last=True)[0]
    assert torch.equal(*(values[f"model.{BIASED}.user.weight"] for values in (tensors, old)))
    trained(
        replace(recipe, tables=SGD(lr=0.01), dense=DenseOptimizer(kind="sgd")),
        tmp_path,
        "sgd",
        warm_start=earlier,
    )


def test_the_best_weights_continue_with_the_last_state(tmp_path):
    recipe = shop_recipe(tmp_path, shop.shop(900))
    recipe = replace(recipe, training=replace(recipe.training, evaluate_every=2, epochs=6))
    recipe = replace(recipe, dense=DenseOptimizer(lr=0.3))
    summary = trained(recipe, tmp_path, "r")
    assert summary["best_step"] < summary["step"]  # or the test tests nothing
    start = trained(untrained(recipe), tmp_path, warm_start=RunFolder(tmp_path / "r"))["warm_start"]
    assert (start["step"], start["state_step"]) == (summary["best_step"], summary["step"])
    earlier, new = RunFolder(tmp_path / "r"), RunFolder(tmp_path / "new")
    found, best, last = read(new, last=True)[0], read_model(earlier), read(earlier, last=True)[0]
    for name, tensor in found.items():
        assert torch.equal(tensor, (best if name.startswith("model.") else last)[name]), name


def read_model(run):
    folder = find_checkpoint(run.path)
    manifest = read_manifest(folder)
    return {
        name: read_rows(folder, manifest, name, (0, record.shape[0] if record.shape else 1))
        for name, record in manifest.tensors.items()
    }


def test_the_fit_on_all_rows_starts_there_too(tmp_path, yesterday):
    recipe, earlier = yesterday
    trained(untrained(recipe), tmp_path, warm_start=earlier, final="all")
    final = finished_refit(RunFolder(tmp_path / "new"))
    tensors, old = read(final, last=True)[0], read(earlier, last=True)[0]
    assert torch.equal(*(values[f"model.{BIASED}.tags.weight"] for values in (tensors, old)))


def test_items_of_a_log_keep_their_rows(tmp_path):
    rng = np.random.default_rng(0)

    def log(first, num_items):
        users = np.repeat(np.arange(60), 8)
        items = first + rng.integers(0, num_items, len(users))
        path = tmp_path / f"{first}.parquet"
        pq.write_table(pa.table({"user": users, "item": items, "time": np.arange(len(users))}), path)
        return Recipe(
            name="log",
            data=Log(log=(str(path),), history=6),
            model=SASRecConfig(embedding_dim=8),
            loss=NextItem(),
            tables=Adam(lr=0.01),
        )

    recipe = log(0, 20)
    trained(recipe, tmp_path, "r")
    earlier = RunFolder(tmp_path / "r")
    summary = trained(untrained(log(10, 20)), tmp_path, warm_start=earlier)
    (old, new), *_ = summary["warm_start"]["grown"].values()
    assert new == old + 10
    tensors, before = read(RunFolder(tmp_path / "new"), last=True)[0], read(earlier, last=True)[0]
    name = next(name for name in tensors if name.startswith("model.") and name.endswith("item.weight"))
    assert torch.equal(tensors[name][:old], before[name])


def test_boosted_trees_need_the_same_features(tmp_path):
    pytest.importorskip("lightgbm")
    features = Features(
        labels=(Label(column="clicked"),),
        features=(Vocabulary(name="user"), Number(name="price", missing=0.0)),
    )
    recipe = shop_recipe(
        tmp_path, shop.shop(900), features=features, model=WideDeepConfig(fit_wide=True, fit_trees=5)
    )
    trained(recipe, tmp_path, "r")
    earlier = RunFolder(tmp_path / "r")
    trained(untrained(recipe), tmp_path, warm_start=earlier)
    tensors, old = read(RunFolder(tmp_path / "new"), last=True)[0], read(earlier, last=True)[0]
    assert torch.equal(*(values["model.trees.values"] for values in (tensors, old)))
    more = replace(features, features=(*features.features, Vocabulary(name="city")))
    with pytest.raises(ValueError, match="city"):
        trained(replace(recipe, data=replace(recipe.data, features=more)), tmp_path, "x", warm_start=earlier)


def test_the_command_takes_a_run_and_a_resumed_run_keeps_it(tmp_path, capsys):
    small = ["tests/train/small.py:small", "--runs", str(tmp_path), "--quiet"]
    assert train([*small, "--name", "r"]) == 0
    assert train([*small, "--name", "new", "--from", "r", "--training.end-step", "4"]) == 0
    assert "weights of step 10" in capsys.readouterr().out
    resume = ["--resume", "--name", "new", "--runs", str(tmp_path), "--quiet"]
    assert train([*resume, "--training.end-step", "8"]) == 0
    start = RunFolder(tmp_path / "new").read_json(SUMMARY)["warm_start"]
    assert start["folder"] == str((tmp_path / "r").resolve())
    with pytest.raises(ValueError, match="missing"):
        train([*small, "--from", "missing"])
    with pytest.raises(ValueError, match="--from"):
        train(["--resume", "--name", "r", "--runs", str(tmp_path), "--from", "new"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "r"]
